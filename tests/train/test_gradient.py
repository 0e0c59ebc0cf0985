"""The step's gradient equals that of a plain reference, whatever the layout, the anchors and the number of processes."""

import pytest
import torch
from reference import block_loss, sample_features
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from workers import write_gradient

from dflash_prep.anchors import draw_anchors
from dflash_trainer.blocks import loss_mask
from dflash_trainer.config import derive_config
from dflash_trainer.draft import DraftModel
from dflash_trainer.launch import launch
from dflash_trainer.prefetch import BatchPrefetcher, planned_anchors
from dflash_trainer.step import Recipe, Stepper
from dflash_trainer.target import FrozenTarget

LAYOUTS = [
    {"strategy": "sorted"},
    {"strategy": "shuffled"},
    {"strategy": "bucketed", "buckets": 3},
    {"strategy": "bucketed", "bucket_scope": "step"},
    {"strategy": "packed"},
]
TAPS = (1, 3)


def double_draft(model, block_size: int = 4, **overrides) -> DraftModel:
    overrides = {"num_hidden_layers": 2} | overrides
    config = derive_config(model.config, block_size=block_size, mask_token_id=259, overrides=overrides, taps=TAPS)
    draft = DraftModel(config).initialise(3).double()
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name.endswith("norm.weight"):  # norms that are not 1 show whether each is applied where it should be
                parameter.mul_(torch.linspace(0.5, 1.5, len(parameter)))
    return draft


def reference_gradient(draft, model, store, plan, rows, epoch: int) -> tuple[torch.Tensor, float, list, list]:
    """The gradient of a step's rows, block by block, the step's loss, and each slot's hits and counts."""
    weights = {name: value.detach().clone().requires_grad_() for name, value in draft.named_parameters()}
    total, weight, slots = 0.0, 0.0, draft.config.block_size - 1
    hits, counts = [0] * slots, [0] * slots
    for sample in [sample for row in rows for sample in row["samples"]]:
        ids, spans = store.sample(sample)
        features = sample_features(model, ids.tolist(), TAPS)
        anchors = draw_anchors(spans, planned_anchors(spans, plan), plan["seed"], epoch, sample)
        for anchor in anchors.tolist():
            part = block_loss(draft, weights, model, ids, loss_mask(spans, len(ids)), anchor, features)
            total, weight = total + part[0], weight + part[1]
            for slot, hit in enumerate(part[2]):
                hits[slot], counts[slot] = hits[slot] + hit, counts[slot] + 1
    (total / weight).backward()
    flat = torch.cat([weights[name].grad.flatten() for name, _ in draft.named_parameters()])
    return flat, (total / weight).item(), hits, counts


WINDOWS = [
    {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7},
    {"layer_types": ["sliding_attention"] * 2, "sliding_window": 2},  # less than a block
]


@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("density", [0.3, 1.0])  # 1.0: every block overlaps its neighbours and touches the samples' ends
def test_gradient_equals_the_plain_reference(options, density, target_dir, store, make_plan, monkeypatch):
    plan = make_plan(**options, anchor_density=density, max_anchors=9, token_budget=300)
    monkeypatch.setattr("dflash_trainer.attention.SCORES_AT_ONCE", 6000)  # long samples take the recomputed path
    monkeypatch.setattr("dflash_trainer.loss.CHUNK_ELEMENTS", 2000)  # several chunks
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float64)
    compare(double_draft(model), model, store, plan)


@pytest.mark.parametrize("windows", WINDOWS, ids=lambda windows: f"window {windows['sliding_window']}")
def test_gradient_of_sliding_layers_equals_the_plain_reference(windows, target_dir, store, make_plan, monkeypatch):
    plan = make_plan(strategy="packed", anchor_density=1.0, max_anchors=9, token_budget=300)
    monkeypatch.setattr("dflash_trainer.attention.SCORES_AT_ONCE", 300)
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float64)
    compare(double_draft(model, **windows), model, store, plan)


@pytest.mark.parametrize("options", [{"strategy": "bucketed"}, {"strategy": "packed"}], ids=["bucketed", "packed"])
def test_metrics_of_a_draft_that_is_right_at_times_equal_the_plain_reference(options, target_dir, store, make_plan):
    """Over the micro-batches of a whole step; an untrained draft is never right."""
    plan = make_plan(**options, anchor_density=1.0, max_anchors=9, token_budget=300)
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float64)
    draft = double_draft(model)
    recipe = Recipe(learning_rate=1e-2, warmup=0.0)
    stepper = Stepper(draft, FrozenTarget(model, TAPS), recipe, 1000)
    batches = BatchPrefetcher(plan, store)
    for number in range(plan.total_steps):
        stepper.step(number, [next(batches) for _ in range(plan["slots"])])
    batches.close()
    whole = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float64)
    hits = compare(draft, whole, store, plan)
    assert all(hits), "a slot is never right: the test would not see which are counted"


def compare(draft, model, store, plan) -> list[int]:
    """The trainer's gradient, loss and metrics of a plan's first step against the reference's; returns each slot's hits."""
    rows = [row for row in plan.rows(0) if row["step"] == 0]
    expected, loss, hits, counts = reference_gradient(draft, model, store, plan, rows, epoch=0)
    stepper = Stepper(draft, FrozenTarget(model, TAPS), Recipe(), plan.total_steps)
    batches = BatchPrefetcher(plan, store)
    step = [next(batches) for _ in range(plan["slots"])]
    batches.close()
    buffer = stepper.gradient(step)
    anchors = [batch.anchors for batch in step]
    assert any((batch.weights == 0).any() for batch in step), "no block is clipped: the test would not see the ends"
    assert any((each.diff() == 1).any() for each in anchors), "no two blocks overlap"
    assert (buffer.gradients - expected).norm() <= 1e-10 * expected.norm()
    assert buffer.totals[1] / buffer.totals[0] == pytest.approx(loss, rel=1e-12)
    assert (buffer.hits.tolist(), buffer.counts.tolist()) == (hits, counts)
    return hits


@pytest.mark.parametrize("strategy", ["packed", "bucketed"])
def test_recomputed_activations_give_the_same_gradient_and_hold_less(strategy, target_dir, store, make_plan, monkeypatch):
    plan = make_plan(strategy=strategy, anchor_density=1.0)
    monkeypatch.setattr("dflash_trainer.attention.SCORES_AT_ONCE", 6000)
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float64)
    draft = double_draft(model)
    stepper = Stepper(draft, FrozenTarget(model, TAPS), Recipe(), plan.total_steps)
    batches = BatchPrefetcher(plan, store)
    step = [next(batches) for _ in range(plan["slots"])]
    batches.close()
    gradients, held = [], []
    for recompute in (False, True):
        draft.checkpoint_activations, sizes = recompute, []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, sizes=sizes: sizes.append(tensor.nbytes) or tensor, lambda kept: kept
        ):
            gradients.append(stepper.gradient(step).gradients.clone())
        held.append(sum(sizes))
    assert torch.equal(*gradients)
    assert held[1] < 0.7 * held[0]


def test_two_processes_reduce_to_the_gradient_of_one(target_dir, store, make_plan, tmp_path):
    plan = make_plan(strategy="packed")
    for workers in (1, 2):
        launch(write_gradient, (plan.path, store.path, target_dir, tmp_path / f"{workers}.safetensors"), workers)
    one, two = (load_file(tmp_path / f"{workers}.safetensors")["gradient"] for workers in (1, 2))
    assert one.dtype == torch.float64
    assert one.norm() > 0
    assert (one - two).norm() <= 1e-10 * one.norm()
