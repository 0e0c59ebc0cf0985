"""A run's checkpoints: --keep, the file `latest`, and damaged ones."""

import json
import os
import shutil

import pytest
from conftest import reported, same_tensors
from test_checkpoint import STATE, make_draft

from dflash_trainer.checkpoint import save_checkpoint
from dflash_trainer.history import checkpoint_path, checkpoints, damage, newest_checkpoint

FILES = ["config.json", "model.safetensors", "optimizer.safetensors", "trainer.json"]


def save(run, step: int, keep: int = 3):
    return save_checkpoint(run, *make_draft(), {**STATE, "step": step}, keep)


def steps_of(run) -> list[int]:
    return [int(path.name[5:]) for path in checkpoints(run)]


@pytest.fixture(scope="module")
def plan(make_plan):
    return make_plan(strategy="packed", token_budget=250)


@pytest.mark.parametrize("keep", [1, 2, 3, 9])
def test_the_newest_are_kept(keep, tmp_path):
    for step in range(2, 14, 2):
        path = save(tmp_path, step, keep)
        assert steps_of(tmp_path) == list(range(2, step + 2, 2))[-keep:]
        assert (tmp_path / "checkpoints" / "latest").read_text() == f"{path.name}\n"
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "latest",
        *(p.name for p in checkpoints(tmp_path)),
    }


def test_latest_names_a_whole_one_at_every_moment(tmp_path, monkeypatch):
    """Wherever a save is cut off: before each change to the folder, what `latest` names is there and whole."""
    save(tmp_path, 1, keep=1)
    seen = []

    def checked(change):
        def call(*arguments, **options):
            name = (tmp_path / "checkpoints" / "latest").read_text().strip()
            assert damage(tmp_path / "checkpoints" / name) is None
            seen.append((change.__name__, name))
            return change(*arguments, **options)

        return call

    for change in (os.fsync, os.rename, os.replace, os.unlink, os.rmdir):
        monkeypatch.setattr(os, change.__name__, checked(change))
    save(tmp_path, 2, keep=1)
    assert {name for _, name in seen} == {"step-00000001", "step-00000002"}
    assert ("rmdir", "step-00000002") in seen


def test_only_whole_ones_count(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    (checkpoint_path(tmp_path, 3) / "config.json").unlink()
    save(tmp_path, 4, keep=2)
    assert steps_of(tmp_path) == [2, 3, 4]
    save(tmp_path, 5, keep=2)
    assert steps_of(tmp_path) == [4, 5]


def test_a_run_that_went_back_keeps_what_lies_ahead(tmp_path):
    """Steps that this run has not come to are not its to remove, and take no place of its own."""
    for step in (1, 8, 9):
        save(tmp_path, step)
    for step in (2, 3):
        save(tmp_path, step, keep=1)
        assert steps_of(tmp_path) == [step, 8, 9]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000003\n"


def test_what_killed_processes_left_goes(tmp_path):
    folder = tmp_path / "checkpoints"
    for name in (".step-00000007.999999999.partial", f".step-00000008.{os.getpid()}.partial", "step-best"):
        (folder / name).mkdir(parents=True)
    save(tmp_path, 9)
    left = {path.name for path in folder.iterdir()}
    assert left == {"latest", "step-00000009", "step-best", f".step-00000008.{os.getpid()}.partial"}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("cut", [None, 0, 0.5, -1], ids=["missing", "empty", "half", "last byte"])
def test_a_damaged_one_is_passed_over(name, cut, tmp_path, capsys):
    for step in (1, 2):
        save(tmp_path, step)
    path = checkpoint_path(tmp_path, 2) / name
    data = path.read_bytes()
    if cut is None:
        path.unlink()
    elif isinstance(cut, float):
        path.write_bytes(data[: int(len(data) * cut)])
    else:
        path.write_bytes(data.rstrip(b"\n")[:cut])
    assert newest_checkpoint(tmp_path) == checkpoint_path(tmp_path, 1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {tmp_path}/checkpoints/step-00000002")
    assert name in line or "safetensors" in name
    shutil.rmtree(checkpoint_path(tmp_path, 1))
    assert newest_checkpoint(tmp_path) == checkpoint_path(tmp_path, 2)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("state", ["missing", "empty", "step-00000099\n", "step-00000002\n", b"\xff\0", "directory"])
def test_auto_needs_no_latest(state, plan, train_here, tmp_path):
    run = tmp_path / "run"
    assert train_here(plan, run, "--max-steps", "4", "--save-every", "2").exit_code == 0
    latest = run / "checkpoints" / "latest"
    latest.unlink()
    if state == "directory":
        latest.mkdir()
    elif state != "missing":
        latest.write_bytes(state if isinstance(state, bytes) else state.encode())
    done = train_here(plan, run, "--max-steps", "4", "--resume", "auto")
    assert done.exit_code == 0, done.output
    assert f"goes on from {checkpoint_path(run, 4)}" in done.output


def test_auto_goes_on_from_the_one_before_a_damaged_one(plan, train_here, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = ("--save-every", "2", "--max-steps")
    assert train_here(plan, whole, *common, "8").exit_code == 0
    assert train_here(plan, parts, *common, "6").exit_code == 0
    os.truncate(checkpoint_path(parts, 6) / "optimizer.safetensors", 1000)
    done = train_here(plan, parts, *common, "8", "--resume", "auto", "--keep", "2")
    assert done.exit_code == 0, done.output
    (warning,) = [line for line in done.stderr.splitlines() if not line.startswith("step ")]
    assert warning.startswith(f"warning: {checkpoint_path(parts, 6)}")
    assert f"goes on from {checkpoint_path(parts, 4)}" in done.output
    assert same_tensors(whole, parts)
    assert steps_of(parts) == [6, 8]
    assert [row["step"] for row in reported(parts)] == list(range(1, 9))


def test_the_one_that_a_run_goes_on_from_counts_like_any_other(plan, train_here, tmp_path):
    assert train_here(plan, tmp_path, "--max-steps", "2").exit_code == 0
    done = train_here(plan, tmp_path, "--max-steps", "6", "--save-every", "2", "--keep", "2", "--resume", "auto")
    assert done.exit_code == 0, done.output
    assert steps_of(tmp_path) == [4, 6]


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(plan, train_here, tmp_path):
    assert train_here(plan, tmp_path, "--max-steps", "1").exit_code == 0
    (checkpoint_path(tmp_path, 1) / "trainer.json").write_text(json.dumps([]))
    for options in ((), ("--resume", "auto")):
        refused = train_here(plan, tmp_path, *options)
        assert refused.exit_code == 1
        assert "damaged" in refused.stderr if options else "holds a run" in refused.stderr
