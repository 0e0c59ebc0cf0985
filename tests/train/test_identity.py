"""A run goes on with a longer plan whose first epochs are its own, and with no other."""

import pytest
from conftest import last_tensors, reported, same_tensors, state_of

from dflash_prep.manifest import Plan
from dflash_trainer.checkpoint import newest_checkpoint
from dflash_trainer.step import Recipe, Stepper


@pytest.fixture(scope="module")
def plans(make_plan):
    return {epochs: make_plan(strategy="packed", epochs=epochs) for epochs in (1, 2, 3)}


def rates(plan: Plan) -> list[float]:
    """The learning rate of each step of a plan."""
    schedule = Stepper.__new__(Stepper)
    schedule.recipe, schedule._total_steps = Recipe(), plan.total_steps
    return [schedule.learning_rate(step) for step in range(plan.total_steps)]


@pytest.mark.parametrize("cut", [0, 3, None], ids=["start", "within", "end"])
def test_a_longer_plan_is_gone_on_with(cut, plans, train_here, tmp_path):
    short, long = plans[1], plans[3]
    cut = short.total_steps if cut is None else cut
    assert train_here(short, tmp_path, "--max-steps", str(cut)).exit_code == 0
    last = short.total_steps + 2
    done = train_here(long, tmp_path, "--resume", "auto", "--max-steps", str(last))
    assert done.exit_code == 0, done.output
    said = [line for line in done.stdout.splitlines() if "epochs" in line]
    assert said == [
        f"{long.path}: 3 epochs that begin with the run's 1; the learning rate now spans {long.total_steps} steps "
        f"instead of {short.total_steps}"
    ]
    rows = reported(tmp_path)
    assert [row["learning_rate"] for row in rows] == rates(short)[:cut] + rates(long)[cut:last]
    for row in rows:
        planned = [each for each in long.rows(row["epoch"]) if each["step"] == long.locate(row["step"] - 1)[1]]
        assert row["tokens"] == sum(each["tokens"] for each in planned)
    assert state_of(newest_checkpoint(tmp_path))["plan_fingerprint"] == long["fingerprint"]
    again = train_here(long, tmp_path, "--resume", "auto", "--max-steps", str(last + 1))
    assert again.exit_code == 0, again.output
    assert "instead of" not in again.stdout


def test_grown_before_the_first_step_it_is_the_long_plans_run(plans, train_here, tmp_path):
    for name, first in (("grown", 2), ("whole", 3)):
        assert train_here(plans[first], tmp_path / name, "--max-steps", "0").exit_code == 0
        assert train_here(plans[3], tmp_path / name, "--max-steps", "3", "--resume", "auto").exit_code == 0
    assert same_tensors(tmp_path / "grown", tmp_path / "whole")


def test_other_plans_are_refused(plans, make_plan, train_here, tmp_path):
    assert train_here(plans[2], tmp_path, "--max-steps", "1").exit_code == 0
    before = last_tensors(tmp_path)
    others = {
        "it has 1 epochs, not more than the 2": plans[1],
        "its options differ in more than --epochs": make_plan(strategy="packed", epochs=3, seed=1),
        "more than --epochs": make_plan(strategy="packed", epochs=3, anchor_density=0.4),
        "differ in": make_plan(strategy="packed", epochs=3, holdout=0.1),
    }
    for reason, plan in others.items():
        refused = train_here(plan, tmp_path, "--resume", "auto")
        assert refused.exit_code == 1, refused.output
        (line,) = refused.stderr.splitlines()
        assert "another plan" in line
        assert reason in line
    assert last_tensors(tmp_path).keys() == before.keys()


def test_other_epochs_in_front_are_refused(plans, train_here, tmp_path):
    """As of a plan that another release made by the same options."""
    assert train_here(plans[2], tmp_path, "--max-steps", "1").exit_code == 0
    path = newest_checkpoint(tmp_path) / "trainer.json"
    text = path.read_text()
    second = plans[2]["epochs"][1]["fingerprint"]
    assert second in text
    path.write_text(text.replace(second, "0" * 32))
    refused = train_here(plans[3], tmp_path, "--resume", "auto")
    assert refused.exit_code == 1
    assert "its first 2 epochs are others" in refused.stderr
