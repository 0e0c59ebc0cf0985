"""Crashes: whole runs killed at random moments end bit-identical; where one rank dies the others do not wait for it."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import reported, same_tensors
from test_stop import SCRIPT, wait_for, workers_of
from workers import Die

STEPS = 12


def test_killed_at_random_moments_it_ends_with_the_same_bits(make_plan, start_ranks, run_ranks, tmp_path):
    plan = make_plan(strategy="packed", token_budget=250)
    assert plan["epochs"][0]["steps"] < STEPS <= plan.total_steps  # an epoch's border is on the way
    common = ("--max-steps", str(STEPS), "--save-every", "2", "--keep", "2")
    assert run_ranks(plan, tmp_path / "whole", *common)[0] == 0
    moments = random.Random(5)
    metrics = tmp_path / "parts" / "metrics.jsonl"
    for kill in range(4):
        ranks = start_ranks(plan, tmp_path / "parts", *common, "--resume", "auto")
        steps = 2 * kill + moments.randrange(3)  # reported before it is killed, so that it comes on a little each time
        while all(rank.is_alive() for rank in ranks) and lines_of(metrics) < steps:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.2))
        for rank in moments.sample(ranks, 2):
            rank.kill()
        for rank in ranks:
            rank.join()
    code, said = run_ranks(plan, tmp_path / "parts", *common, "--resume", "auto")
    assert code == 0, said
    assert same_tensors(tmp_path / "whole", tmp_path / "parts")
    losses = [[row["loss"] for row in reported(tmp_path / name)] for name in ("whole", "parts")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == STEPS
    folder = tmp_path / "parts" / "checkpoints"
    assert {path.name for path in folder.iterdir()} == {"latest", "step-00000010", "step-00000012"}


def lines_of(path: Path) -> int:
    """How many lines a file has, if it is there."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("code", [3, -signal.SIGKILL])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_do_not_wait_for_a_rank_that_has_died(rank, code, make_plan, start_ranks, tmp_path):
    plan = make_plan(strategy="packed", token_budget=250)
    ranks = start_ranks(plan, tmp_path / "run", fault=Die(rank, 2, code))
    for each in ranks:
        each.join(timeout=60)
    other = 1 - rank
    assert (ranks[rank].exitcode, ranks[other].exitcode) == (code, 1)
    errors = [line for line in Path(f"{tmp_path / 'run'}.{other}").read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "another worker has ended" in errors[0]
    assert "--resume auto" in errors[0]


def test_the_launcher_says_which_worker_died(make_plan, target_dir, draft_json, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "train.py", "--manifest-dir", make_plan(epochs=200).path, "--nproc-per-node", "2"]
    command += ["--target", target_dir, "--draft-config", draft_json, "-o", tmp_path / "run"]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    wait_for(tmp_path / "run" / "metrics.jsonl", process)
    os.kill(workers_of(process.pid)[-1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    (line,) = [line for line in errors.splitlines() if not line.startswith("step ")]
    assert line.startswith("error: worker ")
    assert "SIGKILL" in line or "another worker has ended" in line
