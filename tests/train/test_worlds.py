"""The same run on 1, 2, 4 and 8 workers: curves, metrics, and where it goes on after a stop."""

import json

import numpy as np
import pytest

from dflash_prep.sample_maker import Options
from dflash_prep.tokenize import tokenize
from dflash_prep.tokenizer import load_tokenizer
from tests.prep.support import make_plan as write_plan
from tests.train.conftest import BLOCK, last_tensors, reported, same_tensors

STEPS = 50
EXACT = ("step", "epoch", "tokens", "padded_tokens", "anchors", "learning_rate", "bad_steps")
CLOSE = ("loss", "gradient_norm", "expected_acceptance")


@pytest.fixture(scope="module")
def plan(make_plan):
    found = make_plan(slots=8, token_budget=400, epochs=25, strategy="packed")
    assert found.total_steps >= STEPS
    return found


@pytest.fixture(scope="module")
def alone(plan, run_ranks, tmp_path_factory):
    """The run on one worker."""
    run = tmp_path_factory.mktemp("alone") / "run"
    assert run_ranks(plan, run, "--max-steps", STEPS, size=1)[0] == 0
    return run


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_first_steps_are_the_same_on_any_number_of_workers(size, plan, alone, run_ranks, tmp_path):
    code, said = run_ranks(plan, tmp_path / "run", "--max-steps", STEPS, size=size)
    assert code == 0, said
    expected, found = reported(alone), reported(tmp_path / "run")
    assert len(found) == len(expected) == STEPS
    assert len({row["loss"] for row in expected}) == STEPS  # it learns something
    for row, other in zip(expected, found, strict=True):
        for name in EXACT:
            assert row[name] == other[name]
        for name in CLOSE:
            assert other[name] == pytest.approx(row[name], rel=1e-4), (row["step"], name)
        assert other["slot_accuracy"] == pytest.approx(row["slot_accuracy"], abs=1e-4)
        assert len(other["rank_seconds"]) == size


def test_a_run_goes_on_bit_for_bit_on_four_workers(plan, run_ranks, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_ranks(plan, whole, "--max-steps", 5, size=4)[0] == 0
    assert run_ranks(plan, parts, "--max-steps", 2, size=4)[0] == 0
    assert run_ranks(plan, parts, "--max-steps", 5, "--resume", "auto", size=4)[0] == 0
    assert same_tensors(whole, parts)


def test_a_run_goes_on_with_another_number_of_workers(plan, alone, run_ranks, tmp_path):
    """2, then 8, then 1: as if one had taken all steps, but for the order in which float32 adds."""
    run = tmp_path / "run"
    for size, last in ((2, 4), (8, 9), (1, 15)):
        assert run_ranks(plan, run, "--max-steps", last, *(["--resume", "auto"] if size != 2 else []), size=size)[0] == 0
    rows = reported(run)
    assert [row["step"] for row in rows] == list(range(1, 16))
    for row, other in zip(reported(alone)[:15], rows, strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-4)
    assert last_tensors(run).keys() == last_tensors(alone).keys()


@pytest.fixture(scope="module", params=["packed", "bucketed"])
def sparse(request, tmp_path_factory, target_dir):
    """A plan of slots with one sample each, most of which have no anchor, and of empty slots."""
    folder, draw = tmp_path_factory.mktemp("sparse"), np.random.default_rng(0)
    with (folder / "corpus.jsonl").open("w") as file:
        for number in range(13):
            spans = (
                [10, 30] if number % 4 == 1 else [5, 6, 9, 10, 20, 21]
            )  # an anchor is a token whose next carries loss too
            file.write(json.dumps({"input_ids": draw.integers(0, 256, 36).tolist(), "loss_spans": spans}) + "\n")
    tokenize((str(folder / "corpus.jsonl"),), load_tokenizer(str(target_dir)), folder / "tokens", Options())
    how = {"strategy": request.param, "slots": 4, "token_budget": 40, "holdout": 0.1, "epochs": 3, "block_size": BLOCK}
    plan = write_plan(folder / "tokens", folder / "plan", **how)
    anchors = {}
    for epoch in range(3):
        for row in plan.rows(epoch):
            anchors.setdefault((epoch, row["step"]), [None] * 4)[row["slot"]] = row["anchors"] if row["samples"] else None
    steps = list(anchors.values())
    assert any(None in step for step in steps), "no slot is empty"
    assert any(0 in step for step in steps), "no slot is without an anchor"
    for size in (2, 4):
        ranks = [[any(step[rank::size]) for rank in range(size)] for step in steps]
        assert any(any(has) and not all(has) for has in ranks), "no rank is without an anchor beside one that has some"
    return plan


def test_ranks_without_an_anchor_and_empty_slots_change_nothing(sparse, run_ranks, train_here, tmp_path):
    often = ("--eval-every", "1")
    done = train_here(sparse, tmp_path / "1", *often)
    assert done.exit_code == 0, done.output
    expected = reported(tmp_path / "1")
    assert len(expected) == sparse.total_steps
    assert any(row["loss"] > 0 for row in expected)
    for size in (2, 4):
        code, said = run_ranks(sparse, tmp_path / str(size), *often, size=size)
        assert code == 0, said
        found = reported(tmp_path / str(size))
        for row, other in zip(expected, found, strict=True):
            assert all(row[name] == other[name] for name in EXACT)
            assert [other[name] for name in CLOSE] == pytest.approx([row[name] for name in CLOSE], rel=1e-4)
