"""Where runs lie, who may write there, and faults of the processes: each in one line."""

import fcntl
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dflash_prep.errors import UserError
from dflash_trainer.cli import evaluate, train
from dflash_trainer.evaluate import parse_prompt
from dflash_trainer.json_report import check_place, write_report
from dflash_trainer.launch import world_size
from dflash_trainer.mask_token import choose_mask_token
from dflash_trainer.step import Recipe
from dflash_trainer.train import TrainOptions, place_run

SCRIPT = "from dflash_trainer.cli import train\nif __name__ == '__main__':\n    train()\n"


def make_checkpoint(run: Path, step: int, age: int = 0) -> Path:
    path = run / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "trainer.json").write_text("{}")
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def said(output: str) -> list[str]:
    """The lines that a run printed of itself; what it rehearsed depends on the plan."""
    return [line for line in output.splitlines() if not line.startswith("rehearsed ")]


def place(**options) -> TrainOptions:
    return place_run(TrainOptions(recipe=Recipe(), **options))


class TestPlaces:
    def test_auto_takes_the_run_whose_checkpoint_is_newest(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert place(resume="auto").resume is None
        make_checkpoint(Path("runs/b"), 9, age=5)
        newest = make_checkpoint(Path("runs/a"), 3)
        Path("runs/z-without").mkdir()
        Path("runs/notes.txt").touch()
        placed = place(resume="auto")
        assert (placed.output, placed.resume) == (Path("runs/a"), str(newest))
        assert place_run(placed) == placed

    def test_a_copied_checkpoint_needs_a_place(self, tmp_path):
        copy = shutil.copytree(make_checkpoint(tmp_path / "run", 3), tmp_path / "copy")
        with pytest.raises(UserError, match="with -o"):
            place(resume=str(copy))
        assert place(resume=str(copy), output=tmp_path / "new").output == tmp_path / "new"

    def test_a_checkpoint_of_another_run(self, tmp_path):
        checkpoint = make_checkpoint(tmp_path / "run", 3)
        make_checkpoint(tmp_path / "other", 3)
        with pytest.raises(UserError, match="holds another run"):
            place(resume=str(checkpoint), output=tmp_path / "other")
        copy = shutil.copytree(checkpoint, tmp_path / "copy")
        with pytest.raises(UserError, match="holds another run"):
            place(resume=str(copy), output=tmp_path / "other")
        assert place(resume=str(checkpoint), output=tmp_path / "run").output == tmp_path / "run"


class TestRuns:
    @pytest.fixture
    def invoke(self, make_plan, target_dir, tmp_path):
        (tmp_path / "draft.json").write_text('{"num_hidden_layers": 1}')
        common = ["--manifest-dir", make_plan().path, "--target", target_dir, "--draft-config", tmp_path / "draft.json"]
        common += ["--nproc-per-node", "1"]
        return lambda *options: CliRunner().invoke(train, [str(word) for word in (*common, *options)])

    def refuse(self, result, message: str) -> None:
        assert result.exit_code == 1, result.output
        assert isinstance(result.exception, SystemExit), result.exception
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1

    def test_goes_on_only_with_what_it_began_with(self, invoke, target_dir, tmp_path):
        run = tmp_path / "run"
        begun = invoke("-o", run, "--max-steps", "1")
        assert begun.exit_code == 0, begun.stderr
        assert said(begun.stdout) == [f"{run}: starts afresh", f"{run}: done"]
        self.refuse(invoke("--resume", run, "--lr", "0.01"), "go on with the same --lr 0.0006")
        other = Path(shutil.copytree(target_dir, tmp_path / "other"))
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
        self.refuse(invoke("--resume", run, "--target", other), "another target fingerprint")
        again = invoke("--resume", run, "--max-steps", "0", "-o", tmp_path / "new")
        assert again.exit_code == 0, again.stderr
        assert again.stdout.startswith(f"{tmp_path / 'new'}: goes on from {run}")
        assert {path.name for path in (tmp_path / "new" / "checkpoints").iterdir()} == {"latest", "step-00000001"}

    def test_one_process_a_run(self, invoke, tmp_path):
        run = tmp_path / "run"
        run.mkdir()
        with (run / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.refuse(invoke("-o", run, "--max-steps", "0"), "another process trains here")
        assert [path.name for path in run.iterdir()] == [".lock"]
        assert invoke("-o", run, "--max-steps", "0").exit_code == 0

    @pytest.mark.parametrize(
        "option",
        ["--taps=", "--taps=1,,2", "--resume=", "--target= ", "--lr=nan", "--lr=2", "--clip=inf", "--warmup=nan"],
    )
    def test_wrong_usage(self, invoke, option):
        assert invoke(option).exit_code == 2

    def test_the_command_line_wins_over_the_file_and_is_checked(self, invoke, tmp_path):
        (tmp_path / "draft.json").write_text('{"num_hidden_layers": 1, "mask_token_id": 258, "target_layer_ids": [1]}')
        self.refuse(invoke("-o", tmp_path / "a", "--max-steps", "0"), "<|im_end|>")
        self.refuse(invoke("-o", tmp_path / "a", "--max-steps", "0", "--mask-token-id", "257"), "<|im_start|>")
        self.refuse(
            invoke("-o", tmp_path / "a", "--max-steps", "0", "--mask-token-id", "260", "--taps", "5"), "tapped layers [5]"
        )
        done = invoke("-o", tmp_path / "run", "--max-steps", "0", "--mask-token-id", "260", "--taps", "2,4")
        assert done.exit_code == 0, done.stderr
        written = json.loads((tmp_path / "run/checkpoints/step-00000000/config.json").read_text())
        assert written["dflash_config"] == {"mask_token_id": 260, "target_layer_ids": [2, 4], "block_size": 4}


@pytest.mark.parametrize(
    ("torn", "name"),
    [
        ({"MASTER_ADDR": None}, "MASTER_ADDR"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT"),
        ({"RANK": "one"}, "RANK"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK"),
        ({"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE"),
        ({"RANK": "2"}, "RANK 2"),
    ],
)
def test_torn_environments(monkeypatch, torn, name):
    whole = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for key, value in (whole | torn).items():
        monkeypatch.delenv(key, raising=False) if value is None else monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match=name):
        world_size(None)


def test_torchrun_without_a_place(make_plan, target_dir, tmp_path):
    """All ranks write to the run that rank 0 named."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "draft.json").write_text('{"num_hidden_layers": 1}')
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", tmp_path / "train.py"]
    command += ["--manifest-dir", make_plan().path, "--target", target_dir, "--max-steps", "1"]
    command += ["--draft-config", tmp_path / "draft.json"]
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert said(done.stdout) == [f"runs/{run.name}: starts afresh", f"runs/{run.name}: done"]


@pytest.mark.parametrize(("limit", "message"), [(4_000, "cannot write the metrics"), (30_000, r"step-\d{8}: cannot write")])
def test_a_full_disk_ends_in_one_line(limit, message, make_plan, target_dir, tmp_path):
    """Files that may not grow beyond `limit` bytes stand in for a full disk."""
    (tmp_path / "draft.json").write_text('{"num_hidden_layers": 1}')
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        "--manifest-dir",
        make_plan().path,
        "--target",
        target_dir,
        "-o",
        tmp_path / "run",
    ]
    command += ["--draft-config", tmp_path / "draft.json", "--nproc-per-node", "1"]
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("step ")]
    assert line.startswith("error: ")
    assert re.search(message, line)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


class TestEvaluation:
    @pytest.mark.parametrize(
        ("data", "message"),
        [(rb'{"turns": ["\ud800"]}', "lone surrogate"), (b'{"turns": ' + b"[" * 99999, "not JSON"), (b"\xff", "not JSON")],
        ids=["surrogate", "deep", "bytes"],
    )
    def test_prompts_that_are_no_text(self, data, message):
        with pytest.raises(UserError, match=f"p.jsonl:7: .*{message}"):
            parse_prompt(data, "p.jsonl:7")

    def test_report_is_whole_or_absent(self, tmp_path):
        path = tmp_path / "report.json"
        path.write_text("old")
        check_place(path, "--json")
        assert path.read_text() == "old"
        write_report(path, "--json", {"a": 1})
        assert json.loads(path.read_text()) == {"a": 1}
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize("place", ["missing/report.json", ".", "/dev/null"])
    def test_places_are_checked_first(self, place, tmp_path):
        done = CliRunner().invoke(evaluate, ["--draft", str(tmp_path / "none"), "--json", str(tmp_path / place)])
        assert done.exit_code == 1
        assert done.stderr.startswith("error: ")
        assert "--json" in done.stderr

    def test_a_mask_token_outside_the_vocabulary(self, store, target_dir):
        from dataclasses import replace

        from dflash_prep.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(str(target_dir))
        tokenizer = replace(tokenizer, named_tokens=tokenizer.named_tokens | {"mask_token": "<mask>"})
        with pytest.raises(UserError, match="'<mask>' is no token of it"):
            choose_mask_token(tokenizer, store, 264, None)
