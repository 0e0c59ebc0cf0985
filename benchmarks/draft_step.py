"""One draft training step, taken by us or by a public trainer, on the hidden states, anchors and weights of one file.

`train.py` runs this file once for each contender, the public ones in an environment that holds them:

    python3 -m venv rivals
    rivals/bin/pip install torch==2.13.0 transformers==5.8.1 datasets==5.1.0 accelerate loguru==0.7.3 pydantic-settings
    rivals/bin/pip install openai psutil
    rivals/bin/pip install --no-deps specforge==0.2.0 speculators==0.9.0 hs-connectors==0.9.0

`python draft_step.py NAME CASE` takes a step for each line that it reads and prints `{"forward": …, "backward": …,
"optimizer": …, "other": …, "loss": …, "norm": …, "peak": …}`: seconds, the loss and the gradient's norm before the update,
and the most memory in bytes that any step so far held above what was there before the first. `CASE` is a directory
that `draft_rivals.py` wrote: `config.json` as a draft's, and `case.safetensors`.

What differs between the contenders, and is left as each has it:
- SpecForge computes the logits of every slot, also of slot 0, which carries no loss, and again in the backward pass;
- speculators takes its labels from the verifier's last hidden state, so it runs the LM head over the context too (here the
  tokens *are* those labels), holds all logits at once, and divides the loss by the number of slots, not by their weights
  (put right before the comparison). Its fused losses need Triton; on a CPU it has the plain ones;
- both lay every block's keys against every block's queries under a mask. Their flex attention has no backward pass on a
  CPU; of `sdpa` and `eager` the faster is used, as named in `ATTENTION`.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import torch
from clock import Clock
from safetensors.torch import load_file

Step = Callable[[Clock], tuple[float, float]]
ATTENTION = {"specforge": "sdpa", "speculators": "sdpa"}
CLIP, LEARNING_RATE, BETAS = 1.0, 6e-4, (0.9, 0.95)


class Case:
    """What a step starts from.

    ids: int64 [S], all of them carry loss; anchors: int64 [A]; features: [S, K·H]; last: [S, H], the verifier's last hidden
    states, whose best tokens are the next ids; table: [V, H], embedding and LM head; draft: the parameters by name.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.config = json.loads((directory / "config.json").read_text())
        tensors = load_file(directory / "case.safetensors")
        self.ids, self.anchors, self.features, self.last, self.table = map(
            tensors.pop, ("ids", "anchors", "features", "last", "table")
        )
        self.draft = tensors
        self.gamma = self.config["gamma"]  # of the slots' weights
        self.mean_weight = torch.exp(-torch.arange(self.config["block_size"] - 1) / self.gamma).mean().item()


def ours(case: Case) -> Step:
    """Our step as training takes it, with a target that already knows its features."""
    import numpy as np

    import dflash_trainer.step
    from dflash_trainer.config import DraftConfig
    from dflash_trainer.draft import DraftModel
    from dflash_trainer.micro_batch import Sample, assemble
    from dflash_trainer.step import Recipe, Stepper

    draft = DraftModel(DraftConfig.load(case.directory))
    draft.load_state_dict(case.draft)
    target = SimpleNamespace(head=case.table, features=lambda batch: case.features, embed=lambda tokens: case.table[tokens])
    sample = Sample(case.ids.numpy(), np.array([0, len(case.ids)]), case.anchors.numpy())
    batch = assemble([sample], packed=True, width=len(case.ids), block_size=case.config["block_size"])
    stepper = Stepper(draft, target, Recipe(LEARNING_RATE, 0.0, CLIP), total_steps=1 << 20)
    parts = [(dflash_trainer.step, "block_loss", "forward"), (torch.Tensor, "backward", "backward")]
    parts.append((torch.optim.AdamW, "step", "optimizer"))

    def step(clock: Clock) -> tuple[float, float]:
        with clock.wrapping(parts), clock.time("other"):
            result = stepper.step(0, [batch])
        return result.loss, result.gradient_norm

    return step


def rival_step(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], scale: float) -> Step:
    """A public model's forward pass, backward pass, clipping and update; its loss and gradient are `scale` times ours."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True)

    def step(clock: Clock) -> tuple[float, float]:
        with clock.time("forward"):
            loss = loss_of()
        with clock.time("backward"):
            loss.backward()
        with clock.time("other"):
            norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP * scale)
        with clock.time("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        return loss.item() / scale, norm.item() / scale

    return step


def qwen3(case: Case, name: str):
    """The draft's layers as the public models describe them."""
    from transformers import Qwen3Config

    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    keys += ("head_dim", "rms_norm_eps", "rope_theta", "vocab_size", "max_position_embeddings", "layer_types")
    keys += ("num_target_layers", "block_size", "dflash_config")
    config = Qwen3Config(**{key: case.config[key] for key in keys})
    config._attn_implementation = ATTENTION[name]
    return config


def specforge(case: Case) -> Step:
    """`OnlineDFlashModel` with its defaults: objective in chunks of 128 blocks, recomputed in the backward pass."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    draft = DFlashDraftModel(qwen3(case, "specforge"))
    draft.load_state_dict(case.draft)
    model = OnlineDFlashModel(
        draft,
        head_of(case.table),
        torch.nn.Embedding.from_pretrained(case.table),
        case.config["dflash_config"]["mask_token_id"],
        block_size=case.config["block_size"],
        attention_backend=ATTENTION["specforge"],
        num_anchors=len(case.anchors),
        loss_decay_gamma=case.gamma,
    )
    anchors = case.anchors[None], torch.ones_like(case.anchors, dtype=torch.bool)[None]
    model._sample_anchor_positions = lambda *arguments: anchors
    inputs = case.ids[None], case.features[None], torch.ones(1, len(case.ids))
    return rival_step(model, lambda: model(*inputs)[0], 1.0)


def speculators(case: Case) -> Step:
    """speculators' `DFlashDraftModel` with cross-entropy on the verifier's best tokens."""
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import core
    from speculators.models.dflash.config import DFlashSpeculatorConfig

    config = DFlashSpeculatorConfig(
        transformer_layer_config=qwen3(case, "speculators"),
        draft_vocab_size=len(case.table),
        block_size=case.config["block_size"],
        aux_hidden_state_layer_ids=case.config["dflash_config"]["target_layer_ids"],
        mask_token_id=case.config["dflash_config"]["mask_token_id"],
    )
    model = core.DFlashDraftModel(config)
    verifier = {f"{name}.weight": case.table for name in ("embed_tokens", "lm_head", "verifier_lm_head")}
    verifier["verifier_norm.weight"] = torch.ones(case.table.shape[1])
    model.load_state_dict(case.draft | verifier, assign=False)
    anchors = case.anchors, torch.ones_like(case.anchors, dtype=torch.bool)
    core.select_anchors = lambda *arguments: anchors
    inputs = {
        "hidden_states": case.features[None],
        "input_ids": case.ids[None],
        "loss_mask": torch.ones(1, len(case.ids)),
        "verifier_last_hidden_states": case.last[None],
        "document_ids": torch.zeros(1, len(case.ids), dtype=torch.int64),
        "loss_config": resolve_loss_config("ce", "eager"),
        "gamma": case.gamma,
        "max_anchors": len(case.anchors),
    }
    return rival_step(model, lambda: model(**inputs)[1], case.mean_weight)


def head_of(table: torch.Tensor) -> torch.nn.Linear:
    """A frozen LM head."""
    head = torch.nn.Linear(*reversed(table.shape), bias=False)
    head.weight = torch.nn.Parameter(table, requires_grad=False)
    return head


def products(case: Case) -> Step:
    """The matrix products that no such step can leave out, and nothing else.

    Forward, and backward for the inputs and the weights that take a gradient; attention over what a block sees and no more.
    The head over the slots that carry loss, its weights take none. Operands are the same few matrices again and again.
    """
    config = case.config
    hidden, heads, kv, hd = (
        config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    size, tokens, layers = config["block_size"], len(case.ids), config["num_hidden_layers"]
    rows, inner = len(case.anchors) * size, config["intermediate_size"]
    context = round(case.anchors.double().mean().item())
    linear = [(rows, hidden, heads * hd), (rows, heads * hd, hidden), (rows, hidden, inner), (rows, hidden, inner)]
    linear += [(rows, inner, hidden), *2 * [(rows, hidden, kv * hd)], *2 * [(tokens, hidden, kv * hd)]]
    operands: dict[tuple[int, int], torch.Tensor] = {}

    def matrix(*shape: int) -> torch.Tensor:
        if shape not in operands:
            operands[shape] = torch.randn(shape)
        return operands[shape]

    def product(left: int, inside: int, right: int) -> None:
        matrix(left, inside) @ matrix(inside, right)

    def forward() -> None:
        product(tokens, case.features.shape[1], hidden)
        for _ in range(layers):
            for shape in linear:
                product(*shape)
            for _ in range(kv):  # scores and mixture: the heads of a group lie in one matrix
                product(rows * heads // kv, hd, context)
                product(rows * heads // kv, context, hd)
        for _ in range(0, CHUNKS):
            product(len(case.anchors) * (size - 1) // CHUNKS, hidden, config["vocab_size"])

    def backward() -> None:
        for _ in range(CHUNKS):
            product(len(case.anchors) * (size - 1) // CHUNKS, config["vocab_size"], hidden)
        for _ in range(layers):
            for left, inside, right in linear:
                product(left, right, inside)
                product(inside, left, right)
            for _ in range(kv):
                grouped = rows * heads // kv
                product(grouped, hd, context)
                product(context, grouped, hd)
                product(grouped, context, hd)
                product(context, grouped, hd)
        product(case.features.shape[1], tokens, hidden)

    def step(clock: Clock) -> tuple[float, float]:
        with torch.no_grad():
            for name, run in (("forward", forward), ("backward", backward)):
                with clock.time(name):
                    run()
        return math.nan, math.nan

    return step


CHUNKS = 16  # of the head's rows
CONTENDERS = {"ours": ours, "specforge": specforge, "speculators": speculators, "products": products}


def memory(name: str) -> int:
    """Bytes that this process holds now (`VmRSS`) or held at most (`VmHWM`); 0 where the system does not say."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return 1024 * int(line.split()[1])
    return 0


def main() -> None:
    """Take a step for each line of standard input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CONTENDERS)
    parser.add_argument("case", type=Path)
    options = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # what the packages print is not an answer
    torch.manual_seed(0)
    try:
        step = CONTENDERS[options.name](Case(options.case))
    except ImportError as fault:
        sys.exit(f"{options.name} cannot be imported: {fault}")
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # what loading took is not the step's
    before = memory("VmRSS")
    for _ in sys.stdin:
        clock = Clock()
        loss, norm = step(clock)
        found = {name: clock.seconds.get(name, 0.0) for name in ("forward", "backward", "optimizer", "other")}
        print(json.dumps(found | {"loss": loss, "norm": norm, "peak": memory("VmHWM") - before}), file=answers, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
