"""Which micro-batches of length buckets share a step: each step gets its proportion of every length.

The micro-batches, from short rows to long, are split into as many strata as a step has slots, and each step takes one of
each. Within the strata they are matched so that every step's mean log length comes out near the whole epoch's: their
*pulls*, the sums over rows of log length less its mean, cancel. A full micro-batch of very short rows pulls harder than all
others of a step together can make up; where such ones spoil the mixture, their bucket is cut into smaller ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dflash_prep.rng import permutation, stream

LOG_BITS = 12
LN2 = 0.6931471805599453


def log_length(length: np.ndarray) -> np.ndarray:
    """log2 of lengths in units of 2^-12, int64: from a series in +, −, ×, / alone, so that it is equal on every machine.

    With length = m · 2^k and z = (m − 1)/(m + 1): ln m = 2 · (z + z³/3 + z⁵/5 + …), here for m in [½, 1).
    """
    mantissa, exponent = np.frexp(length.astype(np.float64))
    z = (mantissa - 1) / (mantissa + 1)
    square = z * z
    series = z * (1 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square / 9))))
    return np.rint((exponent + series * 2 / LN2) * 2**LOG_BITS).astype(np.int64)


@dataclass(frozen=True)
class Leaning:
    """How rows, in the order in which they are batched, lean from their mean log length."""

    sums: np.ndarray  # int64 [rows + 1]: of log length less the mean, up to each row
    variance: float

    def pull(self, cuts: np.ndarray) -> np.ndarray:
        """The sum over the rows between each two cuts, int64."""
        return np.diff(self.sums[cuts])


def leaning(length: np.ndarray) -> Leaning:
    """Of rows of the given lengths, from sums of integers, so that what is decided by it is decided alike everywhere."""
    log = log_length(length)
    log -= int(log.sum()) // len(log)
    return Leaning(np.concatenate([[0], np.cumsum(log)]), max(1.0, int((log**2).sum()) / len(log)))


def deal_to_steps(pull: np.ndarray, slots: int, names: tuple[int, ...]) -> np.ndarray:
    """The order, int64 [steps · slots], in which micro-batches that stand from short to long form steps; −1: empty slot.

    pull: of each micro-batch; names: of the random stream that decides where nothing else does.
    """
    steps, over = divmod(len(pull), slots)
    order = permutation((*names, 0), len(pull))
    last, kept = order[:over], np.sort(order[over:])  # only where there are fewer samples than slots is anything over
    if not steps:
        return np.concatenate([last, np.full(slots - over, -1)])
    dealt = match(pull[kept], slots, names)
    spread = np.argsort(stream((*names, 1), dealt.size).reshape(dealt.shape), axis=1, kind="stable")
    full = kept[np.take_along_axis(dealt, spread, axis=1)].ravel()
    return np.concatenate([full, last, np.full(-over % slots, -1)])


def design_effect(order: np.ndarray, pull: np.ndarray, sizes: np.ndarray, slots: int, variance: float) -> float:
    """The variance over steps of the mean log length, times the rows of a step, over the variance of log length.

    order: as `deal_to_steps` gives it; pull, sizes: of each micro-batch.
    """
    rows = np.where(order >= 0, sizes[order], 0).reshape(-1, slots).sum(axis=1)
    drift = np.where(order >= 0, pull[order], 0).reshape(-1, slots).sum(axis=1) // rows
    return int((drift**2).sum()) / len(rows) * int(rows.sum()) / len(rows) / variance


def match(pull: np.ndarray, slots: int, names: tuple[int, ...]) -> np.ndarray:
    """One micro-batch of each stratum for each step, [steps, slots], so that their pulls cancel.

    The stratum that spreads most comes first, in random order; then each next one's strongest pull up goes to the step that
    is furthest down.
    """
    strata = np.arange(len(pull)).reshape(slots, -1)
    steps = strata.shape[1]
    spread = pull[strata].max(axis=1) - pull[strata].min(axis=1)
    sums = np.zeros(steps, np.int64)
    dealt = np.empty((steps, slots), np.int64)
    for rank, which in enumerate(np.argsort(-spread, kind="stable")):
        stratum = strata[which][permutation((*names, 2, int(which)), steps)]
        step = np.arange(steps)
        if rank:
            stratum = stratum[np.argsort(-pull[stratum], kind="stable")]
            step = np.argsort(sums, kind="stable")
        dealt[step, which] = stratum
        sums[step] += pull[stratum]
    return dealt


def more_counts(counts: np.ndarray, pull: np.ndarray, steps: int) -> Iterator[np.ndarray]:
    """How many micro-batches each bucket is cut into: as given, then ever more where they pull hardest.

    counts, pull: micro-batches and their summed pull of each bucket. The measure is the mean pull up of a step, which is
    what there is to make up for one micro-batch's pull down.
    """
    yield counts
    upward = int(pull[pull > 0].sum()) // steps
    for tenths in (30, 25, 20, 16, 13, 10):
        yield np.maximum(counts, -(-abs(pull) // max(1, upward * tenths // 10)))
