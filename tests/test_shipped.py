"""The shipped corpus, and the three commands on it with no further options."""

import importlib.util
import io
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zstandard

from dflash_prep.embedded import PACKAGE
from dflash_prep.manifest import Plan
from dflash_prep.store import Store
from dflash_prep.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "data" / "demo.jsonl.zst"
NEEDS_TARGET = pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason="the default target is not installed")


def read_corpus() -> list[dict]:
    with DEMO.open("rb") as file:
        text = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), encoding="utf-8", newline="\n")
        return [json.loads(line) for line in text]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder as a user's clone is: the corpus at its place, and the first two commands run in it (for small steps)."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "data").mkdir()
    shutil.copy(DEMO, folder / "data")
    for words in (["dflash-prep", "tokenize"], ["dflash-prep", "plan-epochs", "--epochs", "6", "--slots", "2"]):
        done = subprocess.run(command(*words), cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folder


def command(name: str, *options: str) -> list[str]:
    return [str(Path(sys.executable).parent / name), *options]


def test_corpus_is_small_large_enough_and_spread():
    assert DEMO.stat().st_size <= 2_000_000
    samples = read_corpus()
    assert len(samples) >= 600
    assert len({sample["id"] for sample in samples}) == len(samples)
    turns = [sum(m["role"] == "assistant" for m in sample["messages"]) for sample in samples]
    assert min(turns) == 1
    assert sum(turn > 1 for turn in turns) > 100


def test_held_out_prompts_share_no_13_words_with_the_corpus():
    prompts = [json.loads(line) for line in (ROOT / "data" / "eval.jsonl").read_text(encoding="utf-8").split("\n") if line]
    assert len(prompts) >= 40
    grams = lambda text: {tuple(w[i : i + 13]) for w in [text.lower().split()] for i in range(len(w) - 12)}  # noqa: E731
    corpus = set().union(*(grams(m["content"]) for sample in read_corpus() for m in sample["messages"]))
    for prompt in prompts:
        assert not corpus & grams("\n".join(prompt["turns"])), prompt["id"]


@NEEDS_TARGET
def test_store_equals_transformers_sample_by_sample(folder):
    from transformers import AutoTokenizer

    from dflash_prep.embedded import default_target

    theirs, ours = AutoTokenizer.from_pretrained(default_target()), load_tokenizer(None)
    store, corpus = Store(folder / "data" / "tokens"), read_corpus()
    assert len(store) == len(corpus), "every shipped sample is kept"
    lengths = store.column("length")
    assert lengths.min() <= 60
    assert lengths.max() >= 2000
    for number, sample in enumerate(corpus):
        ids, spans = store.sample(number)
        assert ids.tolist() == theirs.apply_chat_template(sample["messages"], tokenize=True, return_dict=True)["input_ids"]
        said = [ours.backend.decode(ids[a:b].tolist(), skip_special_tokens=False) for a, b in spans.reshape(-1, 2)]
        assert said == [m["content"] + "<|im_end|>" for m in sample["messages"] if m["role"] == "assistant"]


@NEEDS_TARGET
def test_training_with_no_options_takes_its_first_step(folder):
    """The whole default run takes hours on a CPU; its first step shows that nothing is missing."""
    process = subprocess.Popen(
        command("dflash-train", "--manifest-dir", "data/manifests"),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + 600
        while not (metrics := [f for f in folder.glob("runs/*/metrics.jsonl") if f.stat().st_size]):
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < deadline, "no step in ten minutes"
            time.sleep(0.5)
    finally:
        process.kill()
        process.communicate()
    row = json.loads(metrics[0].read_text().splitlines()[0])
    plan = Plan(folder / "data" / "manifests")
    assert row["tokens"] == sum(r["tokens"] for r in plan.rows(0) if r["step"] == 0)
    assert len(row["slot_accuracy"]) == 15
    assert 5 < row["loss"] < 30
