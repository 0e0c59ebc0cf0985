"""Length-bucket boundaries: the exact optimum over all ways to cut the histogram of lengths.

With distinct lengths l_1 < … < l_V, cumulative counts F and a cost g(u) of a row padded to u, K buckets ending at cuts
0 = i_0 < i_1 < … < i_K = V cost Σ (F[i_k] − F[i_{k−1}]) · g(l[i_k]). The dynamic program
D_k[j] = F_j g_j + min_i (D_{k−1}[i] − F_i g_j) minimises lines of slope −F_i at growing points g_j, so one monotone
lower hull a layer finds each minimum in amortised constant time: O(K · V) integer steps, no rounding.
"""

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

MAX_AUTO = 64
LEAST_SAVING = 0.005  # `auto` stops where one more bucket would save less than this share of the cost


def cut_curve(lengths: np.ndarray, cost: Callable[[int], int]) -> Iterator[tuple[int, list[int]]]:
    """For K = 1, 2, …: the least cost of K buckets and their boundaries (inclusive upper bounds, ascending).

    `lengths` int64 [samples]; `cost` maps a length to the integer cost of a row padded to it, non-decreasing. Ends at the
    number of distinct lengths.
    """
    distinct, counts = np.unique(lengths, return_counts=True)
    upper = distinct.tolist()
    ahead = [0, *np.cumsum(counts).tolist()]
    price = [0, *(cost(length) for length in upper)]
    best = [ahead[j] * price[j] for j in range(len(ahead))]
    cuts: list[list[int]] = [[0] * len(ahead)]
    for k in range(1, len(upper) + 1):
        yield best[-1], boundaries(cuts, upper, k)
        best, chosen = add_bucket(best, ahead, price, k)
        cuts.append(chosen)


def add_bucket(best: list[int], ahead: list[int], price: list[int], k: int) -> tuple[list[int], list[int]]:
    """One layer more: D_{k+1} and, for each j, the cut i < j that attains it."""
    size = len(best)
    new, chosen = [0] * size, [0] * size
    hull: list[int] = []
    at = 0
    for j in range(k + 1, size):
        push_line(hull, j - 1, best, ahead)
        at = min(at, len(hull) - 1)
        value = best[hull[at]] - ahead[hull[at]] * price[j]
        while at + 1 < len(hull) and best[hull[at + 1]] - ahead[hull[at + 1]] * price[j] <= value:
            at += 1
            value = best[hull[at]] - ahead[hull[at]] * price[j]
        new[j], chosen[j] = value + ahead[j] * price[j], hull[at]
    return new, chosen


def push_line(hull: list[int], line: int, best: list[int], ahead: list[int]) -> None:
    """Append a line of the steepest slope so far, dropping those that it keeps from ever being lowest."""
    while len(hull) >= 2:
        first, middle = hull[-2], hull[-1]
        # `middle` is never lowest if `line` meets `first` before `middle` does
        left = (best[line] - best[first]) * (ahead[middle] - ahead[first])
        right = (best[middle] - best[first]) * (ahead[line] - ahead[first])
        if left > right:
            break
        hull.pop()
    hull.append(line)


def boundaries(cuts: list[list[int]], upper: list[int], k: int) -> list[int]:
    """Walk the chosen cuts back from the longest length."""
    bounds, j = [], len(upper)
    for layer in reversed(cuts[:k]):
        bounds.append(upper[j - 1])
        j = layer[j]
    return bounds[::-1]


def optimal_boundaries(lengths: np.ndarray, buckets: int, cost: Callable[[int], int]) -> list[int]:
    """The boundaries of the cheapest `buckets` buckets, or of one a distinct length where there are fewer of those."""
    *_, (_, bounds) = islice(cut_curve(lengths, cost), buckets)
    return bounds


def auto_boundaries(lengths: np.ndarray, cost: Callable[[int], int]) -> list[int]:
    """The boundaries at the elbow: the fewest buckets to which one more would add next to nothing."""
    curve = islice(cut_curve(lengths, cost), MAX_AUTO)
    total, bounds = next(curve)
    for better, finer in curve:
        if total - better < LEAST_SAVING * total:
            break
        total, bounds = better, finer
    return bounds


def assign(lengths: np.ndarray, bounds: list[int]) -> np.ndarray:
    """The bucket of each length: j holds those in (bounds[j−1], bounds[j]]."""
    return np.searchsorted(np.array(bounds), lengths, "left")
