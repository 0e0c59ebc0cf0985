"""Whole runs through the command line: processes, resume, files, and faults of the input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from conftest import make_target, write_corpus
from safetensors import safe_open
from safetensors.torch import load_file

from dflash_prep.cli import main as prep
from dflash_prep.manifest import Plan
from dflash_trainer.checkpoint import expected_tensors, newest_checkpoint
from dflash_trainer.cli import train
from dflash_trainer.config import DraftConfig


@pytest.fixture
def run_train(target_dir, draft_json):
    """Train in a process of its own; returns the run's last checkpoint's tensors."""

    def run(plan: Plan, output: Path, *options: str) -> dict[str, torch.Tensor]:
        command = [sys.executable, "-c", "from dflash_trainer.cli import train; train()"]
        command += ["--manifest-dir", str(plan.path), "--target", str(target_dir), "-o", str(output)]
        command += ["--draft-config", str(draft_json), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return load_file(newest_checkpoint(output) / "optimizer.safetensors")

    return run


def masters(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten() for name, value in sorted(tensors.items()) if name.startswith("master.")])


def test_two_processes_take_the_steps_of_one(run_train, make_plan, tmp_path):
    plan = make_plan(strategy="packed", epochs=1, token_budget=250)
    full = ("--lr", "1e-3", "--warmup", "0")
    start = masters(run_train(plan, tmp_path / "zero", "--max-steps", "0"))
    one = masters(run_train(plan, tmp_path / "one", "--max-steps", "5", *full))
    two = masters(run_train(plan, tmp_path / "two", "--max-steps", "5", "--nproc-per-node", "2", *full))
    assert (one - start).norm() > 0.1
    assert (one - two).norm() <= 1e-4 * (one - start).norm()
    losses = [[json.loads(line)["loss"] for line in (tmp_path / n / "metrics.jsonl").open()] for n in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_resume_is_bit_identical(workers, run_train, make_plan, tmp_path):
    plan = make_plan(strategy="bucketed", epochs=2)
    last = str(plan["epochs"][0]["steps"] + 2)
    common = ("--nproc-per-node", workers)
    whole = run_train(plan, tmp_path / "whole", "--max-steps", last, *common)
    run_train(plan, tmp_path / "parts", "--max-steps", "3", *common)
    parts = run_train(plan, tmp_path / "parts", "--max-steps", last, "--resume", "auto", *common)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    steps = [json.loads(line)["step"] for line in (tmp_path / "parts" / "metrics.jsonl").open()]
    assert steps == list(range(1, int(last) + 1))


def test_checkpoint_is_a_servable_draft(run_train, make_plan, tmp_path):
    plan = make_plan(strategy="sorted")
    run_train(plan, tmp_path / "run", "--max-steps", "3", "--save-every", "2")
    checkpoints = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoints == ["latest", "step-00000002", "step-00000003"]
    directory = tmp_path / "run" / "checkpoints" / "step-00000003"
    assert {path.name for path in directory.iterdir()} == {
        "config.json",
        "model.safetensors",
        "optimizer.safetensors",
        "trainer.json",
    }
    config = DraftConfig.load(directory)
    with safe_open(directory / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118
        assert all(file.get_tensor(name).dtype == torch.bfloat16 for name in shapes)
    assert shapes == expected_tensors(config)
    assert len(shapes) == 3 + 11 * config.num_hidden_layers
    state = json.loads((directory / "trainer.json").read_text())
    assert (state["step"], state["plan_fingerprint"]) == (3, plan["fingerprint"])
    raw = json.loads((directory / "config.json").read_text())
    assert raw["architectures"] == ["DFlashDraftModel"]
    assert raw["num_target_layers"] == 6


def test_metrics_and_events(run_train, make_plan, tmp_path):
    plan = make_plan(strategy="packed", token_budget=250)
    run_train(plan, tmp_path / "run", "--max-steps", "4")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    summary = plan["epochs"][0]
    for row in rows:
        assert row["epoch_progress"] == pytest.approx(row["step"] / summary["steps"])
        planned = [r for r in plan.rows(0) if r["step"] == row["step"] - 1]
        for name in ("tokens", "padded_tokens", "anchors"):
            assert row[name] == sum(r[name] for r in planned)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert list((tmp_path / "run").glob("events.out.tfevents*"))


def test_learning_falls_to_zero_at_the_plans_end(run_train, make_plan, tmp_path):
    plan = make_plan(strategy="packed", epochs=1, token_budget=250)
    run_train(plan, tmp_path / "run", "--lr", "0.001")
    rates = [json.loads(line)["learning_rate"] for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert len(rates) == plan.total_steps
    assert max(rates) == pytest.approx(0.001)
    assert rates[-1] < 0.2 * max(rates)


def test_joins_torchrun(make_plan, target_dir, draft_json, tmp_path):
    plan = make_plan(strategy="packed", epochs=1)
    script = tmp_path / "train.py"
    script.write_text("from dflash_trainer.cli import train\ntrain()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    command += ["--manifest-dir", str(plan.path), "--target", str(target_dir), "--draft-config", str(draft_json)]
    command += ["-o", str(tmp_path / "run"), "--max-steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


class TestRefusals:
    """Each fault of the input: one line that says what and where, exit code 1."""

    def refuse(self, *arguments: str) -> str:
        result = CliRunner().invoke(train, [str(argument) for argument in arguments])
        assert result.exit_code == 1, result.output
        assert isinstance(result.exception, SystemExit), result.exception
        lines = result.stderr.strip().splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("error: ")
        return lines[0]

    def test_no_plan(self, tmp_path):
        assert "plan-epochs" in self.refuse("--manifest-dir", tmp_path)

    def test_slots_that_the_workers_do_not_divide(self, make_plan, target_dir):
        plan = make_plan()
        line = self.refuse("--manifest-dir", plan.path, "--target", target_dir, "--nproc-per-node", "3")
        assert "4 slots" in line
        assert "3 workers" in line

    def test_a_store_of_another_tokenizer(self, make_plan, tmp_path):
        other = make_target(tmp_path / "other")
        value = json.loads((other / "tokenizer.json").read_text())
        value["model"]["vocab"] = {token: 255 - i for token, i in value["model"]["vocab"].items()}
        (other / "tokenizer.json").write_text(json.dumps(value))
        assert "was tokenized with" in self.refuse("--manifest-dir", make_plan().path, "--target", other)

    def test_a_store_that_has_changed(self, target_dir, tmp_path):
        runner = CliRunner()
        store, plan = tmp_path / "tokens", tmp_path / "plan"
        for seed in (0, 1):
            corpus = write_corpus(tmp_path / "corpus.jsonl", 10, seed)
            if seed:
                for file in store.iterdir():
                    file.unlink()
                store.rmdir()
            made = runner.invoke(prep, ["tokenize", str(corpus), "--tokenizer", str(target_dir), "-o", str(store)])
            assert made.exit_code == 0, made.output
            if not seed:
                made = runner.invoke(prep, ["plan-epochs", "--data", str(store), "-o", str(plan)])
                assert made.exit_code == 0, made.output
        assert "not the store" in self.refuse("--manifest-dir", plan, "--target", target_dir)

    def test_a_store_that_is_gone(self, make_plan, target_dir, tmp_path):
        line = self.refuse("--manifest-dir", make_plan().path, "--target", target_dir, "--data", tmp_path / "gone")
        assert "no token store" in line

    def test_a_target_that_is_none(self, make_plan, tmp_path):
        assert "no tokenizer.json" in self.refuse("--manifest-dir", make_plan().path, "--target", tmp_path)
        assert "no such directory" in self.refuse("--manifest-dir", make_plan().path, "--target", tmp_path / "no")

    def test_a_target_without_weights(self, make_plan, target_dir, tmp_path):
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
            (tmp_path / name).write_bytes((target_dir / name).read_bytes())
        line = self.refuse("--manifest-dir", make_plan().path, "--target", tmp_path, "-o", tmp_path / "run")
        assert "cannot load the target" in line

    @pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]])
    def test_a_fault_that_only_workers_meet(self, launcher, make_plan, target_dir, tmp_path):
        """Weights are first read in the workers: their fault is one line too, and no worker is left waiting."""
        for file in target_dir.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / "model.safetensors").write_bytes(b"damaged")
        (tmp_path / "train.py").write_text("from dflash_trainer.cli import train\nif __name__ == '__main__':\n    train()\n")
        command = [sys.executable, *launcher, tmp_path / "train.py", "--manifest-dir", make_plan().path]
        command += ["--target", tmp_path, "-o", tmp_path / "run", *([] if launcher else ["--nproc-per-node", "2"])]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert lines
        assert all("cannot load the target" in line for line in lines)
        if not launcher:
            assert done.stderr.splitlines() == lines

    def test_a_block_size_other_than_the_plans(self, make_plan, target_dir, tmp_path):
        (tmp_path / "draft.json").write_text('{"num_hidden_layers": 2, "block_size": 8}')
        line = self.refuse(
            "--manifest-dir", make_plan().path, "--target", target_dir, "--draft-config", tmp_path / "draft.json"
        )
        assert "block_size 8" in line

    def test_a_mask_token_that_is_used(self, make_plan, store, target_dir, draft_json):
        common = ("--manifest-dir", make_plan().path, "--target", target_dir, "--draft-config", draft_json)
        letter = store.sample(0)[0][-3]  # of the last word
        assert "occurs in the store" in self.refuse(*common, "--mask-token-id", letter)
        assert "<|im_end|>" in self.refuse(*common, "--mask-token-id", "258")
        assert "rows 0 to 263" in self.refuse(*common, "--mask-token-id", "264")

    def test_a_run_that_exists(self, run_train, make_plan, target_dir, tmp_path):
        plan = make_plan()
        run_train(plan, tmp_path / "run", "--max-steps", "0")
        line = self.refuse("--manifest-dir", plan.path, "--target", target_dir, "-o", tmp_path / "run")
        assert "--resume auto" in line

    def test_resume_of_another_plan(self, run_train, make_plan, target_dir, draft_json, tmp_path):
        run_train(make_plan(seed=1), tmp_path / "run", "--max-steps", "1")
        common = ("--manifest-dir", make_plan(seed=2).path, "--target", target_dir, "--draft-config", draft_json)
        assert "another plan" in self.refuse(*common, "--resume", tmp_path / "run")
        assert "no checkpoint" in self.refuse(*common, "--resume", tmp_path / "nothing")
