"""Bucket boundaries: the dynamic program against all cuts, against another algorithm, and on the reference lengths."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_prep import buckets
from dflash_prep.batching import Limits, Samples, costs, fill, make_rows
from dflash_prep.buckets import (
    DISTANCE,
    FEW_ROWS,
    MOST,
    assign,
    curve,
    elbow,
    expected,
    histogram,
    optimal,
    padding,
    refined,
)
from dflash_prep.cost import CostModel, price
from dflash_prep.rng import permutation

MODELS = {
    "tokens": CostModel(0, 1, 0, 0, 0),
    "attention": CostModel(0, 1, 1 / 24_576, 0, 0),
    "launches": CostModel(300, 1, 1 / 100, 0, 0),
    "squares": CostModel(0, 0, 1, 0, 0),
}
SMALL = st.lists(st.integers(1, 40), min_size=1, max_size=40).filter(lambda lengths: len(set(lengths)) <= 9)


def counted(lengths, model: CostModel, fixed: bool, budget: int = 160, align: int = 1):
    """The histogram of lengths, with a budget."""
    lengths = np.array(lengths, np.int64)
    limits = Limits(budget, align=align)
    return histogram(lengths, 0, limits, price(model, budget, int(lengths.max()), 1, 1, len(lengths)), fixed)


def bucket_cost(rows: list[int], case) -> float:
    """The expected cost of one bucket, in the integers' unit: the states of a Markov chain over (first row, size, longest).

    A micro-batch is followed from its first row on; where the row drawn next does not fit, it is the next one's first.
    """
    cost, budget, total = case.price, case.limits.tokens, len(rows)
    each = {width: width * (cost.token + cost.square * width) for width in set(rows)}
    if case.fixed:
        bound = max(rows)
        return -(-total // min(total, max(1, budget // bound))) * cost.fixed + total * each[bound]
    share = {width: rows.count(width) / total for width in set(rows)}
    first = dict(share)
    for _ in range(60 if budget // max(rows) < FEW_ROWS and total > budget // max(rows) else 1):
        following = dict.fromkeys(share, 0.0)
        expected_rows, expected_work, size = 0.0, 0.0, 1
        state = dict(first)  # by the longest row so far
        while state:
            grown = {}
            for longest, chance in state.items():
                for width, part in share.items():
                    if size < total and (size + 1) * max(longest, width) <= budget:
                        grown[max(longest, width)] = grown.get(max(longest, width), 0.0) + chance * part
                    else:
                        expected_rows += chance * part * size
                        expected_work += chance * part * size * each[longest]
                        following[width] += chance * part
            state, size = grown, size + 1
        first = {width: (first[width] + following[width]) / 2 for width in share}
    return total * (cost.fixed + expected_work) / expected_rows


def total_cost(lengths: list[int], bounds: list[int], case) -> float:
    """The expected cost of buckets, row by row."""
    parts = [[length for length in lengths if low < length <= high] for low, high in pairwise((0, *bounds))]
    return sum(bucket_cost(part, case) for part in parts if part)


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=30)
@given(lengths=SMALL)
def test_every_k_equals_brute_force_over_all_cuts(name, fixed, lengths):
    case = counted(lengths, MODELS[name], fixed)
    found = curve(case)
    *inner, longest = sorted(set(lengths))
    assert len(found) == len(inner) + 1
    for number, (least, bounds) in enumerate(found, start=1):
        assert len(bounds) == number and bounds == sorted(bounds) and bounds[-1] == longest
        every = [total_cost(lengths, [*cut, longest], case) for cut in combinations(inner, number - 1)]
        assert least == pytest.approx(min(every), rel=3e-3)
        assert expected(case, bounds) == least
        assert refined(case, bounds) == bounds  # nothing is left to refine


def least_by_monotone_cuts(width, count, cost) -> list[int]:
    """Least total costs of 1, 2, … buckets by divide and conquer over the last cut, exact where costs are Monge."""
    ahead = np.concatenate([[0], np.cumsum(count)]).tolist()
    each = [cost(int(value)) for value in width]
    size = len(width)
    best = [0] + [2**62] * size
    found = []

    def solve(new, low, high, first, last):
        if low > high:
            return
        middle = (low + high) // 2
        options = [
            (best[i] + (ahead[middle] - ahead[i]) * each[middle - 1], i) for i in range(first, min(last, middle - 1) + 1)
        ]
        new[middle], cut = min(options)
        solve(new, low, middle - 1, first, cut)
        solve(new, middle + 1, high, cut, last)

    for _ in range(8):
        new = [2**62] * (size + 1)
        solve(new, 1, size, 0, size - 1)
        best = new
        found.append(best[size])
    return found


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("longest", [390, 5_000])
def test_large_histograms_equal_a_second_algorithm(seed, longest):
    """Beyond 400 widths the refinement must find what an exact program over all widths does."""
    lengths = np.minimum(np.random.default_rng(seed).lognormal(6.6, 0.7, 30_000).astype(np.int64) + 1, longest)
    case = counted(lengths, MODELS["attention"], True, 32_768)
    assert longest < 450 or len(case.width) > 450
    exact = least_by_monotone_cuts(case.width, case.count, lambda width: int(case.price.rows(1, width)))
    for number, least in enumerate(exact, start=1):
        assert expected(case, optimal(case, number)) == pytest.approx(least, rel=1e-12)


def reference_lengths(count: int = 902_000) -> np.ndarray:
    """The lengths that the design states its figures for."""
    generator = np.random.default_rng(11)
    first = generator.random(count) < 0.6727
    mixture = np.where(first, generator.lognormal(6.7276, 0.5215, count), generator.lognormal(7.4595, 0.2606, count))
    return np.clip(mixture.astype(np.int64), 4, 8192)


def test_the_reference_lengths_have_their_known_optimum():
    case = counted(reference_lengths(), MODELS["tokens"], True, 32_768)
    assert optimal(case, 6) == [771, 1213, 1719, 2288, 3293, 8192]


def test_no_neighbouring_bounds_are_better_on_the_reference_lengths():
    case = counted(reference_lengths(90_000), MODELS["attention"], False, 32_768)
    bounds = optimal(case, 6)
    least = expected(case, bounds)
    generator = np.random.default_rng(0)
    for _ in range(300):
        moved = sorted({bound + int(generator.integers(-40, 41)) for bound in bounds[:-1]})
        assert expected(case, [*moved, bounds[-1]]) >= least


def realised(lengths, bounds, limits, rounded) -> int:
    """What the micro-batches of six real epochs cost, filled one after another in each bucket."""
    samples = Samples(lengths, lengths, np.zeros_like(lengths))
    total = 0
    for epoch in range(6):
        order = permutation((1, 0, epoch), len(lengths))
        bucket = assign(lengths[order], bounds)
        order, bucket = order[np.argsort(bucket, kind="stable")], np.sort(bucket)
        rows = make_rows(order, bucket, lengths[order], samples, rounded)
        total += int(costs(rows, fill(rows, limits, rounded), rounded).sum())
    return total


@pytest.mark.parametrize("budget", [1_000, 4_000])
@pytest.mark.parametrize("count", [3, 6])
@pytest.mark.parametrize("seed", range(4))
def test_realised_seconds_are_the_least_of_all_cuts(seed, count, budget):
    """Expected seconds must rank boundaries as real epochs do: within 0.1 % of the best of all, tried one by one."""
    generator = np.random.default_rng(seed)
    values = np.sort(generator.choice(np.arange(10, 400), 9, replace=False))
    lengths = generator.choice(values, 20_000, p=generator.dirichlet(np.ones(9)))
    limits = Limits(budget)
    rounded = price(CostModel(0, 1, 1 / 2_000, 0, 0), budget, 400, 1, 1, len(lengths))
    case = histogram(lengths, 0, limits, rounded, False)
    chosen = optimal(case, count)
    *inner, longest = np.unique(lengths).tolist()
    every = [realised(lengths, [*cut, longest], limits, rounded) for cut in combinations(inner, count - 1)]
    assert realised(lengths, chosen, limits, rounded) <= 1.001 * min(every)
    assert expected(case, chosen) == pytest.approx(min(every) / 6, rel=0.01)


def test_expected_padding_is_that_of_real_epochs():
    lengths = reference_lengths(30_000)
    case = counted(lengths, MODELS["tokens"], False, 32_768)
    for number in (1, 3, 12):
        bounds = optimal(case, number)
        computed = realised(lengths, bounds, Limits(32_768), case.price) / case.price.token / 6
        found = padding(case, bounds, int(lengths.sum()))
        assert found == pytest.approx(1 - lengths.sum() / computed, abs=0.02)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 60), min_size=2, max_size=80), st.integers(60, 200))
def test_no_expected_time_is_below_that_of_rows_without_padding(lengths, budget):
    case = counted(lengths * 20, MODELS["attention"], False, budget)
    floor = sum(int(case.price.rows(1, length)) for length in lengths * 20)
    assert all(cost >= 0.995 * floor for cost, _ in curve(case))


def test_more_buckets_than_widths_give_one_each():
    assert optimal(counted([9, 4, 4, 7], MODELS["tokens"], True), 50) == [4, 7, 9]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 3_000), min_size=1, max_size=200))
def test_auto_is_the_fewest_within_the_stated_distance_of_the_best(lengths):
    costs = [cost for cost, _ in curve(counted(lengths, MODELS["attention"], False, 3_000))]
    chosen = elbow(list(enumerate(costs)) and [(cost, []) for cost in costs])
    assert len(costs) <= MOST
    assert costs[chosen - 1] <= min(costs) * (1 + DISTANCE)
    assert all(cost > min(costs) * (1 + DISTANCE) for cost in costs[: chosen - 1])


@given(lengths=SMALL, align=st.integers(1, 16), number=st.integers(1, 9))
def test_aligned_bounds_are_multiples_and_cover_every_length(lengths, align, number):
    bounds = optimal(counted(lengths, MODELS["tokens"], False, 200, align), number)
    assert all(bound % align == 0 for bound in bounds)
    assert bounds[-1] == -(-max(lengths) // align) * align


@given(SMALL, st.integers(1, 9))
def test_each_length_lies_above_the_bound_before_and_within_its_own(lengths, number):
    bounds = optimal(counted(lengths, MODELS["tokens"], False), number)
    for length, bucket in zip(lengths, assign(np.array(lengths), bounds).tolist(), strict=True):
        assert (0, *bounds)[bucket] < length <= bounds[bucket]


def test_a_coarse_histogram_keeps_every_row(monkeypatch):
    monkeypatch.setattr(buckets, "CLASSES", 16)
    case = counted(range(1, 500), MODELS["tokens"], False)
    rough = buckets.coarse(case)
    assert len(rough.width) <= 16 and rough.count.sum() == 499 and rough.width[-1] == 499
