"""Padded steps cut anew: the exact cut against brute force, the draw, budgets, mixture."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_prep.batching import FREE, Limits, Samples
from dflash_prep.cost import CostModel
from dflash_prep.cutting import ALLOWANCE, NEVER, cheapest_cut, cut_steps, least_cap, slots_needed
from tests.prep.support import planning_samples, price_for
from tests.prep.test_buckets import reference_lengths


@st.composite
def steps(draw):
    """Rows of falling width as `cutting` holds them, limits that they fit in, and how many slots."""
    lengths = sorted(draw(st.lists(st.integers(1, 30), min_size=1, max_size=9)), reverse=True)
    samples = planning_samples(lengths)
    limits = Limits(
        draw(st.integers(max(lengths), 5 * max(lengths))), draw(st.sampled_from([FREE, int(samples.anchors.max()) + 3]))
    )
    price = price_for(
        samples, limits, draw(st.sampled_from([CostModel(), CostModel(0, 1, 0, 0, 0), CostModel(5, 1, 0.1, 2, 0.5)]))
    )
    rows = np.stack([samples.length, samples.length, samples.anchors, price.blocks(samples.anchors, samples.length)], axis=1)
    limit = np.array([limits.tokens, limits.anchors, NEVER, price.token, price.square])
    everything = np.ones(len(lengths), np.bool_)
    order = np.arange(len(lengths))
    least = int(slots_needed(rows, order, order, everything, limit))
    return rows, limit, draw(st.integers(least, len(lengths)))


def cost_of(rows, limit, start: int, end: int) -> int | None:
    """What rows start to end cost in one slot; None where they do not fit."""
    width, count = int(rows[start, 1]), end - start
    if count * width > limit[0] or rows[start:end, 2].sum() > limit[1]:
        return None
    return count * (int(limit[3]) * width + int(limit[4]) * width**2) + int(rows[start:end, 3].sum())


@settings(max_examples=200)
@given(steps())
def test_the_cut_is_the_cheapest_of_those_whose_dearest_slot_is_cheap(case):
    rows, limit, count = case
    size = len(rows)
    ways = []
    for inner in combinations(range(1, size), count - 1):
        parts = [cost_of(rows, limit, start, end) for start, end in pairwise((0, *inner, size))]
        if None not in parts:
            ways.append((sum(parts), max(parts)))
    bottleneck = min(dearest for _, dearest in ways)
    cap = int(least_cap(rows, np.arange(size), count, limit))
    assert bottleneck <= cap <= bottleneck * (1 + 1 / 1_000) + 4_096
    cuts = cheapest_cut(rows, np.arange(size), count, limit)
    parts = [cost_of(rows, limit, start, end) for start, end in pairwise(cuts.tolist())]
    assert len(parts) == count and None not in parts
    assert sum(parts) == min(total for total, dearest in ways if dearest <= cap + cap // ALLOWANCE)


@pytest.mark.parametrize(("slots", "real"), [(8, 0.87), (16, 0.92)])
def test_the_reference_is_well_filled_and_as_mixed_as_a_full_shuffle(slots, real):
    lengths = reference_lengths(20_000)
    samples = Samples(lengths, lengths // 2, lengths // 8)
    limits = Limits(32_768)
    batches = cut_steps(np.random.default_rng(0).permutation(20_000), samples, limits, price_for(samples, limits), slots)
    assert sorted(batches.samples.tolist()) == list(range(20_000))
    padded = batches.sizes * batches.longest(lengths)
    assert padded.max() <= 32_768
    assert lengths.sum() / padded.sum() > real
    log = np.log(lengths)
    rows = batches.sizes.reshape(-1, slots).sum(axis=1)
    means = batches.total(log).reshape(-1, slots).sum(axis=1) / rows
    assert 0.4 < means.var(ddof=1) * rows.mean() / log.var() < 1.7
    tokens = batches.total(lengths).reshape(-1, slots).sum(axis=1)
    assert tokens[:-1].min() > 0.9 * tokens.mean() and tokens[-1] > 0.8 * tokens.mean()


@pytest.mark.parametrize("slots", [3, 16, 600])
def test_a_step_of_many_short_samples(slots):
    lengths = np.random.default_rng(4).integers(5, 400, 4_300)
    samples = planning_samples(lengths.tolist())
    limits = Limits(400 * 1_300 // min(slots, 16))
    batches = cut_steps(np.arange(4_300), samples, limits, price_for(samples, limits), slots)
    assert sorted(batches.samples.tolist()) == list(range(4_300))
    assert (batches.sizes * batches.longest(lengths)).max() <= limits.tokens
