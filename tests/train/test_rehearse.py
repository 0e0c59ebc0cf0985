"""Rehearsal shows what does not fit the memory before the first step, and changes nothing that training starts from."""

import json
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dflash_prep.manifest import Plan
from dflash_trainer.checkpoint import newest_checkpoint
from dflash_trainer.cli import train
from dflash_trainer.config import derive_config
from dflash_trainer.draft import DraftModel
from dflash_trainer.launch import Ranks
from dflash_trainer.rehearse import rehearse
from dflash_trainer.step import Recipe, Stepper
from dflash_trainer.target import FrozenTarget


def name_extremes(plan: Plan) -> dict:
    """What a plan says of its longest and its fullest micro-batch."""
    rows = [{"epoch": epoch, **row} for epoch in range(len(plan["epochs"])) for row in plan.rows(epoch)]
    longest, fullest = (max(rows, key=lambda row: row[key]) for key in ("width", "anchors"))
    keys = ("epoch", "step", "slot", "width", "padded_tokens", "anchors")
    return {kind: {key: row[key] for key in keys} for kind, row in (("longest", longest), ("fullest", fullest))}


@pytest.fixture
def plan(make_plan) -> Plan:
    return make_plan(strategy="shuffled")


@pytest.fixture
def run(plan, target_dir, tmp_path, monkeypatch):
    """Train here for a few steps; `named` is what plan.json says under `rehearse`."""
    (tmp_path / "draft.json").write_text('{"num_hidden_layers": 1}')

    def invoke(name: str, named: dict | None, *options: str):
        class Named(Plan):
            def __init__(self, path):
                super().__init__(path)
                self.manifest["rehearse"] = named

        monkeypatch.setattr("dflash_trainer.train.Plan", Named)
        command = ["--manifest-dir", plan.path, "--target", target_dir, "--draft-config", tmp_path / "draft.json"]
        command += ["--nproc-per-node", "1", "-o", tmp_path / name, *options]
        return CliRunner().invoke(train, list(map(str, command)))

    return invoke


def test_a_run_is_the_same_with_and_without(run, plan, tmp_path):
    named = name_extremes(plan)
    outputs = {}
    for name, extremes in (("with", named), ("without", None)):
        for options in (("--max-steps", "2"), ("--max-steps", "4", "--resume", "auto")):
            done = run(name, extremes, *options)
            assert done.exit_code == 0, done.output
            said = [line for line in done.stdout.splitlines() if line.startswith("rehearsed")]
            sizes = [f"{named[kind]['padded_tokens']:,} tokens, {named[kind]['anchors']:,} anchors" for kind in named]
            line = f"rehearsed the longest and the fullest micro-batch ({'; '.join(dict.fromkeys(sizes))})"
            assert said == ([line] if extremes else [])
        losses = [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").open()]
        outputs[name] = losses, load_file(newest_checkpoint(tmp_path / name) / "optimizer.safetensors")
    (losses, tensors), (expected_losses, expected) = outputs["with"], outputs["without"]
    assert losses == expected_losses
    assert len(losses) == 4
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_gradients_moments_and_random_numbers_are_as_before(plan, store, target_dir, monkeypatch, capsys):
    model = AutoModelForCausalLM.from_pretrained(target_dir)
    config = derive_config(model.config, block_size=4, mask_token_id=259, overrides={"num_hidden_layers": 1}, taps=(1,))
    draft = DraftModel(config).initialise(0)
    stepper = Stepper(draft, FrozenTarget(model, (1,)), Recipe(), plan.total_steps)
    compute, norms = Stepper.accumulate, []

    def accumulate(self, batch):
        compute(self, batch)
        norms.append(draft.fc.weight.grad.norm().item())
        torch.rand(3)  # as a target with a random part would

    monkeypatch.setattr(Stepper, "accumulate", accumulate)
    parameters, state = [value.clone() for value in draft.parameters()], torch.get_rng_state()
    row = next(row for row in plan.rows(1) if row["step"] == 2)
    place = {"epoch": 1, "step": 2, "slot": row["slot"]}
    plan.manifest["rehearse"] = {"longest": place, "fullest": place}
    rehearse(plan, store, stepper, Ranks(0, 1, torch.device("cpu")))
    assert len(norms) == 1  # once, as the two are the same
    assert norms[0] > 0
    assert all(value.grad is None for value in draft.parameters())
    assert not stepper.optimizer.state
    assert not stepper._buffer._flat.any()
    assert all(torch.equal(value, before) for value, before in zip(draft.parameters(), parameters, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert f"({row['padded_tokens']:,} tokens, {row['anchors']:,} anchors)" in capsys.readouterr().out


@pytest.mark.parametrize("fits", ["nothing", "longest"])
def test_out_of_memory_is_one_line(fits, run, plan, monkeypatch):
    named = name_extremes(plan)
    compute, kind = Stepper.accumulate, "longest" if fits == "nothing" else "fullest"
    place = named[kind]
    assert named["longest"] != named["fullest"]

    def accumulate(stepper, batch):
        if (batch.epoch, batch.step, batch.slot) == (place["epoch"], place["step"], place["slot"]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has …")
        compute(stepper, batch)

    monkeypatch.setattr(Stepper, "accumulate", accumulate)
    done = run("run", named)
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit), done.exception
    (line,) = done.stderr.splitlines()
    assert f"the plan's {kind} micro-batch (epoch {place['epoch']}, step {place['step']}, slot {place['slot']}: " in line
    assert f"{place['padded_tokens']:,} tokens, {place['anchors']:,} anchors" in line
    assert "--token-budget" in line


def test_one_rank_without_memory_stops_all(tmp_path):
    """Each rank says the same line, and none is left waiting or meets a broken connection."""
    (tmp_path / "refuse.py").write_text(REFUSE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "refuse.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["0: no room", "1: no room"]


REFUSE = """
import os

from dflash_prep.errors import UserError
from dflash_trainer.launch import join, refuse_together

ranks = join()
refuse_together(None, ranks)
try:
    refuse_together("no room" if ranks.rank == 1 else None, ranks)
except UserError as fault:
    os.write(1, f"{ranks.rank}: {fault}\\n".encode())
"""


def test_a_place_that_is_not_there(run, plan):
    named = name_extremes(plan)
    named["fullest"] = named["fullest"] | {"slot": plan["slots"]}
    done = run("run", named)
    assert done.exit_code == 1
    assert f"slot {plan['slots']} to rehearse" in done.stderr


def test_nothing_to_do_rehearses_nothing(run, plan):
    done = run("run", name_extremes(plan), "--max-steps", "0")
    assert done.exit_code == 0, done.output
    assert "rehearsed" not in done.stdout
