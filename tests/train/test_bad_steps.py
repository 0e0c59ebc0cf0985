"""Steps whose loss or gradient is not finite: skipped, counted, and after too many in a row the end of the run."""

import pytest
import torch
from conftest import last_tensors, reported, same_tensors, state_of
from workers import Poison, watch_batches

from dflash_trainer.checkpoint import checkpoint_path
from dflash_trainer.step import Stepper


@pytest.fixture(scope="module")
def plan(make_plan):
    return make_plan(strategy="packed", token_budget=250)


@pytest.fixture
def poisoned(train_here):
    """Train in this process with spoiled micro-batches (step, slot)."""

    def run(plan, output, poison: Poison, *options: str):
        before = watch_batches(lambda stepper, batch: poison(0, stepper, batch))
        try:
            return train_here(plan, output, *options)
        finally:
            Stepper.accumulate = before

    return run


@pytest.mark.parametrize("poison", [{}, {"value": float("inf")}, {"loss": True}], ids=["nan", "inf", "loss"])
def test_a_bad_step_changes_no_parameter_and_no_moment(poison, plan, poisoned, train_here, tmp_path):
    poisons = Poison((2, 1), (3, 0), **poison)
    for last in ("2", "4"):
        done = poisoned(plan, tmp_path / last, poisons, "--max-steps", last)
        assert done.exit_code == 0, done.output
    assert same_tensors(tmp_path / "2", tmp_path / "4")
    assert [row["bad_steps"] for row in reported(tmp_path / "4")] == [0, 0, 1, 2]
    assert ("loss" if poisons.loss else "gradient_norm", None) in reported(tmp_path / "4")[2].items()
    assert done.stderr.splitlines()[-1].endswith("bad steps 2")
    counts = {
        key: state_of(checkpoint_path(tmp_path / "4", 4))[key] for key in ("step", "updates", "bad_steps", "bad_in_a_row")
    }
    assert counts == {"step": 4, "updates": 2, "bad_steps": 2, "bad_in_a_row": 2}


def test_the_schedule_goes_on_by_step_number(plan, poisoned, train_here, tmp_path):
    poisoned(plan, tmp_path / "bad", Poison((1, 0)), "--max-steps", "4")
    train_here(plan, tmp_path / "good", "--max-steps", "4")
    bad, good = ([row["learning_rate"] for row in reported(tmp_path / name)] for name in ("bad", "good"))
    assert bad == good
    assert good[0] == good[1] > good[2] > good[3]


@pytest.mark.parametrize("cut", ["1", "2", "3"])
def test_resume_after_bad_steps_is_bit_identical(cut, plan, poisoned, tmp_path):
    """Before the first update, between two and in the midst of a row: AdamW's count is not the step's number."""
    poison = Poison((0, 0), (2, 1), (3, 3))
    whole = poisoned(plan, tmp_path / "whole", poison, "--max-steps", "6")
    assert whole.exit_code == 0, whole.output
    poisoned(plan, tmp_path / "parts", poison, "--max-steps", cut)
    resumed = poisoned(plan, tmp_path / "parts", poison, "--max-steps", "6", "--resume", "auto")
    assert resumed.exit_code == 0, resumed.output
    assert same_tensors(tmp_path / "whole", tmp_path / "parts")
    rows = [[(row["loss"], row["bad_steps"]) for row in reported(tmp_path / name)] for name in ("whole", "parts")]
    assert rows[0] == rows[1]


def test_a_row_of_bad_steps_counts_on_after_a_resume(plan, poisoned, tmp_path):
    poison = Poison((1, 0), (2, 0), (3, 0))
    poisoned(plan, tmp_path / "run", poison, "--max-steps", "3")
    ended = poisoned(plan, tmp_path / "run", poison, "--resume", "auto", "--max-bad-steps", "3")
    assert ended.exit_code == 1
    assert "error: step 4: " in ended.stderr


def test_too_many_end_the_run_with_the_last_good_state(plan, poisoned, tmp_path):
    poison = Poison((2, 0), (4, 1), (5, 3), (6, 1), (6, 2))
    ended = poisoned(plan, tmp_path / "run", poison, "--max-bad-steps", "3")
    assert ended.exit_code == 1
    (line,) = [line for line in ended.stderr.splitlines() if not line.startswith("step ")]
    rows = {row["slot"]: row for row in plan.rows(0) if row["step"] == 6}
    samples = rows[1]["samples"] + rows[2]["samples"]
    named = ", ".join(map(str, samples[:8])) + (" …" if len(samples) > 8 else "")
    assert f"error: step 7: the loss or gradient of samples {named} is not finite, in 3 steps in a row" in line
    good = poisoned(plan, tmp_path / "good", Poison((2, 0)), "--max-steps", "4")
    assert good.exit_code == 0, good.output
    assert same_tensors(tmp_path / "good", tmp_path / "run")
    assert state_of(checkpoint_path(tmp_path / "run", 7))["bad_in_a_row"] == 0
    resumed = poisoned(plan, tmp_path / "run", poison, "--max-steps", "9", "--resume", "auto", "--max-bad-steps", "3")
    assert resumed.exit_code == 0, resumed.output
    patient = poisoned(plan, tmp_path / "patient", poison, "--max-steps", "9")
    assert patient.exit_code == 0, patient.output
    assert same_tensors(tmp_path / "patient", tmp_path / "run")


def test_numbers_that_are_finite_one_by_one(plan, poisoned, tmp_path):
    """No micro-batch is to blame where only the sum is too large."""
    most = torch.finfo(torch.float32).max / 3
    poison = Poison(*((0, slot) for slot in range(4)), value=most, loss=True)
    ended = poisoned(plan, tmp_path / "run", poison, "--max-bad-steps", "1")
    assert "of the sum over all slots is not finite" in ended.stderr


def test_all_ranks_skip_and_stop_alike(plan, poisoned, run_ranks, tmp_path):
    """Whichever rank holds the bad slot: the same line on both, and parameters as those of one process."""
    poison = Poison((1, 2), (3, 1), (4, 0), (4, 3))
    code, said = run_ranks(plan, tmp_path / "two", "--max-bad-steps", "2", fault=poison)
    assert code == 1
    ours = [[line for line in text.splitlines() if line.startswith("error: ")] for text in said]
    ended = poisoned(plan, tmp_path / "one", poison, "--max-bad-steps", "2")
    expected = [line.replace("/one/", "/two/") for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert ours == [expected, expected]
    assert len(expected) == 1
    one, two = last_tensors(tmp_path / "one"), last_tensors(tmp_path / "two")
    assert all(torch.allclose(one[name], two[name], rtol=1e-3, atol=1e-6) for name in one)
    state = state_of(checkpoint_path(tmp_path / "two", 5))
    assert (state["updates"], state["bad_steps"]) == (2, 3)


def test_two_ranks_resume_bit_for_bit(plan, run_ranks, tmp_path):
    poison = Poison((1, 1), (3, 2))
    assert run_ranks(plan, tmp_path / "whole", "--max-steps", "5", fault=poison)[0] == 0
    assert run_ranks(plan, tmp_path / "parts", "--max-steps", "2", fault=poison)[0] == 0
    assert run_ranks(plan, tmp_path / "parts", "--max-steps", "5", "--resume", "auto", fault=poison)[0] == 0
    assert same_tensors(tmp_path / "whole", tmp_path / "parts")
