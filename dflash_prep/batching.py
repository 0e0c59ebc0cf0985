"""Micro-batches: which samples are computed together, under budgets that are never exceeded."""

import heapq
from dataclasses import dataclass

import numpy as np

from dflash_prep.cost import row_cost

Group = np.ndarray  # the samples of one micro-batch, int64
EXACT_CUT = 512  # a step of more samples than this is cut at evenly spaced candidates


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
    """What a micro-batch may hold: tokens as computed (padding included) and anchors."""

    tokens: int
    anchors: int


def fill(order: np.ndarray, samples: Samples, limits: Limits) -> list[Group]:
    """Cut an order of samples into padded micro-batches, each filled until the next row would pass a limit.

    Greedy from the left is the fewest possible: what fits together also fits with less.
    """
    cuts, start, longest, held = [0], 0, 0, 0
    rows = zip(samples.length[order].tolist(), samples.anchors[order].tolist(), strict=True)
    for position, (length, anchors) in enumerate(rows):
        longest, held = max(longest, length), held + anchors
        if (position - start + 1) * longest > limits.tokens or held > limits.anchors:
            cuts.append(position)
            start, longest, held = position, length, anchors
    return np.split(order, cuts[1:])


def level_fill(order: np.ndarray, samples: Samples, limits: Limits, count: int) -> list[Group]:
    """Cut an order into exactly `count` micro-batches of about equal size (into fewer only if there are fewer samples).

    The least token limit that still needs no more than `count` spreads the order evenly; what is then still missing
    comes from halving the costliest.
    """
    low, high = int(samples.length[order].max()), limits.tokens
    while low < high:
        middle = (low + high) // 2
        if len(fill(order, samples, Limits(middle, limits.anchors))) <= count:
            high = middle
        else:
            low = middle + 1
    return halve(fill(order, samples, Limits(low, limits.anchors)), samples, count)


def halve(groups: list[Group], samples: Samples, count: int) -> list[Group]:
    """Halve the costliest groups, each half in its place, until there are `count` or none has two rows."""
    heap = [(-padded_cost(group, samples), (index,)) for index, group in enumerate(groups)]
    heapq.heapify(heap)
    parts = {(index,): group for index, group in enumerate(groups)}
    while heap and len(parts) < count:
        _, place = heapq.heappop(heap)
        group = parts[place]
        if len(group) < 2:
            continue
        del parts[place]
        for side, half in enumerate(np.array_split(group, 2)):
            parts[(*place, side)] = half
            heapq.heappush(heap, (-padded_cost(half, samples), (*place, side)))
    return [parts[place] for place in sorted(parts)]


def padded_cost(group: Group, samples: Samples) -> int:
    """The integer cost of a group padded to its longest row."""
    return len(group) * row_cost(int(samples.length[group].max()))


def deal(chosen: np.ndarray, samples: Samples, limits: Limits, slots: int) -> tuple[list[Group], list[int]]:
    """Deal samples to packed slots: longest first, each to the cheapest slot that has room.

    Returns the slots and the samples that found no room, in the order in which they were chosen.
    """
    tokens, anchors, costs = [0] * slots, [0] * slots, [0] * slots
    groups: list[list[int]] = [[] for _ in range(slots)]
    left = set()
    for sample in chosen[np.argsort(-samples.length[chosen], kind="stable")].tolist():
        length, held = int(samples.length[sample]), int(samples.anchors[sample])
        for slot in sorted(range(slots), key=costs.__getitem__):
            if tokens[slot] + length <= limits.tokens and anchors[slot] + held <= limits.anchors:
                groups[slot].append(sample)
                tokens[slot] += length
                anchors[slot] += held
                costs[slot] += row_cost(length)
                break
        else:
            left.add(sample)
    return [np.array(group, np.int64) for group in groups], [s for s in chosen.tolist() if s in left]


def cut(chosen: np.ndarray, samples: Samples, limits: Limits, slots: int) -> tuple[list[Group], list[int]]:
    """Sort samples by length and cut them into padded slots at the least total cost; what is over comes back.

    The longest prefix of `chosen` whose greedy cut needs no more than `slots` is taken: adding a sample never lowers that
    need, so the prefix is found by bisection.
    """
    low, high = min(slots, len(chosen)), len(chosen)  # each of the first `slots` has a slot of its own
    while low < high:
        middle = (low + high + 1) // 2
        if len(fill(longest_first(chosen[:middle], samples), samples, limits)) <= slots:
            low = middle
        else:
            high = middle - 1
    order = longest_first(chosen[:low], samples)
    return cheapest_cut(order, samples, limits, min(slots, low)), chosen[low:].tolist()


def longest_first(chosen: np.ndarray, samples: Samples) -> np.ndarray:
    """Samples by falling length, ties as they stood."""
    return chosen[np.argsort(-samples.length[chosen], kind="stable")]


def cheapest_cut(order: np.ndarray, samples: Samples, limits: Limits, count: int) -> list[Group]:
    """The cheapest of all ways to cut an order of falling lengths into `count` runs within the limits.

    Dynamic program over the candidate cuts, D_k[j] = min_i D_{k−1}[i] + (j − i) · cost(length at i): exact up to 512
    samples, beyond that exact over evenly spaced candidates and the greedy cuts.
    """
    greedy = np.cumsum([0, *map(len, fill(order, samples, limits))])
    at = np.unique(np.concatenate([greedy, np.linspace(0, len(order), max(EXACT_CUT, count) + 1).astype(int)]))
    if len(order) <= EXACT_CUT:
        at = np.arange(len(order) + 1)
    length = samples.length[order]
    held = np.concatenate([[0], np.cumsum(samples.anchors[order])])[at]
    rows = at[None, :] - at[:-1, None]  # [from, to]
    width = length[at[:-1], None]
    fits = (rows > 0) & (rows * width <= limits.tokens) & (held[None, :] - held[:-1, None] <= limits.anchors)
    never = np.int64(1) << 60
    price = np.where(fits, rows * row_cost(width), never)
    best = np.full(len(at), never)
    best[0] = 0
    chosen = []
    for _ in range(count):
        reach = np.minimum(best[:-1, None] + price, never)
        chosen.append(reach.argmin(axis=0))
        best = reach.min(axis=0)
    ends, j = [], len(at) - 1
    for layer in reversed(chosen):
        ends.append(int(at[j]))
        j = layer[j]
    return np.split(order, ends[:0:-1])
