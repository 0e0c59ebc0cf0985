"""Micro-batches: budgets, order, and least cost against brute force."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_prep.batching import EXACT_CUT, Limits, Samples, cheapest_cut, cut, deal, fill, halve, level_fill
from dflash_prep.cost import row_cost
from tests.prep.support import assert_within, group_tokens, planning_samples

FREE = 2**62


@st.composite
def orders(draw, most: int = 40):
    """An order of samples and limits that each sample keeps by itself."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=most))
    samples = planning_samples(lengths)
    tokens = draw(st.integers(max(lengths), 4 * max(lengths) + 7))
    anchors = draw(st.sampled_from([FREE, int(samples.anchors.max()), int(samples.anchors.max()) + 5]))
    order = np.array(draw(st.permutations(range(len(lengths)))), np.int64)
    return order, samples, Limits(tokens, anchors)


def cuts_of(order: np.ndarray, count: int):
    """Every way to cut an order into `count` runs that are not empty."""
    for inner in combinations(range(1, len(order)), count - 1):
        yield [order[start:end] for start, end in pairwise((0, *inner, len(order)))]


def keeps(groups, samples: Samples, limits: Limits) -> bool:
    """Whether all groups are within the limits, sample by sample."""
    return all(
        group_tokens(group, samples, False) <= limits.tokens and samples.anchors[group].sum() <= limits.anchors
        for group in groups
    )


def cost_of(groups, samples: Samples) -> int:
    """The cost of padded groups."""
    return sum(len(group) * row_cost(int(samples.length[group].max())) for group in groups)


@given(orders())
def test_fill_keeps_order_and_limits_and_stops_only_at_a_limit(case):
    order, samples, limits = case
    groups = fill(order, samples, limits)
    assert np.concatenate(groups).tolist() == order.tolist()
    assert_within(groups, samples, limits)
    for group, following in pairwise(groups):
        assert not keeps([np.append(group, following[0])], samples, limits)


@given(orders(most=9))
def test_fill_needs_the_fewest_groups_of_all_cuts(case):
    order, samples, limits = case
    fewest = next(
        count
        for count in range(1, len(order) + 1)
        if any(keeps(groups, samples, limits) for groups in cuts_of(order, count))
    )
    assert len(fill(order, samples, limits)) == fewest


@given(orders(), st.integers(0, 12))
def test_level_fill_gives_the_number_asked_for(case, more):
    order, samples, limits = case
    count = len(fill(order, samples, limits)) + more
    groups = level_fill(order, samples, limits, count)
    assert len(groups) == min(count, len(order))
    assert np.concatenate(groups).tolist() == order.tolist()
    assert_within(groups, samples, limits)


def test_level_fill_spreads_equal_rows_evenly():
    samples = planning_samples([10] * 100)
    groups = level_fill(np.arange(100), samples, Limits(320, FREE), 5)
    assert [len(group) for group in groups] == [20] * 5


@given(orders(), st.integers(1, 50))
def test_halve_keeps_the_order_and_splits_until_enough(case, count):
    order, samples, limits = case
    groups = fill(order, samples, limits)
    halves = halve(groups, samples, count)
    assert len(halves) == max(len(groups), min(count, len(order)))
    assert np.concatenate(halves).tolist() == order.tolist()
    assert_within(halves, samples, limits)


@given(orders(), st.integers(1, 9))
def test_deal_loses_nothing_and_returns_only_what_has_no_room(case, slots):
    order, samples, limits = case
    groups, left = deal(order, samples, limits, slots)
    assert len(groups) == slots
    assert sorted([*np.concatenate(groups).tolist(), *left]) == sorted(order.tolist())
    assert left == [sample for sample in order.tolist() if sample in set(left)]
    assert_within([group for group in groups if len(group)], samples, limits, packed=True)
    for sample in left:  # a slot only ever gets fuller, so what had no room has none at the end
        for group in groups:
            grown = np.append(group, sample)
            assert group_tokens(grown, samples, True) > limits.tokens or samples.anchors[grown].sum() > limits.anchors
    if len(order) >= slots:
        assert all(len(group) for group in groups)
    else:
        assert not left


def test_deal_evens_out_the_cost():
    lengths = np.random.default_rng(2).integers(100, 4_000, 100).tolist()
    samples = planning_samples(lengths)
    groups, left = deal(np.arange(100), samples, Limits(60_000, FREE), 8)
    costs = [int(row_cost(samples.length[group]).sum()) for group in groups]
    assert not left
    assert max(costs) < 1.03 * sum(costs) / 8


@given(orders(), st.integers(1, 9))
def test_cut_takes_the_longest_prefix_that_fits(case, slots):
    order, samples, limits = case
    groups, left = cut(order, samples, limits, slots)
    taken = len(order) - len(left)
    assert left == order[taken:].tolist()
    assert sorted(np.concatenate(groups).tolist()) == sorted(order[:taken].tolist())
    assert len(groups) == min(slots, len(order))
    assert_within(groups, samples, limits)
    if left:
        more = order[: taken + 1]
        falling = more[np.argsort(-samples.length[more], kind="stable")]
        assert len(fill(falling, samples, limits)) > slots


@given(orders(most=9), st.integers(1, 4))
def test_cheapest_cut_equals_brute_force_over_all_cuts(case, extra):
    order, samples, limits = case
    order = order[np.argsort(-samples.length[order], kind="stable")]
    count = min(len(fill(order, samples, limits)) - 1 + extra, len(order))
    groups = cheapest_cut(order, samples, limits, count)
    assert len(groups) == count
    assert np.concatenate(groups).tolist() == order.tolist()
    assert_within(groups, samples, limits)
    costs = [cost_of(cuts, samples) for cuts in cuts_of(order, count) if keeps(cuts, samples, limits)]
    assert cost_of(groups, samples) == min(costs)


@pytest.mark.parametrize("slots", [3, 16, 600])
def test_a_step_of_more_samples_than_are_cut_exactly(slots):
    lengths = np.random.default_rng(4).integers(5, 400, 1_300).tolist()
    samples = planning_samples(lengths)
    limits = Limits(400 * 1_300 // min(slots, 16), FREE)
    order = np.argsort(-samples.length, kind="stable")
    assert len(order) > EXACT_CUT
    groups = cheapest_cut(order, samples, limits, slots)
    assert len(groups) == slots
    assert np.concatenate(groups).tolist() == order.tolist()
    assert_within(groups, samples, limits)
    even = np.array_split(order, slots)
    assert cost_of(groups, samples) <= 1.001 * cost_of(even, samples)  # not exact: cuts lie at candidates only
