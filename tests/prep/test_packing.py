"""Packed steps: nothing lost, nothing above a budget, full, level, as mixed as a full shuffle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_prep.batching import FREE, Limits, Samples
from dflash_prep.cost import CostModel
from dflash_prep.packing import deal, exchange, make_loads, pack, unevenness
from tests.prep.support import price_for
from tests.prep.test_buckets import reference_lengths

LENGTHS = reference_lengths(20_000)
MODELS = {
    "target": CostModel(),
    "draft": CostModel(0, 1, 1 / 24_576, 8, 5e-4),
    "steep": CostModel(0, 1, 1 / 6_144, 20, 1e-3),
}


def reference_samples(varied: bool) -> Samples:
    """Lengths of the reference, half or a random share of them with loss, a quarter of those anchors, at most 512."""
    share = np.random.default_rng(1).uniform(0.1, 0.9, len(LENGTHS)) if varied else 0.5
    loss = np.maximum(1, (LENGTHS * share).astype(np.int64))
    return Samples(LENGTHS, loss, np.minimum(-(-(loss - 1) // 4), 512))


def shares(batches, samples: Samples, slots: int, values: np.ndarray) -> np.ndarray:
    """A sum of each slot, [steps, slots]."""
    return batches.total(values).reshape(-1, slots).astype(float)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("slots", [8, 16])
def test_the_reference_fills_its_slots_and_levels_them(model, slots):
    samples, limits = reference_samples(False), Limits(32_768)
    batches = pack(
        np.random.default_rng(0).permutation(len(samples)), samples, limits, price_for(samples, limits, MODELS[model]), slots
    )
    assert sorted(batches.samples.tolist()) == list(range(len(samples)))
    tokens = shares(batches, samples, slots, samples.length)
    assert tokens.max() <= 32_768
    # as few steps as could be, and level: what a step is short of the mean is its longest samples' fault
    assert len(tokens) == -(-LENGTHS.sum() // (slots * (32_768 - 32_768 // 900)))
    assert tokens.sum(axis=1).min() > 0.98 * tokens.sum(axis=1).mean()
    judged = shares(batches, samples, slots, LENGTHS * (24_576 + LENGTHS))
    assert 1 - judged.sum() / (slots * judged.max(axis=1)).sum() < 0.002
    log = np.log(LENGTHS)
    means = shares(batches, samples, slots, log).sum(axis=1) / batches.sizes.reshape(-1, slots).sum(axis=1)
    assert means.var(ddof=1) * len(LENGTHS) / len(means) / log.var() < 1.7


def test_slots_agree_in_the_draft_where_anchors_do_not_follow_lengths():
    samples, limits = reference_samples(True), Limits(32_768)
    price = price_for(samples, limits, MODELS["draft"])
    batches = pack(np.arange(len(samples)), samples, limits, price, 8)
    cost = shares(batches, samples, 8, price.rows(1, samples.length) + price.blocks(samples.anchors, samples.length))
    assert 1 - cost.sum() / (8 * cost.max(axis=1)).sum() < 0.01


@pytest.mark.parametrize("most", [2_600, 3_000, 6_000])
def test_an_anchor_budget_is_as_hard_as_the_token_budget(most):
    samples = reference_samples(True)
    limits = Limits(32_768, most)
    batches = pack(np.arange(len(samples)), samples, limits, price_for(samples, limits), 8)
    assert batches.total(samples.anchors).max() <= most
    assert batches.total(samples.length).max() <= 32_768
    assert sorted(batches.samples.tolist()) == list(range(len(samples)))
    steps = len(batches) // 8
    least = max(samples.length.sum() / (8 * 32_768), samples.anchors.sum() / (8 * most))
    assert steps <= 1.1 * least + 2


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 6), st.integers(0, 100))
def test_exchanges_keep_every_sample_and_never_make_slots_less_even(lengths, slots, more):
    length = np.array(lengths)
    held = np.stack([length, np.ones_like(length)], axis=1)
    budget = np.array([max(length.max(), -(-length.sum() // slots)) + more, FREE])
    samples = Samples(length, length, held[:, 1])
    loads = make_loads(length, held[:, 1], price_for(samples, Limits(int(budget[0]))), slots)
    start, member = deal(held, np.arange(len(length)), slots, budget)
    before = total_unevenness(held, loads, start, member, budget)
    sizes = np.diff(start).tolist()
    exchange(held, loads, start, member, budget)
    assert np.diff(start).tolist() == sizes
    assert sorted(member.tolist()) == list(range(len(length)))
    assert total_unevenness(held, loads, start, member, budget) <= before
    if len(length) >= slots:
        assert min(sizes) > 0


def total_unevenness(held, loads, start, member, budget) -> int:
    """The sum over slots of what the exchange lowers."""
    slots = len(start) - 1
    mean = loads[member].sum(axis=0) // slots
    weight = np.maximum(1, (4 << 22) // budget)
    total = 0
    for slot in range(slots):
        part = member[start[slot] : start[slot + 1]]
        target, draft = (loads[part].sum(axis=0) - mean).tolist()
        tokens, anchors = held[part].sum(axis=0).tolist()
        total += int(unevenness(target, draft, tokens, anchors, budget, weight))
    return total
