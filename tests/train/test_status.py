"""`dflash-train --status RUN`: whatever state a run's files are in."""

import fcntl
import json
import os
import re
import time

import pytest
from click.testing import CliRunner
from conftest import reported
from workers import watch_batches

from dflash_trainer.cli import train
from dflash_trainer.history import checkpoint_path
from dflash_trainer.step import Stepper


@pytest.fixture(scope="module")
def plan(make_plan):
    return make_plan(strategy="packed", token_budget=250, holdout=0.2)


def status(run, code: int = 0) -> str:
    done = CliRunner().invoke(train, ["--status", str(run)])
    assert done.exit_code == code, done.output
    assert isinstance(done.exception, SystemExit | None)
    return done.stdout if code == 0 else done.stderr


def change(path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_every_item_of_a_run_that_has_ended(plan, train_here, tmp_path):
    run = tmp_path / "run"
    assert train_here(plan, run, "--max-steps", "3").exit_code == 0
    last = reported(run)[-1]
    known = {"seconds": 2.0, "tokens": 3000, "data_wait_share": 0.25, "seconds_left": 7300.0, "memory_bytes": 3 * 2**30}
    known |= {"bad_steps": 7, "time": time.time() - 600}
    change(run / "metrics.jsonl", [row | known for row in reported(run)])
    said = status(run).splitlines()
    assert said[0] == f"{run}: not running, last step 10.0 minutes ago"
    assert (
        said[1] == f"step 3 of {plan.total_steps}, epoch {last['epoch_progress']:.2f}, to stop after step 3, 2.0 hours left"
    )
    assert said[2].startswith(
        f"loss {last['loss']:.3f}, expected acceptance {last['expected_acceptance']:.2f}, gradient norm"
    )
    assert said[3] == "bad steps 7"
    assert said[4].startswith("the last 3 steps: 1.50 Ktok/s, 2.00 s a step, ")
    assert "25.0% waiting for data, 0.0% spread over ranks, 3.0 GiB" in said[4]
    assert re.fullmatch(r"hold-out at step 3: loss \d+\.\d{3}, expected acceptance \d\.\d{3}", said[5])
    assert re.fullmatch(rf"newest checkpoint: {checkpoint_path(run, 3)}, \d+ seconds ago", said[6])
    assert len(said) == 7


def test_while_it_runs(plan, train_here, tmp_path):
    """Asked in the midst of the first step and of the third: the run goes on untouched."""
    seen = {}  # by step, the last that was said in it: rehearsed micro-batches have numbers too
    before = watch_batches(lambda _, batch: seen.update({batch.step: status(tmp_path / "run")}))
    try:
        done = train_here(plan, tmp_path / "run", "--max-steps", "4", "--save-every", "2")
    finally:
        Stepper.accumulate = before
    assert done.exit_code == 0, done.output
    first, third = seen[0].splitlines(), seen[2].splitlines()
    assert first == [f"{tmp_path / 'run'}: running, no step yet"]
    assert third[0].startswith(f"{tmp_path / 'run'}: running, last step 0 seconds ago")
    assert third[1].startswith(f"step 2 of {plan.total_steps}, epoch ")
    assert "to stop after step 4" in third[1]
    assert any(line.startswith(f"newest checkpoint: {checkpoint_path(tmp_path / 'run', 2)}") for line in third)


@pytest.mark.parametrize(
    "torn", [b'{"step": 4, "lo', b"\xff\n", b"[1]\n", b"{}\n", b'{"step": "4"}\n', b"[" * 100_000 + b"\n"]
)
def test_after_a_crash(torn, plan, train_here, tmp_path):
    """Lines that were torn or are none of ours, and a checkpoint that is damaged."""
    run = tmp_path / "run"
    assert train_here(plan, run, "--max-steps", "2").exit_code == 0
    for name in ("metrics.jsonl", "validation.jsonl"):
        with (run / name).open("ab") as file:
            file.write(torn)
    (checkpoint_path(run, 2) / "trainer.json").write_text("{")
    said = status(run)
    assert "not running" in said
    assert f"step 2 of {plan.total_steps}" in said
    assert said.endswith(f"newest checkpoint: {checkpoint_path(run, 2)}, damaged\n")


def test_a_run_of_an_older_version(plan, train_here, tmp_path):
    """Its rows lack columns; the checkpoint says how many steps the plan has."""
    run = tmp_path / "run"
    assert train_here(plan, run, "--max-steps", "2").exit_code == 0
    old = ["step", "epoch", "epoch_progress", "loss", "gradient_norm", "bad_steps", "expected_acceptance", "padding_share"]
    old += ["learning_rate", "seconds", "tokens", "data_wait_share"]
    rows = reported(run)
    change(run / "metrics.jsonl", [{key: row[key] for key in old} | {"seconds": 60.0} for row in rows])
    said = status(run)
    steps = plan.total_steps - 2
    left = f"{steps / 60:.1f} hours" if steps >= 120 else f"{steps:.1f} minutes"
    assert f"step 2 of {plan.total_steps}, epoch {rows[-1]['epoch_progress']:.2f}, {left} left" in said
    assert "spread" not in said
    for kept in range(len(old)):  # whatever else is missing
        change(run / "metrics.jsonl", [{key: row[key] for key in old[: kept + 1]} for row in rows])
        assert ("loss unknown" in status(run)) == ("loss" not in old[: kept + 1])


def test_figures_that_were_not_finite(plan, train_here, tmp_path):
    run = tmp_path / "run"
    assert train_here(plan, run, "--max-steps", "2").exit_code == 0
    odd = {"loss": None, "gradient_norm": None, "rank_spread": None, "rank_seconds": [None]}
    change(run / "metrics.jsonl", [row | odd for row in reported(run)])
    said = status(run)
    assert "loss not finite" in said
    assert "gradient norm not finite" in said


def test_a_run_without_a_checkpoint(plan, train_here, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    assert "no run here" in status(run, code=1)
    (run / ".lock").touch()
    assert status(run) == f"{run}: not running, no step yet\n"
    with (run / ".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert status(run) == f"{run}: running, no step yet\n"
    assert train_here(plan, tmp_path / "other", "--max-steps", "2").exit_code == 0
    os.replace(tmp_path / "other" / "metrics.jsonl", run / "metrics.jsonl")
    said = status(run)
    assert f"step 2 of {plan.total_steps}, epoch " in said  # known before the first checkpoint
    assert "checkpoint" not in said
