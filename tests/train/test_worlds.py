"""The same run on 1, 2, 4 and 8 workers: curves, metrics, and where it goes on after a stop."""

import pytest

from tests.train.conftest import last_tensors, reported, same_tensors

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
