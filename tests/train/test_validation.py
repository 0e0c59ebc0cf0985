"""Validation on the hold-out, starting from a draft, and a run's state from its files."""

import fcntl
import json
from itertools import accumulate
from operator import mul
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dflash_trainer.checkpoint import newest_checkpoint
from dflash_trainer.cli import train
from dflash_trainer.config import derive_config
from dflash_trainer.draft import DraftModel
from dflash_trainer.launch import Ranks
from dflash_trainer.micro_batch import Sample, assemble
from dflash_trainer.objective import block_loss, expected_acceptance
from dflash_trainer.prefetch import draw_anchors, planned_anchors
from dflash_trainer.step import Recipe, Stepper
from dflash_trainer.target import FrozenTarget
from dflash_trainer.validation import EPOCH, validate

ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("strategy", ["packed", "bucketed", "sorted"])
def test_the_hold_out_s_loss_is_that_of_its_samples_one_by_one(strategy, target_dir, store, make_plan):
    plan = make_plan(strategy=strategy, holdout=0.3)
    model = AutoModelForCausalLM.from_pretrained(target_dir)
    config = derive_config(model.config, block_size=4, mask_token_id=259, overrides={"num_hidden_layers": 2}, taps=(1, 3))
    draft, target = DraftModel(config).initialise(0), FrozenTarget(model, (1, 3))
    stepper = Stepper(draft, target, Recipe(), plan.total_steps)
    before, luck = [parameter.clone() for parameter in draft.parameters()], torch.random.get_rng_state()
    found = validate(plan, store, stepper, ALONE)
    assert torch.equal(luck, torch.random.get_rng_state())
    assert all(torch.equal(*pair) for pair in zip(before, draft.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in draft.parameters())

    held = [sample for row in plan.rows(None) for sample in row["samples"]]
    assert len(held) == len(set(held)) > 5
    total = weight = tokens = anchors = 0
    hits, counts = torch.zeros(3), torch.zeros(3)
    for number in held:
        ids, spans = store.sample(number)
        chosen = draw_anchors(spans, planned_anchors(spans, plan), plan["seed"], EPOCH, number)
        sample = Sample(ids, spans, chosen)
        batch = assemble([sample], packed=False, width=len(ids), block_size=4, epoch=0, step=0, slot=0, numbers=(number,))
        tokens, anchors = tokens + len(ids), anchors + len(chosen)
        if len(chosen):
            loss = block_loss(draft, target, batch)
            total, weight = total + loss.total.item(), weight + loss.weight.item()
            hits, counts = hits + loss.hits, counts + loss.counts
    assert found.loss == pytest.approx(total / weight, rel=1e-5)
    assert found.slot_accuracy == pytest.approx((hits / counts).tolist())
    assert (found.tokens, found.anchors) == (tokens, anchors)
    assert found.expected_acceptance == pytest.approx(1 + sum(accumulate(found.slot_accuracy, mul)))


def test_expected_acceptance_of_known_accuracies():
    assert expected_acceptance([]) == expected_acceptance([0.0, 1.0]) == 1
    assert expected_acceptance([1.0, 1.0, 1.0]) == 4
    assert expected_acceptance([0.5, 0.5]) == 1.75


@pytest.fixture
def command(target_dir, tmp_path):
    """Run dflash-train in this process on a small draft; returns the result."""
    (tmp_path / "draft.json").write_text(json.dumps({"num_hidden_layers": 1, "block_size": 4}))

    def run(plan, output: str, *options: object, config: bool = True):
        words = ["--manifest-dir", plan.path, "--target", target_dir, "-o", tmp_path / output, *options]
        words += ["--draft-config", tmp_path / "draft.json"] if config else []
        return CliRunner().invoke(train, [str(word) for word in words])

    return run


def rows(path: Path) -> list[dict]:
    """The lines of a JSONL file."""
    return [json.loads(line) for line in path.open()]


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """What training goes on with."""
    return load_file(newest_checkpoint(run) / "optimizer.safetensors")


def test_validation_changes_no_bit_of_training_and_is_the_same_on_two_ranks(command, make_plan, tmp_path):
    plan = make_plan(holdout=0.3)
    for name, options in {
        "often": ("--eval-every", 1),
        "two": ("--eval-every", 2, "--nproc-per-node", 2),
        "once": (),
    }.items():
        done = command(plan, name, "--max-steps", 4, *options)
        assert done.exit_code == 0, done.output
    often, once = tensors(tmp_path / "often"), tensors(tmp_path / "once")
    assert all(torch.equal(often[name], once[name]) for name in often)
    found = {name: rows(tmp_path / name / "validation.jsonl") for name in ("often", "two", "once")}
    assert [row["step"] for row in found["often"]] == [1, 2, 3, 4]
    assert [row["step"] for row in found["two"]] == [2, 4]
    assert [row["step"] for row in found["once"]] == [4]
    assert found["two"][-1]["loss"] == pytest.approx(found["often"][-1]["loss"], rel=1e-4)
    assert found["two"][-1]["anchors"] == found["often"][-1]["anchors"]
    assert found["once"][0]["loss"] == found["often"][-1]["loss"]


def test_a_resumed_run_states_each_validation_once(command, make_plan, tmp_path):
    plan = make_plan(holdout=0.3)
    for steps in (2, 4):
        assert command(plan, "run", "--max-steps", steps, "--eval-every", 1, "--resume", "auto").exit_code == 0
    (tmp_path / "run" / "validation.jsonl").open("a").write('{"step": 9, "loss"')
    assert command(plan, "run", "--max-steps", 5, "--eval-every", 1, "--resume", "auto").exit_code == 0
    assert [row["step"] for row in rows(tmp_path / "run" / "validation.jsonl")] == [1, 2, 3, 4, 5]


def test_a_plan_without_hold_out_cannot_be_validated_on(command, make_plan):
    done = command(make_plan(), "run", "--eval-every", 1)
    assert done.exit_code == 1
    assert "has no hold-out to validate on" in done.stderr


def test_a_run_may_start_from_a_draft(command, make_plan, tmp_path):
    plan = make_plan(epochs=1)
    assert command(plan, "first", "--max-steps", 2).exit_code == 0
    served = load_file(newest_checkpoint(tmp_path / "first") / "model.safetensors")
    done = command(plan, "second", "--max-steps", 0, "--init-from", tmp_path / "first", config=False)
    assert done.exit_code == 0, done.output
    start = tensors(tmp_path / "second")
    assert {name.removeprefix("master.") for name in start} == set(served)
    assert all(torch.equal(start[f"master.{name}"], served[name].float()) for name in served)
    assert (
        command(
            plan, "third", "--max-steps", 1, "--init-from", newest_checkpoint(tmp_path / "first"), config=False
        ).exit_code
        == 0
    )
    for options, words in (
        ((plan, "x", "--init-from", tmp_path / "first"), "both given"),
        ((plan, "x", "--init-from", tmp_path), "no draft and no checkpoint here"),
        ((make_plan(block_size=8), "x", "--init-from", tmp_path / "first"), "block_size 4, the plan has 8"),
    ):
        done = command(*options, config=words == "both given")
        assert done.exit_code == 1
        assert words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_run_may_train_sliding_layers_and_go_on_from_them(command, make_plan, tmp_path):
    plan = make_plan(epochs=1)
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    path = tmp_path / "sliding.json"
    path.write_text(json.dumps({"num_hidden_layers": 2, **sliding}))
    assert command(plan, "full", "--max-steps", 1).exit_code == 0
    assert command(plan, "first", "--max-steps", 1, "--draft-config", path, config=False).exit_code == 0
    done = command(plan, "second", "--max-steps", 1, "--init-from", tmp_path / "first", config=False)
    assert done.exit_code == 0, done.output
    for run in ("first", "second"):
        written = json.loads((newest_checkpoint(tmp_path / run) / "config.json").read_text())
        assert written.items() >= (sliding | {"use_sliding_window": True}).items()
    losses = {run: rows(tmp_path / run / "metrics.jsonl")[0]["loss"] for run in ("full", "first")}
    assert losses["full"] != losses["first"]


def status(run: Path, *options: str):
    """`dflash-train --status`."""
    return CliRunner().invoke(train, ["--status", str(run), *options])


def test_status_is_read_from_a_run_s_files_also_while_it_runs(command, make_plan, tmp_path):
    plan = make_plan(holdout=0.3)
    assert command(plan, "run", "--max-steps", 3, "--eval-every", 1).exit_code == 0
    run = tmp_path / "run"
    done = status(run)
    assert done.exit_code == 0, done.output
    assert f"{run}: not running" in done.stdout
    assert f"step 3 of {plan.total_steps}, epoch" in done.stdout
    assert f"loss {rows(run / 'metrics.jsonl')[-1]['loss']:.3f}" in done.stdout
    assert f"hold-out at step 3: loss {rows(run / 'validation.jsonl')[-1]['loss']:.3f}" in done.stdout
    assert "step-00000003" in done.stdout
    with (run / ".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (run / "metrics.jsonl").open("a").write('{"step": 4, "lo')
        again = status(run)
    assert f"{run}: running" in again.stdout
    assert "step 3 of" in again.stdout


def test_status_of_what_is_no_run_and_beside_other_options(tmp_path):
    done = status(tmp_path)
    assert done.exit_code == 1
    assert "no run here" in done.stderr and done.stderr.count("\n") == 1
    assert status(tmp_path, "--lr", "1").exit_code == 2
