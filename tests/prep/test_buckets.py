"""Bucket boundaries: the dynamic program against all cuts, against a plain one, and on the reference lengths."""

from itertools import combinations, islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_prep.buckets import LEAST_SAVING, MAX_AUTO, assign, auto_boundaries, cut_curve, optimal_boundaries
from dflash_prep.cost import row_cost

COSTS = {
    "tokens": lambda length: length,
    "row cost": row_cost,
    "constant": lambda length: 7,
    "stairs": lambda length: 1_000 // (1_000 // length) if length <= 1_000 else length,
    "cube": lambda length: length**3,
}
SMALL = st.lists(st.integers(1, 40), min_size=1, max_size=24).filter(lambda lengths: len(set(lengths)) <= 9)


def total_cost(lengths: list[int], bounds: list[int], cost) -> int:
    """The cost of buckets, sample by sample."""
    return sum(cost(min(bound for bound in bounds if bound >= length)) for length in lengths)


def least_by_trying_all(lengths: list[int], buckets: int, cost) -> int:
    """The least cost over every choice of `buckets` bounds among the distinct lengths."""
    *inner, longest = sorted(set(lengths))
    return min(total_cost(lengths, [*bounds, longest], cost) for bounds in combinations(inner, buckets - 1))


def least_by_plain_program(lengths: np.ndarray, buckets: int, cost) -> list[int]:
    """The least cost of 1, 2, … buckets by the O(K · V²) dynamic program in numpy."""
    distinct, counts = np.unique(lengths, return_counts=True)
    ahead = np.concatenate([[0], np.cumsum(counts)])
    price = np.array([cost(int(length)) for length in distinct])
    part = (ahead[None, 1:] - ahead[:-1, None]) * price[None, :]  # [from, to]
    part[np.tril_indices(len(distinct), -1)] = 2**60
    best = np.concatenate([[0], np.full(len(distinct), 2**60)])
    found = []
    for _ in range(buckets):
        best = np.concatenate([[2**60], (best[:-1, None] + part).min(axis=0)])
        found.append(int(best[-1]))
    return found


@pytest.mark.parametrize("name", COSTS)
@given(lengths=SMALL)
def test_every_k_equals_brute_force_over_all_cuts(name, lengths):
    cost = COSTS[name]
    curve = list(cut_curve(np.array(lengths), cost))
    assert len(curve) == len(set(lengths))
    for buckets, (least, bounds) in enumerate(curve, start=1):
        assert len(bounds) == buckets
        assert all(low < high for low, high in pairwise(bounds))
        assert bounds[-1] == max(lengths) and set(bounds) <= set(lengths)
        assert least == least_by_trying_all(lengths, buckets, cost) == total_cost(lengths, bounds, cost)


@pytest.mark.parametrize("name", COSTS)
def test_a_large_histogram_equals_the_plain_program(name):
    cost = COSTS[name]
    lengths = np.minimum(np.random.default_rng(3).lognormal(6, 0.9, 20_000).astype(np.int64) + 1, 900)
    curve = list(islice(cut_curve(lengths, cost), 12))
    assert [least for least, _ in curve] == least_by_plain_program(lengths, 12, cost)
    for least, bounds in curve:
        upper = np.array(bounds)[np.searchsorted(bounds, lengths)]
        distinct, counts = np.unique(upper, return_counts=True)
        assert least == sum(int(count) * cost(int(bound)) for bound, count in zip(distinct, counts, strict=True))


def test_the_reference_lengths_have_their_known_optimum():
    generator = np.random.default_rng(11)
    first = generator.random(902_000) < 0.6727
    mixture = np.where(first, generator.lognormal(6.7276, 0.5215, 902_000), generator.lognormal(7.4595, 0.2606, 902_000))
    lengths = np.clip(mixture.astype(np.int64), 4, 8192)
    assert optimal_boundaries(lengths, 6, lambda length: length) == [771, 1213, 1719, 2288, 3293, 8192]


def test_more_buckets_than_distinct_lengths_give_one_each():
    assert optimal_boundaries(np.array([9, 4, 4, 7]), 50, row_cost) == [4, 7, 9]


@given(st.lists(st.integers(1, 3_000), min_size=1, max_size=300))
def test_auto_stops_where_one_more_bucket_saves_next_to_nothing(lengths):
    curve = [least for least, _ in islice(cut_curve(np.array(lengths), row_cost), MAX_AUTO)]
    bounds = auto_boundaries(np.array(lengths), row_cost)
    chosen = len(bounds)
    assert bounds == optimal_boundaries(np.array(lengths), chosen, row_cost)
    assert chosen <= MAX_AUTO
    for fewer, more in pairwise(curve[:chosen]):
        assert fewer - more >= LEAST_SAVING * fewer
    if chosen < len(curve):
        assert curve[chosen - 1] - curve[chosen] < LEAST_SAVING * curve[chosen - 1]


def test_auto_takes_one_bucket_of_equal_lengths_and_a_moderate_number_of_spread_ones():
    assert auto_boundaries(np.full(100, 64), row_cost) == [64]
    spread = np.random.default_rng(5).lognormal(6.7, 0.6, 50_000).astype(np.int64).clip(4, 8192)
    assert 6 <= len(auto_boundaries(spread, row_cost)) <= 32


@given(SMALL, st.integers(1, 9))
def test_each_length_lies_above_the_bound_before_and_within_its_own(lengths, buckets):
    bounds = optimal_boundaries(np.array(lengths), buckets, row_cost)
    for length, bucket in zip(lengths, assign(np.array(lengths), bounds).tolist(), strict=True):
        assert (0, *bounds)[bucket] < length <= bounds[bucket]
