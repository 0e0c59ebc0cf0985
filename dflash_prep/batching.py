"""Micro-batches of padded rows: which samples are computed together, under budgets that are never exceeded.

An order of samples is cut from the left, each micro-batch filled until the next row would pass a limit: the fewest
micro-batches possible, since what fits together also fits with less.
"""

import heapq
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from dflash_prep.compiled import compiled
from dflash_prep.cost import Price

FREE = 2**44  # no limit: more tokens or anchors than any micro-batch holds, and 65,535 times that fits int64
NO_CAP = 2**61  # more than any micro-batch costs
CAP_STEPS = 12  # halvings of the search for a cost cap: to 1/4096


@dataclass(frozen=True)
class Samples:
    """What planning knows of the samples, each int64 [samples]."""

    length: np.ndarray
    loss_tokens: np.ndarray
    anchors: np.ndarray

    def __len__(self) -> int:
        return len(self.length)


@dataclass(frozen=True)
class Limits:
    """What a micro-batch may hold: tokens as computed (padding included) and anchors; widths are multiples of `align`."""

    tokens: int
    anchors: int = FREE
    align: int = 1

    def width(self, length):
        """The width of a row of `length` tokens."""
        return -(-length // self.align) * self.align


@dataclass(frozen=True)
class Batches:
    """Micro-batches one after another: number i holds `samples[offsets[i]:offsets[i + 1]]`. Both int64."""

    samples: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """How many samples each holds."""
        return np.diff(self.offsets)

    def total(self, values: np.ndarray) -> np.ndarray:
        """The sum of a value a sample (int64 [samples of the store]) over each micro-batch."""
        sums = np.concatenate([[0], np.cumsum(values[self.samples])])
        return sums[self.offsets[1:]] - sums[self.offsets[:-1]]

    def longest(self, values: np.ndarray) -> np.ndarray:
        """The largest of a value a sample in each micro-batch; 0 where it is empty."""
        largest = np.zeros(len(self), np.int64)
        held = self.sizes > 0
        if held.any():  # empty ones between two others would cut a segment in two: leave them out
            largest[held] = np.maximum.reduceat(values[self.samples], self.offsets[:-1][held])
        return largest

    def taken(self, order: np.ndarray) -> "Batches":
        """The micro-batches in another order; −1 stands for an empty one."""
        sizes = np.where(order >= 0, self.sizes[order], 0)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        shift = np.repeat(np.where(order >= 0, self.offsets[order], 0) - offsets[:-1], sizes)
        return Batches(self.samples[np.arange(offsets[-1]) + shift], offsets)


@dataclass(frozen=True)
class Rows:
    """An order of samples as the rows they become: each int64 [rows]. Micro-batches never cross buckets."""

    sample: np.ndarray
    bucket: np.ndarray
    width: np.ndarray
    anchors: np.ndarray
    blocks: np.ndarray  # the draft's cost

    @cached_property
    def edges(self) -> np.ndarray:
        """Where each bucket that occurs begins, and the end, int64."""
        return np.flatnonzero(np.diff(self.bucket, prepend=-1, append=-1))

    def part(self, start: int, end: int) -> "Rows":
        """Rows start to end."""
        return Rows(*(getattr(self, field.name)[start:end] for field in fields(self)))


def make_rows(order: np.ndarray, bucket: np.ndarray, width: np.ndarray, samples: Samples, price: Price) -> Rows:
    """Gather what filling needs, so that the loops run over memory in order."""
    length, anchors = samples.length[order], samples.anchors[order]
    return Rows(order, bucket, width, anchors, price.blocks(anchors, length))


def fill(rows: Rows, limits: Limits, price: Price, cap: int = NO_CAP) -> np.ndarray:
    """Cut rows into micro-batches within the limits and, where more than one row, of at most the cost `cap`.

    Returns the cuts, int64: micro-batch i holds rows cuts[i] to cuts[i + 1].
    """
    columns = rows.bucket, rows.width, rows.anchors, rows.blocks
    return fill_rows(*columns, limits.tokens, limits.anchors, cap - price.fixed, price.token, price.square)


@compiled
def fill_rows(bucket, width, anchors, blocks, most_tokens, most_anchors, cap, token, square):
    """See `fill`."""
    cuts = np.empty(len(width) + 1, np.int64)
    count = 0
    start, longest, held, draft = 0, 0, 0, 0
    for i in range(len(width)):
        longest = max(longest, width[i])
        held += anchors[i]
        draft += blocks[i]
        rows = i + 1 - start
        over = rows * longest > most_tokens or held > most_anchors
        over = over or rows * (longest * (token + square * longest)) + draft > cap
        if rows > 1 and (over or bucket[i] != bucket[start]):
            count += 1
            cuts[count] = i
            start, longest, held, draft = i, width[i], anchors[i], blocks[i]
    cuts[0] = 0
    cuts[count + 1] = len(width)
    return cuts[: count + 2].copy()


def costs(rows: Rows, cuts: np.ndarray, price: Price) -> np.ndarray:
    """The integer cost of each micro-batch."""
    width = np.maximum.reduceat(rows.width, cuts[:-1])
    return price.fixed + price.rows(np.diff(cuts), width) + np.add.reduceat(rows.blocks, cuts[:-1])


def level(rows: Rows, limits: Limits, price: Price, count: int) -> np.ndarray:
    """Cut rows into exactly `count` micro-batches that cost about the same (fewer only if there are fewer rows).

    The least cost cap that needs no more than `count` spreads them over the buckets; each bucket then gets a cap of its own,
    so that none ends in a remnant; and what is still missing comes from halving the costliest.
    """
    cuts = least_cap(rows, limits, price, count)
    per_bucket = np.diff(np.searchsorted(cuts, rows.edges))
    if len(per_bucket) > 1:
        cuts = np.concatenate([[0], *(recut(rows, number, limits, price, own)[1:] for number, own in enumerate(per_bucket))])
    return halve(rows, cuts, price, count)


def recut(rows: Rows, bucket: int, limits: Limits, price: Price, count: int) -> np.ndarray:
    """Cut one of the buckets that occur into at most `count` micro-batches, which must be enough, at even cost."""
    start, end = rows.edges[bucket : bucket + 2].tolist()
    return start + least_cap(rows.part(start, end), limits, price, int(count))


def least_cap(rows: Rows, limits: Limits, price: Price, count: int) -> np.ndarray:
    """The cuts under the least cost cap, to 1/4096, that needs no more than `count` micro-batches."""
    cuts = fill(rows, limits, price)
    low, high = 0, int(costs(rows, cuts, price).max())
    for _ in range(CAP_STEPS):
        middle = (low + high) // 2
        tighter = fill(rows, limits, price, middle)
        if len(tighter) - 1 <= count:
            cuts, high = tighter, middle
        else:
            low = middle
    return cuts


def halve(rows: Rows, cuts: np.ndarray, price: Price, count: int) -> np.ndarray:
    """Halve the costliest micro-batches until there are `count`, or none has two rows."""
    if len(cuts) > count:
        return cuts
    parts = zip(costs(rows, cuts, price).tolist(), cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)
    heap = [(-cost, start, end) for cost, start, end in parts]
    heapq.heapify(heap)
    added: list[int] = []
    while heap and len(cuts) - 1 + len(added) < count:
        _, start, end = heapq.heappop(heap)
        if end - start < 2:
            continue
        middle = (start + end) // 2
        added.append(middle)
        for half in ((start, middle), (middle, end)):
            heapq.heappush(heap, (-part_cost(rows, *half, price), *half))
    return np.sort(np.concatenate([cuts, np.array(added, np.int64)]))


def part_cost(rows: Rows, start: int, end: int, price: Price) -> int:
    """The cost of rows start to end as one micro-batch."""
    part = slice(start, end)
    return int(price.fixed + price.rows(end - start, rows.width[part].max()) + rows.blocks[part].sum())
