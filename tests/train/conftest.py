"""A tiny random target with a byte-level tokenizer, its store and its plans: what every training test works on."""

import json
import multiprocessing
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM
from workers import train_rank

from dflash_prep.manifest import Plan
from dflash_prep.sample_maker import Options
from dflash_prep.store import Store
from dflash_prep.tokenize import tokenize
from dflash_prep.tokenizer import load_tokenizer
from dflash_trainer.checkpoint import newest_checkpoint
from dflash_trainer.cli import train
from tests.prep.support import make_plan as write_and_open

BLOCK = 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|spare|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_target(directory: Path, seed: int = 0) -> Path:
    """A Hugging Face directory of a six-layer Llama with random, loud weights."""
    directory.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": "<|im_start|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        bos_token_id=257,
        eos_token_id=258,
        pad_token_id=256,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def write_corpus(path: Path, samples: int, seed: int = 0) -> Path:
    """Conversations of random words, one to three turns."""
    random = np.random.default_rng(seed)
    words = lambda n: " ".join("".join(chr(97 + c) for c in random.integers(0, 26, 3)) for _ in range(n))  # noqa: E731
    with path.open("w") as file:
        for _ in range(samples):
            messages = []
            for _ in range(random.integers(1, 4)):
                messages.append({"role": "user", "content": words(random.integers(1, 5))})
                messages.append({"role": "assistant", "content": words(random.integers(1, 12))})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory) -> Path:
    return make_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def store(tmp_path_factory, target_dir) -> Store:
    folder = tmp_path_factory.mktemp("store")
    corpus = write_corpus(folder / "corpus.jsonl", samples=60)
    tokenize((str(corpus),), load_tokenizer(str(target_dir)), folder / "tokens", Options())
    return Store(folder / "tokens")


@pytest.fixture(scope="session")
def make_plan(tmp_path_factory, store):
    """Plans of the tiny store, by options."""

    def make(**options) -> Plan:
        path = tmp_path_factory.mktemp("plan") / "plan"
        defaults = {"epochs": 2, "slots": 4, "token_budget": 600, "block_size": BLOCK, "anchor_density": 0.5}
        return write_and_open(store.path, path, **defaults | options)

    return make


@pytest.fixture(scope="session")
def draft_json(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("config") / "draft.json"
    path.write_text(json.dumps({"num_hidden_layers": 2, "block_size": BLOCK}))
    return path


@pytest.fixture(scope="session")
def start_ranks(target_dir, draft_json):
    """Start a run's ranks as torchrun would, but from a server that has everything imported: a second, not ten.

    `fault(rank, batch)` is called before each micro-batch. Rank r prints to the file `output.r`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["workers", "dflash_trainer.train", "transformers.models.llama", "torch.utils.tensorboard"]
    )

    def start(plan: Plan, output: Path, *options: str, fault: Callable | None = None, size: int = 2) -> list:
        arguments = [
            "--manifest-dir",
            plan.path,
            "--target",
            target_dir,
            "--draft-config",
            draft_json,
            "-o",
            output,
            *options,
        ]
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        words = list(map(str, arguments))
        ranks = [context.Process(target=train_rank, args=(words, rank, size, port, output, fault)) for rank in range(size)]
        for rank in ranks:
            rank.start()
        return ranks

    return start


@pytest.fixture(scope="session")
def run_ranks(start_ranks):
    """Run all ranks to their end; returns the exit code that they agree on, and each one's output."""

    def run(plan: Plan, output: Path, *options: str, **how) -> tuple[int, list[str]]:
        ranks = start_ranks(plan, output, *options, **how)
        for rank in ranks:
            rank.join(timeout=120)
        (code,) = {rank.exitcode for rank in ranks}
        return code, [Path(f"{output}.{rank}").read_text() for rank in range(len(ranks))]

    return run


@pytest.fixture
def train_here(target_dir, draft_json):
    """Train in this process, all slots on one rank."""

    def run(plan: Plan, output: Path, *options: str):
        arguments = ["--manifest-dir", plan.path, "--target", target_dir, "--draft-config", draft_json, "-o", output]
        return CliRunner().invoke(train, list(map(str, [*arguments, "--nproc-per-node", "1", *options])))

    return run


def last_tensors(run: Path) -> dict[str, torch.Tensor]:
    """The parameters and moments of a run's newest checkpoint."""
    return load_file(newest_checkpoint(run) / "optimizer.safetensors")


def same_tensors(run: Path, other: Path) -> bool:
    """Whether two runs ended with the same bits."""
    one, two = last_tensors(run), last_tensors(other)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def reported(run: Path) -> list[dict]:
    """The rows of a run's metrics, strict JSON."""
    refuse = lambda name: pytest.fail(f"{name} is no JSON")  # noqa: E731
    return [json.loads(line, parse_constant=refuse) for line in (run / "metrics.jsonl").open()]


def state_of(checkpoint: Path) -> dict:
    """What a checkpoint's trainer.json says."""
    return json.loads((checkpoint / "trainer.json").read_text())
