"""Copies of a sample in an epoch: each has anchors of its own, whatever the ranks and wherever a run resumes."""

import pytest

from dflash_prep.anchors import draw_anchors
from dflash_prep.manifest import Plan
from dflash_trainer.copies import numbered_rows
from dflash_trainer.prefetch import BatchPrefetcher, planned_anchors


@pytest.fixture
def plan(make_plan, store, monkeypatch) -> Plan:
    """A plan whose micro-batches hold their longest sample twice, and the store's longest once more."""
    plan = make_plan(strategy="shuffled")
    rows, lengths = plan.rows, store.column("length")

    def with_copies(epoch: int, first_step: int = 0):
        for row in rows(epoch, first_step):
            if row["samples"]:
                samples = [*row["samples"], max(row["samples"], key=lambda sample: lengths[sample]), int(lengths.argmax())]
                row |= {"samples": samples, "width": int(lengths[samples].max())}
            yield row

    monkeypatch.setattr(plan, "rows", with_copies)
    plan.manifest["weights"] = {"demo.jsonl": 2}
    return plan


def keys(plan: Plan, store, **options) -> list[tuple]:
    return [(b.epoch, b.step, b.slot, b.samples, b.anchors.tolist()) for b in BatchPrefetcher(plan, store, **options)]


def test_ranks_and_resume_draw_the_anchors_of_one_run(plan, store):
    whole = keys(plan, store)
    steps = plan["epochs"][0]["steps"]
    for first in (0, 3, steps - 1, steps, steps + 2):
        expected = whole[first * plan["slots"] :]
        assert keys(plan, store, first_step=first) == expected
        ranks = [keys(plan, store, rank=rank, world_size=2, first_step=first) for rank in range(2)]
        assert sorted(ranks[0] + ranks[1]) == expected


def test_copies_are_counted_in_the_plans_order(plan, store):
    seen = {}
    for batch in BatchPrefetcher(plan, store):
        anchors, start = batch.anchors.tolist(), 0
        for sample, count in zip(batch.samples, batch.block_counts, strict=True):
            copy = seen.get((batch.epoch, sample), 0)
            seen[batch.epoch, sample] = copy + 1
            spans = store.sample(sample)[1]
            expected = draw_anchors(spans, planned_anchors(spans, plan), plan["seed"], batch.epoch, sample, copy)
            assert anchors[start : start + count] == expected.tolist()
            start += count
    assert max(seen.values()) > 10  # the store's longest sample, in each micro-batch


def test_two_copies_in_one_micro_batch_differ(plan, store):
    batches = BatchPrefetcher(plan, store)
    batch = next(batches)
    batches.close()
    drawn, start = {}, 0
    for sample, count in zip(batch.samples, batch.block_counts, strict=True):
        drawn.setdefault(sample, []).append(batch.anchors[start : start + count].tolist())
        start += count
    (first, second, *_) = max(drawn.values(), key=len)
    assert len(first) == len(second)
    assert first != second


@pytest.mark.parametrize("weights", [None, {}, []])
def test_without_weights_nothing_is_counted(weights, plan, store):
    plan.manifest["weights"] = weights
    assert {copies for _, copies in numbered_rows(plan, len(store), 0, 1) if copies is not None} == set()
    assert all(row["step"] >= 1 for row, _ in numbered_rows(plan, len(store), 0, 1))
