"""Feeding follows the plan: every sample once, the same steps for any number of ranks, counts known from the start."""

import gc
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
import torch
from conftest import write_corpus

from dflash_prep.anchors import draw_anchors
from dflash_prep.sample_maker import Options
from dflash_prep.store import Store
from dflash_prep.tokenize import tokenize
from dflash_prep.tokenizer import load_tokenizer
from dflash_trainer.prefetch import BatchPrefetcher, planned_anchors
from tests.prep.support import make_plan as make_plan_of

STRATEGIES = ["sorted", "shuffled", "bucketed", "packed"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_each_step_and_miss_nothing(strategy, world_size, store, make_plan):
    plan = make_plan(strategy=strategy)
    ranks = [list(BatchPrefetcher(plan, store, rank=r, world_size=world_size)) for r in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    for epoch, summary in enumerate(plan["epochs"]):
        own = [[batch for batch in batches if batch.epoch == epoch] for batches in ranks]
        assert all(len(batches) == summary["steps"] * plan["slots"] // world_size for batches in own)
        seen = [sample for batches in own for batch in batches for sample in batch.samples]
        assert sorted(seen) == list(range(len(store)))
        by_step = {(b.step, b.slot): b.samples for batches in own for b in batches}
        assert by_step == {(row["step"], row["slot"]): tuple(row["samples"]) for row in plan.rows(epoch)}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tensors_hold_the_samples(strategy, store, make_plan):
    plan = make_plan(strategy=strategy)
    rows = {(e, row["step"], row["slot"]): row for e in range(2) for row in plan.rows(e)}
    for batch in BatchPrefetcher(plan, store):
        row = rows[batch.epoch, batch.step, batch.slot]
        assert batch.input_ids.numel() == row["padded_tokens"]
        assert len(batch.anchors) == row["anchors"]
        tokens, positions = batch.input_ids.flatten()[batch.real], batch.position_ids.flatten()[batch.real]
        expected = [store.sample(sample)[0].astype(np.int64) for sample in batch.samples]
        assert torch.equal(tokens, torch.from_numpy(np.concatenate([*expected, np.empty(0, np.int64)])))
        assert positions.tolist() == [p for ids in expected for p in range(len(ids))] == batch.positions.tolist()
        anchors = [
            draw_anchors(store.sample(s)[1], planned_anchors(store.sample(s)[1], plan), plan["seed"], batch.epoch, s)
            for s in batch.samples
        ]
        assert batch.anchors.tolist() == [a for each in anchors for a in each]
        assert batch.block_tokens.tolist() == [ids[a] for ids, each in zip(expected, anchors, strict=True) for a in each]


def test_counts_are_right_before_anything_is_produced(store, make_plan):
    plan = make_plan(strategy="packed", epochs=3)
    steps = [epoch["steps"] for epoch in plan["epochs"]]
    for world_size in (1, 2, 4):
        per_step = plan["slots"] // world_size
        for first in range(sum(steps) + 1):
            batches = BatchPrefetcher(plan, store, world_size=world_size, first_step=first)
            epoch, local = plan.locate(first)
            if epoch == 3:
                epoch, local = 2, steps[2]
            assert batches.epoch == epoch
            assert batches.batches_per_epoch == steps[epoch] * per_step
            assert batches.batches_produced == local * per_step
            assert batches.epoch_progress == local / steps[epoch]
            batches.close()


def test_counts_follow_the_epochs(store, make_plan):
    plan = make_plan(strategy="bucketed", epochs=2)
    batches = BatchPrefetcher(plan, store, first_step=1)
    produced = plan["slots"]
    for batch in batches:
        produced = (
            1 if batch.epoch != (batches.epoch if produced else 0) or (batch.step, batch.slot) == (0, 0) else produced + 1
        )
        assert (batches.epoch, batches.batches_produced) == (batch.epoch, produced)
        assert batches.batches_produced == batch.step * plan["slots"] + batch.slot + 1
    assert batches.epoch_progress == 1.0
    with pytest.raises(StopIteration):
        next(batches)


def test_resume_repeats_and_skips_nothing(store, make_plan):
    plan = make_plan(strategy="shuffled")
    key = lambda batch: (batch.epoch, batch.step, batch.slot, batch.samples, batch.anchors.tolist())  # noqa: E731
    whole = [key(batch) for batch in BatchPrefetcher(plan, store)]
    for first in (1, plan["epochs"][0]["steps"], plan.total_steps - 1):
        assert [key(batch) for batch in BatchPrefetcher(plan, store, first_step=first)] == whole[first * plan["slots"] :]


def test_a_fault_on_the_thread_reaches_the_loop(store, make_plan, monkeypatch):
    def fail(*_):
        raise OSError("the disk is gone")

    plan = make_plan()
    monkeypatch.setattr(type(store), "sample", fail)
    batches = BatchPrefetcher(plan, store)
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    batches.close()


def held_while_feeding(plan, store) -> list[int]:
    """The bytes, Arrow's own included, that are held in the midst of each epoch once what is unreachable is collected."""
    gc.freeze()  # what was there before need not be looked through each time
    held, batches = [], BatchPrefetcher(plan, store)
    tracemalloc.start()
    for batch in batches:
        if (batch.step, batch.slot) == (plan["epochs"][batch.epoch]["steps"] // 2, 0):
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes())
    tracemalloc.stop()
    gc.unfreeze()
    return held


def test_memory_stays_flat_over_epochs_and_does_not_grow_with_the_store(tmp_path, target_dir):
    held = []
    for samples in (50, 400):
        corpus = write_corpus(tmp_path / f"{samples}.jsonl", samples)
        tokenize((str(corpus),), load_tokenizer(str(target_dir)), tmp_path / f"tokens-{samples}", Options())
        store = Store(tmp_path / f"tokens-{samples}")
        store.sample(0)  # the index is read, which holds 16 bytes a sample, and the shard mapped
        plan = make_plan_of(store.path, tmp_path / f"plan-{samples}", epochs=16, slots=4, token_budget=1000, block_size=4)
        epochs = held_while_feeding(plan, store)
        under_way = 6 * 4 * 8 * 1000  # bytes: micro-batches, of four int64 columns, that are ready or not at that moment
        assert max(epochs[-8:]) <= max(epochs[:8]) + under_way
        held.append(max(epochs))
    assert held[1] <= held[0] + under_way
