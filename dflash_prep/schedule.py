"""Steps: which micro-batches share one optimizer step, for each strategy.

A step is a list of `slots` groups, and an epoch a list of steps in which each sample stands exactly once. Steps are level:
the epoch is spread evenly over them, and only the last may hold fewer groups than slots (where samples run out).
"""

import heapq
from collections.abc import Callable, Iterator

import numpy as np

from dflash_prep.batching import Group, Limits, Samples, cut, deal, fill, level_fill, padded_cost
from dflash_prep.buckets import assign
from dflash_prep.rng import permutation

Step = list[Group]
ORDER_STREAM = 1
Split = Callable[[np.ndarray, Samples, Limits, int], tuple[list[Group], list[int]]]


def epoch_order(samples: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of the samples that an epoch is made from: of (seed, epoch) alone."""
    return permutation((ORDER_STREAM, seed, epoch), samples)


def sorted_steps(samples: Samples, limits: Limits, slots: int, seed: int, epoch: int) -> list[Step]:
    """Sort by length, cut into batches, shuffle the batches: the same neighbours in every epoch."""
    groups = level_groups(np.argsort(samples.length, kind="stable"), samples, limits, slots)
    return in_steps([groups[i] for i in epoch_order(len(groups), seed, epoch)], slots)


def shuffled_steps(samples: Samples, limits: Limits, slots: int, seed: int, epoch: int) -> list[Step]:
    """Shuffle everything and pad each batch to its longest row."""
    return in_steps(level_groups(epoch_order(len(samples), seed, epoch), samples, limits, slots), slots)


def bucketed_steps(samples: Samples, limits: Limits, slots: int, seed: int, epoch: int, bounds: list[int]) -> list[Step]:
    """Batch within each length bucket, then interleave the buckets' batches in proportion to their number.

    Batch i of a bucket's n stands at (i + ½)/n of the epoch, so that each step holds its share of every bucket.
    """
    order = epoch_order(len(samples), seed, epoch)
    bucket = assign(samples.length, bounds)[order]
    parts = [order[bucket == j] for j in range(len(bounds)) if (bucket == j).any()]
    counts = level_counts(parts, samples, limits, slots)
    placed = []
    for j, (part, count) in enumerate(zip(parts, counts, strict=True)):
        groups = level_fill(part, samples, limits, count)
        placed += [((i + 0.5) / len(groups), j, group) for i, group in enumerate(groups)]
    return in_steps([group for _, _, group in sorted(placed, key=lambda item: item[:2])], slots)


def packed_steps(samples: Samples, limits: Limits, slots: int, seed: int, epoch: int) -> list[Step]:
    """Draw a step's samples from the permutation and deal them to its slots, end to end."""
    return drawn_steps(samples, limits, slots, seed, epoch, deal)


def step_bucketed_steps(samples: Samples, limits: Limits, slots: int, seed: int, epoch: int) -> list[Step]:
    """Draw a step's samples from the permutation and cut them, sorted, into its padded slots."""
    return drawn_steps(samples, limits, slots, seed, epoch, cut)


def level_groups(order: np.ndarray, samples: Samples, limits: Limits, slots: int) -> list[Group]:
    """Padded batches of an order, a multiple of `slots` of them."""
    count = len(fill(order, samples, limits))
    return level_fill(order, samples, limits, -(-count // slots) * slots)


def level_counts(parts: list[np.ndarray], samples: Samples, limits: Limits, slots: int) -> list[int]:
    """How many batches each bucket is cut into: as few as fit, then more where batches are largest, until steps are full."""
    counts = [len(fill(part, samples, limits)) for part in parts]
    costs = [padded_cost(part, samples) for part in parts]
    heap = [(-cost / count, j) for j, (cost, count) in enumerate(zip(costs, counts, strict=True))]
    heapq.heapify(heap)
    missing = -sum(counts) % slots
    while heap and missing:
        _, j = heapq.heappop(heap)
        if counts[j] < len(parts[j]):
            counts[j] += 1
            missing -= 1
            heapq.heappush(heap, (-costs[j] / counts[j], j))
    return counts


def in_steps(groups: list[Group], slots: int) -> list[Step]:
    """Consecutive groups as steps."""
    return [groups[i : i + slots] for i in range(0, len(groups), slots)]


def drawn_steps(samples: Samples, limits: Limits, slots: int, seed: int, epoch: int, split: Split) -> list[Step]:
    """Steps drawn one after another from the epoch's permutation, as few as the split allows, and level.

    A first pass fills each step to the brim and so counts the steps; the second gives each an even share of the tokens.
    Where uneven luck leaves samples over, one step more always has more room.
    """
    order = epoch_order(len(samples), seed, epoch)
    count = len(list(draw(order, samples, limits, slots, split, None)))
    while len(steps := list(draw(order, samples, limits, slots, split, count))) > count:
        count += 1 + count // 1000
    return steps


def draw(order: np.ndarray, samples: Samples, limits: Limits, slots: int, split: Split, count: int | None) -> Iterator[Step]:
    """Split the order into steps; with `count`, step i of them draws up to i/count of all tokens.

    Aims count from the epoch's start: sharing out what is left would add up what each step falls short by (half a sample
    on average) and let steps grow towards the end.
    """
    tokens = np.concatenate([[0], np.cumsum(samples.length[order])])
    position, carried, carried_tokens, done = 0, np.empty(0, np.int64), 0, 0
    while position < len(order) or len(carried):
        aim = int(tokens[position]) - carried_tokens + slots * limits.tokens
        if count is not None and done < count:
            aim = min(aim, -(-int(tokens[-1]) * (done + 1) // count))
        end = int(np.searchsorted(tokens, aim, "right")) - 1
        # what did not fit before goes first; a step has no empty slot while samples are left
        end = min(max(end, position, position + slots - len(carried)), len(order))
        groups, over = split(np.concatenate([carried, order[position:end]]), samples, limits, slots)
        carried, position, done = np.array(over, np.int64), end, done + 1
        carried_tokens = int(samples.length[carried].sum())
        yield [group for group in groups if len(group)]
