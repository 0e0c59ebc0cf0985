"""Micro-batches of padded rows: budgets, order, the fewest possible, level costs."""

from itertools import chain, combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_prep.batching import FREE, Batches, Limits, Rows, costs, fill, halve, level, make_rows
from dflash_prep.cost import CostModel
from tests.prep.support import assert_within, group_tokens, groups_of, planning_samples, price_for


@st.composite
def orders(draw, most: int = 40):
    """Rows in some order, limits that each row keeps by itself, and prices."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=most))
    samples = planning_samples(lengths)
    align = draw(st.sampled_from([1, 4]))
    widest = -(-max(lengths) // align) * align
    anchors = draw(st.sampled_from([FREE, int(samples.anchors.max()), int(samples.anchors.max()) + 5]))
    limits = Limits(draw(st.integers(widest, 4 * widest + 7)), anchors, align)
    order = np.array(draw(st.permutations(range(len(lengths)))), np.int64)
    bucket = np.sort(draw(st.sampled_from([np.zeros(len(order), np.int64), samples.length[order] // 16])))
    price = price_for(samples, limits, draw(st.sampled_from([CostModel(), CostModel(5, 1, 0.1, 2, 0.5)])))
    return make_rows(order, bucket, limits.width(samples.length[order]), samples, price), samples, limits, price


def keeps(group: list[int], samples, limits: Limits) -> bool:
    """Whether a group is within the limits, sample by sample."""
    within = group_tokens(group, samples, False, limits.align) <= limits.tokens
    return within and samples.anchors[group].sum() <= limits.anchors


def cost_of(group: list[int], samples, limits: Limits, price) -> int:
    """The cost of a padded group by the formula."""
    width = group_tokens(group, samples, False, limits.align) // len(group)
    draft = sum(int(samples.anchors[i]) * (price.anchor + price.reach * int(samples.length[i])) for i in group)
    return price.fixed + len(group) * (price.token * width + price.square * width**2) + draft


@given(orders())
def test_fill_keeps_order_limits_and_buckets_and_stops_only_at_one(case):
    rows, samples, limits, price = case
    groups = groups_of(Batches(rows.sample, fill(rows, limits, price)))
    assert list(chain(*groups)) == rows.sample.tolist()
    assert_within(groups, samples, limits)
    bucket = dict(zip(rows.sample.tolist(), rows.bucket.tolist(), strict=True))
    assert all(len({bucket[sample] for sample in group}) == 1 for group in groups)
    for group, following in pairwise(groups):
        assert bucket[group[0]] != bucket[following[0]] or not keeps([*group, following[0]], samples, limits)


@given(orders(most=9))
def test_fill_needs_the_fewest_groups_of_all_cuts(case):
    rows, samples, limits, price = case
    rows = Rows(rows.sample, np.zeros_like(rows.bucket), rows.width, rows.anchors, rows.blocks)
    order, count = rows.sample.tolist(), len(rows.sample)

    def possible(parts: int) -> bool:
        ways = (pairwise((0, *inner, count)) for inner in combinations(range(1, count), parts - 1))
        return any(all(keeps(order[start:end], samples, limits) for start, end in way) for way in ways)

    assert len(fill(rows, limits, price)) - 1 == next(parts for parts in range(1, count + 1) if possible(parts))


@given(orders(), st.integers(1, 400))
def test_a_cap_holds_wherever_there_is_a_choice(case, share):
    rows, samples, limits, price = case
    cap = share * int(costs(rows, fill(rows, limits, price), price).max()) // 100
    for group in groups_of(Batches(rows.sample, fill(rows, limits, price, cap))):
        assert len(group) == 1 or cost_of(group, samples, limits, price) <= cap


@given(orders(), st.integers(0, 12))
def test_level_gives_the_number_asked_for(case, more):
    rows, samples, limits, price = case
    count = len(fill(rows, limits, price)) - 1 + more
    cuts = level(rows, limits, price, count)
    groups = groups_of(Batches(rows.sample, cuts))
    assert len(groups) == min(count, len(rows.sample))
    assert list(chain(*groups)) == rows.sample.tolist()
    assert_within(groups, samples, limits)
    assert costs(rows, cuts, price).tolist() == [cost_of(group, samples, limits, price) for group in groups]


def plain_rows(lengths: list[int], limits: Limits):
    """Rows of one bucket in the given order."""
    samples = planning_samples(lengths)
    price = price_for(samples, limits)
    order = np.arange(len(lengths))
    return make_rows(order, np.zeros_like(order), samples.length, samples, price), price


def test_level_spreads_equal_rows_evenly():
    rows, price = plain_rows([10] * 100, Limits(320))
    assert np.diff(level(rows, Limits(320), price, 5)).tolist() == [20] * 5


def test_level_evens_out_costs():
    lengths = np.random.default_rng(1).integers(5, 400, 3_000).tolist()
    rows, price = plain_rows(lengths, Limits(4_000))
    count = len(fill(rows, Limits(4_000), price)) + 20
    levelled = costs(rows, level(rows, Limits(4_000), price, count), price)
    assert len(levelled) == count
    assert levelled.max() <= 1.15 * levelled.mean()


@given(orders(), st.integers(1, 50))
def test_halve_keeps_the_order_and_splits_until_enough(case, count):
    rows, samples, limits, price = case
    before = fill(rows, limits, price)
    cuts = halve(rows, before, price, count)
    assert len(cuts) - 1 == max(len(before) - 1, min(count, len(rows.sample)))
    assert set(before.tolist()) <= set(cuts.tolist())
    assert_within(groups_of(Batches(rows.sample, cuts)), samples, limits)


@pytest.mark.parametrize("sizes", [[2, 0, 3, 0, 0, 1], [0], [4], [0, 0, 2]])
def test_batches_sum_and_find_the_longest_with_empty_ones_between(sizes):
    flat = np.arange(sum(sizes))
    values = np.array([5, 1, 7, 2, 9, 4])
    batches = Batches(flat, np.concatenate([[0], np.cumsum(sizes)]))
    groups = groups_of(batches)
    assert batches.total(values).tolist() == [sum(int(values[i]) for i in group) for group in groups]
    assert batches.longest(values).tolist() == [max((int(values[i]) for i in group), default=0) for group in groups]
    order = np.array([*reversed(range(len(sizes))), -1])
    assert groups_of(batches.taken(order)) == [*reversed(groups), []]
