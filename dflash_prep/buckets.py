"""Length-bucket boundaries: the exact optimum over all ways to cut the histogram of lengths.

With width classes w_1 < … < w_V and cumulative counts F, K buckets ending at the classes i_1 < … < i_K = V cost
Σ price(i_{k−1}, i_k), the expected seconds of the rows in (w_i, w_j]. Rows come in random order and fill a micro-batch until
rows × longest would pass the budget B; each is padded to the longest of its micro-batch, not to the bound. With P_v the
share of the bucket's rows up to w_v, m rows are all at most w_v with probability P_v^m, and a micro-batch goes on beyond m
rows while longest and next row are at most B / (m + 1). The row that no longer fits is the first of the next, and longer
than most. That gives the expected rows and the expected cost of a micro-batch, and their ratio is the price of a row.

The dynamic program D_k[j] = min_i D_{k−1}[i] + price(i, j) over a table of all prices, int64, gives every K at once.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from dflash_prep.batching import Limits
from dflash_prep.compiled import compiled
from dflash_prep.cost import Price

MOST = 64  # buckets that the curve goes to
CLASSES = 400  # of widths: a finer histogram is cut at multiples of the least step that gives so few, then refined
WINDOW = 24  # widths to either side among which a bound is then placed exactly
WIDE_WINDOW = 200  # the same where a price is quick to find: rows padded to their bound
DISTANCE = 0.02  # `auto` takes the fewest buckets whose expected seconds are within this of the floor
ROUNDS = 8  # of that, at most: a bound at a window's edge is given another
NEVER = 2**62
FEW_ROWS = 4  # in a micro-batch of fewer the first row, which did not fit the one before, counts on its own
CONVERGED = 2e-3  # of probabilities
REST = 1e-5  # probabilities below this are left out of an expectation


@dataclass(frozen=True)
class Histogram:
    """Widths in ascending order and the number of rows of each, int64 [classes], with what is known of micro-batches."""

    width: np.ndarray
    count: np.ndarray
    draft: int  # the draft's cost of all rows: no cut changes it
    limits: Limits
    price: Price
    fixed: bool  # each bucket is padded to its bound

    @property
    def terms(self) -> tuple:
        """What the compiled loops need to price a bucket."""
        ahead = np.concatenate([[0], np.cumsum(self.count)])
        price = np.array([self.price.fixed, self.price.token, self.price.square])
        return self.width, ahead, price, self.limits.tokens, self.fixed


def histogram(lengths: np.ndarray, draft: int, limits: Limits, price: Price, fixed: bool) -> Histogram:
    """Of the widths that samples of the given lengths (int64 [samples]) are computed at."""
    width, count = np.unique(limits.width(lengths), return_counts=True)
    return Histogram(width, count, draft, limits, price, fixed)


def coarse(fine: Histogram) -> Histogram:
    """The same with at most `CLASSES` widths: each rounded up to a multiple of some step."""
    step = 1
    while len(np.unique(-(-fine.width // step))) > CLASSES:
        step *= 2
    upper = np.minimum(-(-fine.width // step) * step, fine.width[-1])
    width, where = np.unique(upper, return_inverse=True)
    count = np.bincount(where, fine.count).astype(np.int64)
    return Histogram(width, count, fine.draft, fine.limits, fine.price, fine.fixed)


def curve(fine: Histogram, most: int = MOST) -> list[tuple[int, list[int]]]:
    """For K = 1, 2, … `most`: the least expected cost of K buckets and their bounds (inclusive, ascending).

    Exact for up to 400 widths; for more, exact over multiples of a step: `refined` then places the bounds of one K. Ends
    earlier where there are fewer widths.
    """
    rough = coarse(fine)
    table = price_table(*rough.terms)
    ends = best_cuts(table, min(most, len(rough.width)))
    bounds = (rough.width[row[:k] - 1].tolist() for k, row in enumerate(ends[1:], start=1))
    return [(expected(rough, each), each) for each in bounds]


def padding(fine: Histogram, bounds: list[int], tokens: int) -> float:
    """The expected share of padding in what is computed, of rows that hold `tokens` real ones, with the given bounds."""
    counting = replace(fine, price=replace(fine.price, fixed=0, token=1, square=0), draft=0)
    return 1 - tokens / max(tokens, expected(counting, bounds))


def refined(fine: Histogram, bounds: list[int]) -> list[int]:
    """Bounds placed exactly among all widths near them: the same dynamic program within a window around each, repeated."""
    ends = np.concatenate([[0], np.searchsorted(fine.width, bounds, "right")])
    for _ in range(ROUNDS):
        better = place(ends, *fine.terms, WIDE_WINDOW if fine.fixed else WINDOW)
        if np.array_equal(better, ends):
            break
        ends = better
    return fine.width[ends[1:] - 1].tolist()


def optimal(fine: Histogram, buckets: int) -> list[int]:
    """The bounds of the cheapest `buckets` buckets, or of one a width where there are fewer of those."""
    return refined(fine, curve(fine, buckets)[-1][1])


def expected(fine: Histogram, bounds: list[int]) -> int:
    """The expected cost of an epoch with the given bounds."""
    ends = np.concatenate([[0], np.searchsorted(fine.width, bounds, "right")])
    parts = [price_bucket(int(i), int(j), *fine.terms) for i, j in pairwise(ends) if i < j]
    return sum(parts) + fine.draft


def elbow(curve: list[tuple[int, list[int]]]) -> int:
    """The fewest buckets within `DISTANCE` of the cheapest number of them."""
    floor = min(cost for cost, _ in curve)
    return next(k for k, (cost, _) in enumerate(curve, start=1) if cost <= floor * (1 + DISTANCE))


def assign(lengths: np.ndarray, bounds: list[int]) -> np.ndarray:
    """The bucket of each length: j holds those in (bounds[j−1], bounds[j]]."""
    return np.searchsorted(np.array(bounds), lengths, "left")


@compiled
def price_bucket(start, end, width, ahead, price, budget, fixed):
    """The expected cost of the rows of classes start to end as one bucket, their draft left out; see the module."""
    rows = ahead[end] - ahead[start]
    bound = width[end - 1]
    size = min(rows, max(1, budget // bound))
    if fixed:
        return -(-rows // size) * price[0] + rows * bound * (price[1] + price[2] * bound)
    share = (ahead[start : end + 1] - ahead[start]) / rows
    first = share.copy()
    settled = size >= FEW_ROWS  # the first of many rows matters little
    while True:
        mean, work, following = fill_bucket(share, first, size, rows, width[start:end], price, budget)
        if settled:
            return int(rows / mean * price[0] + rows * (work / mean))
        settled = np.abs(following - first).max() < CONVERGED
        first = (first + following) / 2  # half-way, for it would swing about the answer


@compiled
def fill_bucket(share, first, size, rows, width, price, budget):
    """What a micro-batch comes to whose first row is drawn by `first` and all others by `share` (cumulative, from 0).

    Returns its expected rows, its expected cost, and by what the next one's first row is drawn: the row that did not fit,
    which is any row where the longest already left no room, and otherwise one that is too long.
    """
    power = raised(share, size - 1)  # of a class: that all rows but the first are at most that wide
    top = len(width)  # classes that a micro-batch of `size` rows may hold
    mean, work, fresh = 0.0, 0.0, 0.0
    too_long = np.zeros(top + 1)  # by the class that would have fitted still
    while True:
        below = top  # classes that leave room for one row more
        while below > 0 and (size + 1) * width[below - 1] > budget:
            below -= 1
        if size >= rows or first[below] * power[below] * share[below] < REST:
            below = 0  # nobody goes on
        stops = 1 - share[below]
        for v in range(top, 0, -1):
            chance = first[v] * power[v] - first[v - 1] * power[v - 1]
            if v <= below:
                chance *= stops
                too_long[below] += chance / stops if stops else 0.0
            else:
                fresh += chance
            mean += chance * size
            work += chance * size * width[v - 1] * (price[1] + price[2] * width[v - 1])
            if first[v - 1] * power[v - 1] < REST:
                break
        if below == 0:
            break
        top = below
        size += 1
        power *= share
    following = np.zeros_like(first)
    weight, passed = fresh, 0.0
    for v in range(1, len(following)):
        following[v] = weight * share[v] - passed
        weight += too_long[v]
        passed += too_long[v] * share[v]
    return mean, work, following / following[-1]


@compiled
def raised(base, power):
    """base ** power by multiplication alone, so that no libm has a say."""
    result, square = np.ones_like(base), base.copy()
    while power:
        if power & 1:
            result *= square
        square = square * square
        power >>= 1
    return result


def price_table(width, ahead, price, budget, fixed) -> np.ndarray:
    """price_bucket for all start < end, int64 [classes + 1, classes + 1], made on all cores."""
    table = np.zeros((len(width) + 1, len(width) + 1), np.int64)
    threads = os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as workers:
        done = [
            workers.submit(price_ends, table, part, threads, width, ahead, price, budget, fixed) for part in range(threads)
        ]
    for part in done:
        part.result()
    return table


@compiled
def price_ends(table, part, parts, width, ahead, price, budget, fixed):
    """Fill in every `parts`-th row of a table of prices."""
    for end in range(1 + part, len(width) + 1, parts):
        for start in range(end):
            table[end, start] = price_bucket(start, end, width, ahead, price, budget, fixed)


@compiled
def best_cuts(table, most):
    """The ends of the best 1, 2, … `most` buckets, int64 [most + 1, most]: row k holds those of k buckets."""
    size = len(table) - 1
    chosen = np.zeros((most + 1, size + 1), np.int64)
    best = table[:, 0].copy()
    ends = np.zeros((most + 1, most), np.int64)
    for k in range(1, most + 1):
        if k > 1:
            worse = best.copy()
            for end in range(k, size + 1):
                best[end] = worse[k - 1] + table[end, k - 1]
                chosen[k, end] = k - 1
                for start in range(k, end):
                    cost = worse[start] + table[end, start]
                    if cost < best[end]:
                        best[end], chosen[k, end] = cost, start
        at = size
        for j in range(k, 0, -1):
            ends[k, j - 1] = at
            at = chosen[j, at]
    return ends


@compiled
def place(ends, width, ahead, price, budget, fixed, window):
    """The best ends within `window` classes of the given ones (int64 [buckets + 1], first and last held)."""
    count, wide = len(ends) - 1, 2 * window + 1
    best, chosen = np.full((count + 1, wide), NEVER), np.zeros((count + 1, wide), np.int64)
    best[0, window] = 0
    for k in range(1, count + 1):
        for to in range(wide):
            end = ends[k] + to - window
            if end > ends[count] or (k == count and to != window):
                continue
            for before in range(wide):
                start = ends[k - 1] + before - window
                if best[k - 1, before] < NEVER and start < end:
                    cost = best[k - 1, before] + price_bucket(start, end, width, ahead, price, budget, fixed)
                    if cost < best[k, to]:
                        best[k, to], chosen[k, to] = cost, before
    placed, at = ends.copy(), window
    for k in range(count, 0, -1):
        placed[k] = ends[k] + at - window
        at = chosen[k, at]
    return placed
