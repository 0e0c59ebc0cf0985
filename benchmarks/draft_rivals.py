"""Our draft training step beside public ones, and beside the bare matrix products; see `draft_step.py`.

Every contender is a process of its own and waits while another takes its step, so that a slow moment of the machine meets
each alike. The first step of each warms up and counts for memory only.
"""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from show import print_table

from dflash_trainer.blocks import decay_gamma
from dflash_trainer.config import DraftConfig
from dflash_trainer.draft import DraftModel

HERE = Path(__file__).resolve().parent
PARTS = ("forward", "backward", "optimizer", "other")
GOAL = 0.5  # of the first rival's time and memory


class Sizes(NamedTuple):
    """The step that is compared; as `DESIGN` has it by default."""

    tokens: int = 1024
    anchors: int = 512
    block_size: int = 16
    layers: int = 2
    vocabulary: int = 49_152
    hidden: int = 576
    inner: int = 1536


def configure(sizes: Sizes) -> DraftConfig:
    """A draft of these sizes, otherwise the default target's."""
    values = {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.hidden // 64,
        "num_key_value_heads": max(1, sizes.hidden // 192),
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "max_position_embeddings": 8192,
        "vocab_size": sizes.vocabulary,
        "initializer_range": 0.04,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_target_layers": 30,
        "block_size": sizes.block_size,
        "mask_token_id": 3,
        "target_layer_ids": tuple(range(1, 1 + sizes.layers)),
        "layer_types": ("full_attention",) * sizes.layers,
        "sliding_window": None,
    }
    return DraftConfig(**values)


def write_case(directory: Path, sizes: Sizes) -> None:
    """Hidden states, tokens, anchors and weights for every contender.

    The tokens are the verifier's own best ones, and no block is clipped, so that all have the same labels and weights.
    """
    config, draw = configure(sizes), torch.Generator().manual_seed(0)
    features = torch.randn(sizes.tokens, sizes.layers * sizes.hidden, generator=draw)
    last = torch.randn(sizes.tokens, sizes.hidden, generator=draw)
    table = torch.randn(sizes.vocabulary, sizes.hidden, generator=draw) * config.initializer_range
    normed = torch.nn.functional.rms_norm(last, last.shape[1:], eps=config.rms_norm_eps)
    best = torch.cat([(part @ table.T).argmax(dim=1) for part in normed.split(128)])
    choice = torch.randperm(sizes.tokens - sizes.block_size, generator=draw)[: sizes.anchors]
    tensors = {
        "features": features,
        "last": last,
        "table": table,
        "ids": torch.cat([best[:1], best[:-1]]),
        "anchors": choice.sort().values,
        **{name: tensor.detach() for name, tensor in DraftModel(config).initialise(0).state_dict().items()},
    }
    save_file(tensors, directory / "case.safetensors")
    stated = config.to_json() | {"gamma": decay_gamma(sizes.block_size)}
    (directory / "config.json").write_text(json.dumps(stated))


class Contender:
    """A process that takes the step when it is told to."""

    def __init__(self, name: str, python: str, case: Path):
        self.name, self.steps = name, []
        environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
        self._process = subprocess.Popen(
            [python, "-W", "ignore", str(HERE / "draft_step.py"), name, str(case)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(case / f"{name}.txt").open("w"),
            text=True,
            env=environment,
        )
        self._said = case / f"{name}.txt"

    def step(self) -> bool:
        """Take a step and keep what it came to; False where the process has ended, and why is printed."""
        try:
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
            self.steps.append(json.loads(self._process.stdout.readline()))
        except (OSError, ValueError):
            self.close()
            print(f"skipped: {self.name}: {(self._said.read_text().strip().splitlines() or ['ended'])[-1]}", flush=True)
            return False
        return True

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def seconds(self, part: str | None = None) -> float:
        """The median of a part over the counted steps, or of all parts together."""
        return median(sum(step[name] for name in ([part] if part else PARTS)) for step in self.steps[1:])

    @property
    def peak(self) -> float:
        """Bytes."""
        return self.steps[-1]["peak"]


def compare(rivals_python: str | None, sizes: Sizes, rounds: int) -> None:
    """Print the table, the ratios, and whether all computed the same."""
    with tempfile.TemporaryDirectory() as folder:
        case = Path(folder)
        write_case(case, sizes)
        pythons = {"ours": sys.executable, "products": sys.executable}
        if rivals_python:
            pythons |= dict.fromkeys(("specforge", "speculators"), rivals_python)
        there = [Contender(name, python, case) for name, python in pythons.items()]
        for _ in range(1 + rounds):
            there = [contender for contender in there if contender.step()]
        for contender in there:
            contender.close()
    rows = [
        [
            contender.name,
            *(f"{contender.seconds(part):.2f}" for part in PARTS),
            f"{contender.seconds():.2f}",
            f"{contender.peak / 1e9:.2f}" if contender.peak > 0 else "",
            f"{contender.steps[0]['loss']:.6f}",
            f"{contender.steps[0]['norm']:.5f}",
        ]
        for contender in there
    ]
    stated = ", ".join(f"{value:,} {name}".replace("_", " ") for name, value in sizes._asdict().items())
    headings = ["contender", *PARTS, "seconds", "peak GB", "loss", "gradient norm"]
    print_table(f"One draft training step, fp32, median of {rounds}: {stated}", headings, rows)
    print_ratios({contender.name: contender for contender in there})


def print_ratios(there: dict[str, Contender]) -> None:
    """Ours over each of the others."""
    if "ours" not in there:
        return
    ours = there.pop("ours")
    for name, other in there.items():
        line = f"ours : {name} = {ours.seconds() / other.seconds():.2f} of the time"
        if name != "products":
            line += f", {ours.peak / max(other.peak, 1):.2f} of the memory (goal {GOAL} of SpecForge's)"
            first, second = ours.steps[0], other.steps[0]
            line += f"; losses differ by {abs(first['loss'] / second['loss'] - 1):.1e}"
            line += f", gradient norms by {abs(first['norm'] / second['norm'] - 1):.1e}"
        print(line)
