"""SIGTERM and SIGINT: the step is finished and saved, whoever got the signal; the second one ends at once."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import reported, same_tensors
from workers import Die, Hang, send_own, watch_batches

from dflash_trainer import stop
from dflash_trainer.checkpoint import checkpoint_path, newest_checkpoint
from dflash_trainer.step import Stepper
from dflash_trainer.stop import StopRequest

SCRIPT = "from dflash_trainer.cli import train\nif __name__ == '__main__':\n    train()\n"


def stopped_after(run: Path, output: str) -> int:
    """The step that a run says it stopped after; its last checkpoint and its metrics must say the same."""
    (step,) = re.findall(rf"^{run}: stopped after step (\d+); go on with --resume auto$", output, re.MULTILINE)
    assert "done" not in output
    assert "error" not in output
    assert newest_checkpoint(run) == checkpoint_path(run, int(step))
    assert [row["step"] for row in reported(run)] == list(range(1, int(step) + 1))
    return int(step)


@pytest.fixture(scope="module")
def plan(make_plan):
    return make_plan(strategy="packed", token_budget=250)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_one_process_stops_and_goes_on_bit_for_bit(name, plan, train_here, tmp_path):
    number = getattr(signal, name)
    handlers = [signal.getsignal(each) for each in stop.SIGNALS]
    before = watch_batches(lambda _, batch: send_own(number) if (batch.step, batch.slot) == (2, 0) else None)
    try:
        done = train_here(plan, tmp_path / "parts", "--max-steps", "8")
    finally:
        Stepper.accumulate = before
    assert done.exit_code == 0, done.output
    assert 3 <= stopped_after(tmp_path / "parts", done.output) < 8
    assert [signal.getsignal(each) for each in stop.SIGNALS] == handlers
    assert train_here(plan, tmp_path / "parts", "--max-steps", "8", "--resume", "auto").exit_code == 0
    assert train_here(plan, tmp_path / "whole", "--max-steps", "8").exit_code == 0
    assert same_tensors(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_stop_after_the_same_step(rank, plan, run_ranks, tmp_path):
    """One rank alone got the signal."""
    code, said = run_ranks(plan, tmp_path / "parts", "--max-steps", "8", fault=Die(rank, 2, -signal.SIGTERM))
    assert code == 0, said
    assert 3 <= stopped_after(tmp_path / "parts", said[0]) < 8
    assert run_ranks(plan, tmp_path / "parts", "--max-steps", "8", "--resume", "auto")[0] == 0
    assert run_ranks(plan, tmp_path / "whole", "--max-steps", "8")[0] == 0
    assert same_tensors(tmp_path / "whole", tmp_path / "parts")


def test_a_signal_in_the_last_step_changes_nothing(plan, train_here, tmp_path):
    before = watch_batches(lambda _, batch: send_own(signal.SIGTERM) if batch.step == 1 else None)
    try:
        done = train_here(plan, tmp_path / "run", "--max-steps", "2")
    finally:
        Stepper.accumulate = before
    assert done.exit_code == 0
    assert done.output.splitlines()[-1] == f"{tmp_path / 'run'}: done"


@pytest.mark.parametrize("how", ["the launcher", "the group", "Ctrl-C", "one worker", "torchrun"])
def test_processes_stop_together(how, make_plan, target_dir, draft_json, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if how == "torchrun" else []
    command = [sys.executable, *torchrun, tmp_path / "train.py", "--manifest-dir", make_plan(epochs=200).path]
    command += ["--target", target_dir, "--draft-config", draft_json, "-o", tmp_path / "run"]
    command += [] if torchrun else ["--nproc-per-node", "2"]
    process = subprocess.Popen(
        list(map(str, command)), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(tmp_path / "run" / "metrics.jsonl", process)
    if how in ("the group", "Ctrl-C"):
        os.killpg(process.pid, signal.SIGINT if how == "Ctrl-C" else signal.SIGTERM)
    elif how == "one worker":
        os.kill(workers_of(process.pid)[-1], signal.SIGTERM)
    else:
        process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert stopped_after(tmp_path / "run", output) > 0
    if not torchrun:  # torchrun itself says that it got a signal
        assert process.returncode == 0
        assert [line for line in errors.splitlines() if not line.startswith("step ")] == []


def wait_for(path: Path, process: subprocess.Popen) -> None:
    """Wait until a process has written something there."""
    deadline = time.monotonic() + 100
    while not (path.exists() and path.stat().st_size) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)


def workers_of(process: int) -> list[int]:
    """The workers that a launcher started, by their command lines."""
    children = map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
    return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_workers_outlive_no_launcher(make_plan, target_dir, draft_json, tmp_path):
    """Where the launcher is killed, its workers save and end too."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "train.py", "--manifest-dir", make_plan(epochs=200).path, "--nproc-per-node", "2"]
    command += ["--target", target_dir, "--draft-config", draft_json, "-o", tmp_path / "run"]
    process = subprocess.Popen(
        list(map(str, command)), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(tmp_path / "run" / "metrics.jsonl", process)
    process.kill()
    output, _ = process.communicate(timeout=60)  # the workers hold its ends until they are gone
    assert stopped_after(tmp_path / "run", output) > 0


def test_a_second_signal_ends_a_rank_at_once(plan, start_ranks, tmp_path):
    (rank,) = start_ranks(plan, tmp_path / "run", fault=Hang(tmp_path / "hangs"), size=1)
    while not (tmp_path / "hangs").exists() and rank.is_alive():
        time.sleep(0.05)
    while rank.is_alive():
        os.kill(rank.pid, signal.SIGTERM)
        rank.join(0.3)
    assert rank.exitcode == 128 + signal.SIGTERM
    assert newest_checkpoint(tmp_path / "run") is None


def test_a_second_signal_ends_the_launcher_and_its_workers(tmp_path):
    (tmp_path / "hang.py").write_text(HANG)
    process = subprocess.Popen(
        [sys.executable, "hang.py"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    for rank in (0, 1):
        wait_for(tmp_path / str(rank), process)
    while workers_of(process.pid):
        process.send_signal(signal.SIGINT)
        time.sleep(0.4)
    _, errors = process.communicate(timeout=60)  # the workers hold its ends until they are gone
    assert errors.splitlines() == ["error: stopped by SIGINT; go on with --resume auto"]
    assert process.returncode == 1


HANG = """
import os
import sys
import time
from pathlib import Path

from dflash_prep.errors import UserError
from dflash_trainer.launch import launch
from dflash_trainer.stop import StopRequest


def hang():
    with StopRequest():
        Path(os.environ["RANK"]).write_text("here")
        time.sleep(1000)


if __name__ == "__main__":
    try:
        launch(hang, (), 2)
    except UserError as fault:
        sys.exit(f"error: {fault}")
"""


@pytest.mark.parametrize(("moments", "ended"), [([0.0, 0.9], []), ([0.0, 0.1, 1.1], [143]), ([5.0, 99.0], [143])])
def test_one_event_may_come_several_times(moments, ended, monkeypatch):
    """A terminal, `timeout`, a cluster and a launcher each pass the same event on."""
    codes = []
    monkeypatch.setattr(stop.os, "_exit", codes.append)
    request = StopRequest()
    assert not request.asked()
    for moment in moments:
        monkeypatch.setattr(stop.time, "monotonic", lambda now=moment: now)
        request._note(signal.SIGTERM)
        assert request.asked()
    assert codes == ended
