"""The training benchmarks: each part runs with tiny sizes, clocks and counts of operations are right."""

import json
import math
import sys
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.train.conftest import BLOCK, write_corpus

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from clock import Clock, now
from draft_rivals import Sizes, write_case
from draft_step import Case, ours, products
from throughput import Setting
from train import main
from work import per_anchor, per_token

SIZES = Sizes(tokens=64, anchors=8, block_size=BLOCK, layers=2, vocabulary=640, hidden=192, inner=256)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", samples=40)


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        ("strategies", ["sorted", "shuffled", "bucketed, 6", "bucketed, auto", "packed"]),
        ("split", ["target", "draft forward", "backward", "bucketed, auto", "packed"]),
        ("composition", ["sorted", "bucketed", "packed", "hold-out loss"]),
    ],
)
def test_each_part_prints_its_table(part, shown, corpus, target_dir, capsys):
    words = [part, "--corpus", corpus, "--target", target_dir, "--samples", "40", "--token-budget", "300"]
    words += ["--block-size", BLOCK, "--seeds", "2", "--epochs", "1", "--steps", "1"]
    main(list(map(str, words)))
    printed = capsys.readouterr().out
    assert all(word in printed for word in shown), printed
    assert "nan" not in printed and "inf " not in printed


def test_contenders_take_a_timed_step(tmp_path):
    write_case(tmp_path, SIZES)
    config = json.loads((tmp_path / "config.json").read_text())
    for contender in (ours, products):
        step, clock = contender(Case(tmp_path)), Clock()
        began = now()
        loss, norm = step(clock)
        took = now() - began
        assert 0 < sum(clock.seconds.values()) <= took
        assert {"forward", "backward"} <= clock.seconds.keys()
        if contender is ours:
            assert abs(loss - math.log(config["vocab_size"])) < 2 and norm > 0


@given(st.recursive(st.just([]), lambda inner: st.lists(st.tuples(st.sampled_from("ab"), inner), max_size=4), max_leaves=20))
def test_a_clock_counts_each_moment_once(stretches):
    """Time that goes on by one at every look: each stretch has one of its own, and one more after each that is inside it."""
    expected = dict.fromkeys("ab", 0)

    def run(parts: list) -> None:
        for name, inner in parts:
            expected[name] += 1 + len(inner)
            with watch.time(name):
                run(inner)

    watch = Clock()
    with mock.patch("clock.now", count().__next__):
        run(stretches)
    assert {name: watch.seconds.get(name, 0) for name in "ab"} == expected


def test_operations_are_those_that_torch_counts(corpus, target_dir, tmp_path):
    """Of one sample with all its anchors. Torch counts some hidden scores too, at most those of the whole sample for each
    block, but not the target's attention, which is one operation on a CPU."""
    from dflash_trainer.prefetch import make_micro_batch

    setting = Setting(corpus, str(target_dir), samples=1, token_budget=400, slots=1, block_size=BLOCK)
    store, stepper = setting.make_store(tmp_path / "tokens"), setting.make_stepper(torch.device("cpu"))
    plan = setting.make_plan(store, tmp_path / "plan", epochs=1, anchor_density=1.0)
    batch = make_micro_batch(next(iter(plan.rows(0))), 0, plan, store)
    with FlopCounterMode(display=False) as counter:
        stepper.gradient([batch])
    length, config, clipped = sum(batch.lengths), stepper.draft.config, int((batch.weights == 0).sum())
    rest = length * per_token(stepper.target._decoder.layers, config, 0)
    rest -= 4 * clipped * config.hidden_size * config.vocab_size  # slots that need no logits
    seen, whole = (  # per_anchor takes a sample twice as long as what a block sees of it on average
        rest + sum(per_anchor(config, 2 * tokens) for tokens in contexts)
        for contexts in (batch.anchors.tolist(), [length] * len(batch.anchors))
    )
    assert seen <= counter.get_total_flops() <= whole < 1.2 * seen
