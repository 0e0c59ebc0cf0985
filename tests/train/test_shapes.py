"""Shapes for compiled kernels: what is padded changes neither loss nor gradient, and nothing is compiled twice."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from dflash_trainer.config import derive_config
from dflash_trainer.draft import DraftModel
from dflash_trainer.flex import TILE
from dflash_trainer.prefetch import BatchPrefetcher, make_micro_batch
from dflash_trainer.shapes import shapes_for, tiled_shapes
from dflash_trainer.staging import Buffer, views
from dflash_trainer.step import Recipe, Stepper
from dflash_trainer.target import FrozenTarget

TAPS = (1, 3)
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5, "use_sliding_window": True}


def make_stepper(target_dir, dtype: torch.dtype, **overrides) -> Stepper:
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=dtype)
    overrides = {"num_hidden_layers": 2, **overrides}
    config = derive_config(model.config, block_size=4, mask_token_id=259, overrides=overrides, taps=TAPS)
    return Stepper(DraftModel(config).initialise(3).to(dtype), FrozenTarget(model, TAPS), Recipe(), 100)


@pytest.fixture
def differentiable(monkeypatch):
    """torch refuses gradients of attention by tiles on CPUs, whose plain formulas have them all the same."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("overrides", [{}, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("strategy", ["packed", "bucketed"])
def test_tiles_give_the_gradient_of_segments(strategy, overrides, differentiable, target_dir, store, make_plan):
    plan = make_plan(strategy=strategy, token_budget=300, anchor_density=1.0, max_anchors=12)
    stepper = make_stepper(target_dir, torch.float64, **overrides)
    shapes = tiled_shapes(plan, frozenset({None}), frozenset(stepper.draft.config.windows))
    assert shapes.row % TILE == shapes.context % TILE == 0
    for row in list(plan.rows(0))[:: plan["slots"] + 1] + list(plan.rows(0))[-1:]:
        plain, tiled = (make_micro_batch(row, 0, plan, store, shapes=each) for each in (None, shapes))
        if plain.blocks:
            assert len(tiled.anchors) in shapes.blocks
            assert len(tiled.real) == shapes.context
        found = []
        for batch in (plain, tiled):
            buffer = stepper.gradient([batch])
            found.append((buffer.gradients.clone(), buffer.totals.clone(), buffer.hits.clone(), buffer.counts.clone()))
        (expected, totals, *hits), (gradient, tiled_totals, *tiled_hits) = found
        assert (gradient - expected).norm() <= 1e-10 * expected.norm()
        assert torch.allclose(tiled_totals[[0, 1, 2, 4]], totals[[0, 1, 2, 4]], rtol=1e-12)
        assert all(map(torch.equal, hits, tiled_hits))


@pytest.mark.parametrize("size", [2, 4, 10, 16])
def test_every_number_of_blocks_has_a_shape(size, make_plan):
    plan = make_plan(block_size=size)
    shapes = tiled_shapes(plan, frozenset(), frozenset())
    assert all(count * size % TILE == 0 for count in shapes.blocks)
    assert shapes.blocks[-1] >= plan.largest("anchors") == max(row["anchors"] for e in range(2) for row in plan.rows(e))
    assert plan.largest("tokens") == max(row["tokens"] for e in range(2) for row in plan.rows(e))


@pytest.mark.parametrize("strategy", ["packed", "bucketed"])
def test_a_run_compiles_in_its_first_step_only(strategy, target_dir, store, make_plan, monkeypatch):
    """And learns what it learns without."""
    monkeypatch.setattr(torch, "compile", lambda call, **options: TORCH_COMPILE(call, backend="eager", **options))
    plan = make_plan(strategy=strategy, holdout=0.1)
    assert len({row["anchors"] for row in plan.rows(0)}) > 3
    losses = []
    for compiled in (False, True):
        stepper = make_stepper(target_dir, torch.float32)
        if compiled:
            torch._dynamo.reset()
            counters.clear()
            stepper.draft.compile_layers()
            if strategy == "packed":
                stepper.target.compile()
        shapes = shapes_for(plan, torch.device("cpu"), compiled, (frozenset({None}), frozenset({None})))
        batches, graphs = BatchPrefetcher(plan, store, shapes=shapes), []
        for step in range(plan.total_steps):
            result = stepper.step(step, [next(batches) for _ in range(plan["slots"])])
            losses.append(result.loss)
            graphs.append(counters["stats"]["unique_graphs"])
        batches.close()
    assert graphs[0] > 0
    assert graphs == [graphs[0]] * plan.total_steps
    assert losses[: plan.total_steps] == pytest.approx(losses[plan.total_steps :], rel=1e-5)


TORCH_COMPILE = torch.compile


def test_one_piece_of_memory_holds_a_micro_batch(store, make_plan):
    """What a GPU is sent is what was assembled, whatever the buffer held before."""
    plan, buffer = make_plan(strategy="packed"), Buffer()
    shapes = tiled_shapes(plan, frozenset({None}), frozenset({None, 3}))
    for row in [*plan.rows(0), *plan.rows(1)]:
        batch = make_micro_batch(row, 0, plan, store, shapes=shapes)
        memory = buffer.fill(batch.tensors()).clone()
        sent = batch.with_tensors(views(memory, batch.tensors()))
        assert (sent.samples, sent.lengths, sent.block_counts) == (batch.samples, batch.lengths, batch.block_counts)
        assert sent.target_masks.keys() == batch.target_masks.keys() and sent.draft_masks.keys() == batch.draft_masks.keys()
        assert len(batch.tensors()) == len(sent.tensors()) >= 8
        for one, two in zip(sent.tensors(), batch.tensors(), strict=True):
            assert one.dtype == two.dtype and torch.equal(one, two)
