"""A store in figures: its sources, how long its samples are and how much of them carries loss, examples of its rejects."""

import math
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from dflash_prep.lookup import rejects
from dflash_prep.store import Store

MOST_BINS = 16
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)
EXAMPLES = 2  # of each reason
MOST_READ = 20_000  # rejects among which examples are looked for: a tenth of a second


class Source(NamedTuple):
    """What one source gave."""

    name: str
    samples: int
    tokens: int
    loss_tokens: int


class Bin(NamedTuple):
    """How many values lie in low … high, both included."""

    low: int
    high: int
    count: int


def sources(store: Store) -> list[Source]:
    """Each source's part, the largest first."""
    index = store.index.select(["source", "length", "loss_tokens"]).unify_dictionaries()
    sums = index.group_by("source").aggregate([("length", "count"), ("length", "sum"), ("loss_tokens", "sum")])
    names = ("source", "length_count", "length_sum", "loss_tokens_sum")
    found = map(Source, *(sums[name].to_pylist() for name in names))
    return sorted(found, key=lambda source: (-source.tokens, source.name))


def length_bins(length: np.ndarray) -> list[Bin]:
    """Lengths in bins of equal ratio, a half, a third, … of an octave or whole ones: as fine as MOST_BINS allow."""
    low, high = int(length.min()), int(length.max())
    octaves = range(int(math.log2(max(low, 1))), high.bit_length() + 1)
    for parts in (8, 6, 4, 3, 2, 1):
        edges = sorted({round(2 ** (octave + part / parts)) for octave in octaves for part in range(parts)})
        edges = [low, *(edge for edge in edges if low < edge <= high), high + 1]
        if len(edges) <= MOST_BINS + 1:
            break
    return binned(length, edges)


def loss_bins(length: np.ndarray, loss_tokens: np.ndarray) -> list[Bin]:
    """Samples by the share of their tokens that carry loss, in whole percent rounded down, ten a bin; 100 is in the last."""
    return binned(loss_tokens * 100 // np.maximum(length, 1), [*range(0, 100, 10), 101])


def binned(values: np.ndarray, edges: list[int]) -> list[Bin]:
    """How many values lie from each edge up to before the next."""
    counts = np.histogram(values, edges)[0].tolist()
    return [Bin(low, following - 1, count) for (low, following), count in zip(pairwise(edges), counts, strict=True)]


def quantiles(length: np.ndarray) -> dict[str, int]:
    """Lengths that the given shares of samples do not pass, and the longest."""
    found = np.quantile(length, QUANTILES, method="inverted_cdf").tolist()
    named = {f"p{round(share * 100)}": value for share, value in zip(QUANTILES, found, strict=True)}
    return named | {"longest": int(length.max())}


def examples(store: Store) -> dict[str, list[dict]]:
    """The first rejects of each reason; rare ones that come late may have none."""
    wanted = {reason: min(count, EXAMPLES) for reason, count in store.manifest["counts"]["rejected"].items()}
    found: dict[str, list[dict]] = {reason: [] for reason in wanted}
    missing = sum(wanted.values())
    entries = islice(rejects(store), MOST_READ)
    while missing and (entry := next(entries, None)):
        reason = str(entry["reason"]).split(":")[0]
        if len(found.get(reason, ())) < wanted.get(reason, 0):
            found[reason].append(entry)
            missing -= 1
    return found
