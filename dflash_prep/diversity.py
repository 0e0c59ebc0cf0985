"""How mixed a plan is: who meets whom in several epochs, and how alike steps are."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from dflash_prep.compiled import compiled

MOST_EPOCHS = 8  # that are compared with one another: pairs of epochs grow with the square


@dataclass(frozen=True)
class Company:
    """Who stands with whom in one epoch: of a sample with copies, the first alone."""

    place: np.ndarray  # int32 [samples of the store]: the micro-batch of each, −1 for none
    members: np.ndarray  # int64: the samples micro-batch by micro-batch
    sizes: np.ndarray  # int64 [micro-batches]

    @property
    def pairs(self) -> int:
        """How many pairs share a micro-batch."""
        return int((self.sizes * (self.sizes - 1) // 2).sum())


def company(flat: np.ndarray, sizes: np.ndarray, count: int) -> Company:
    """Of the samples `flat` of micro-batches of the given sizes, out of `count` samples."""
    owner = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    place = np.full(count, -1, np.int32)
    place[flat[::-1]] = owner[::-1]  # the first occurrence is written last
    seat = np.empty(count, np.int64)
    seat[flat[::-1]] = np.arange(len(flat))[::-1]
    first = seat[flat] == np.arange(len(flat))
    return Company(place, flat[first].astype(np.int64), np.bincount(owner[first], minlength=len(sizes)))


def overlap(epochs: list[Company]) -> tuple[float, float] | None:
    """The mean Jaccard index of who meets whom, over all pairs of epochs, and what random micro-batches would have.

    Of P and Q pairs out of n(n − 1)/2 possible ones, random micro-batches share PQ / (n(n − 1)/2). None for a single epoch
    or where no two samples ever meet.
    """
    found, random = [], []
    for one, other in combinations(epochs, 2):
        samples = int(((one.place >= 0) | (other.place >= 0)).sum())
        possible, together = samples * (samples - 1) / 2, one.pairs + other.pairs
        if not together:
            return None
        shared = int(shared_pairs(one.place, len(one.sizes), other.members, other.sizes))
        by_chance = one.pairs * other.pairs / possible
        found.append(shared / (together - shared))
        random.append(by_chance / (together - by_chance))
    return (sum(found) / len(found), sum(random) / len(random)) if found else None


@compiled
def shared_pairs(place, batches, members, sizes):
    """How many pairs that share a micro-batch of one epoch share one of another, too.

    place: each sample's micro-batch in the one epoch, of `batches`; members, sizes: the micro-batches of the other.
    """
    met = np.zeros(batches, np.int64)
    shared, start = 0, 0
    for size in sizes:
        for i in range(start, start + size):
            where = place[members[i]]
            if where >= 0:
                shared += met[where]
                met[where] += 1
        for i in range(start, start + size):
            if place[members[i]] >= 0:
                met[place[members[i]]] = 0
        start += size
    return shared


def step_means(flat: np.ndarray, sizes: np.ndarray, slots: int, log_length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean log length of each step, and its number of samples."""
    step = np.repeat(np.arange(len(sizes)) // slots, sizes)
    counts = np.bincount(step)
    return np.bincount(step, log_length[flat]) / counts, counts


NOISE = 1e-9  # mean log lengths that differ by no more than this are equal, but for rounding


def design_effect(means: np.ndarray, counts: np.ndarray, variance: float) -> float | None:
    """The variance over steps of the step's mean log length, times the samples in a step, over the variance of log length.

    1 is what a full shuffle gives. None where it is undefined: one step, or one length.
    """
    if len(means) < 2 or variance <= NOISE**2:
        return None
    return float(means.var(ddof=1) * counts.mean() / variance)


def neighbour_correlation(means: np.ndarray) -> float | None:
    """The correlation of one step's mean log length with the next one's; None where it is undefined."""
    if len(means) < 3 or min(np.ptp(means[1:]), np.ptp(means[:-1])) <= NOISE:
        return None
    return float(np.corrcoef(means[:-1], means[1:])[0, 1])
