"""Padded steps: samples drawn from the epoch's permutation, sorted, and cut into the step's slots.

Step first, as in `packing`: the draw decides the composition, which is that of a full shuffle, and only then the step is cut
where the exact dynamic program says. Ranks wait for the costliest slot, so that one is made as cheap as possible, up to a
small allowance; within that allowance the whole step is.

Rows are int64 [samples, 4]: length, width, anchors and the draft's cost of each sample, in the epoch's order.
"""

import numpy as np

from dflash_prep.batching import Batches, Limits, Samples
from dflash_prep.compiled import compiled
from dflash_prep.cost import Price

LOOK_AHEAD = 32  # samples that are tried where the permutation's next does not fit
ALLOWANCE = 24  # a slot may cost 1/24 more than it must where that makes the whole step cheaper
EARLY = 16  # all steps but the last aim 1/16 of a step ahead of the even share, so that none who wait are left at the end
EASE = 64  # 1/64 more steps than full ones are made: with room to cut well, an epoch takes less time
CAP_STEPS = 12  # halvings of the search for the least cost cap: to 1/4096
MOST_CELLS = 2**24  # of the dynamic program's tables
NEVER = 2**60


def cut_steps(order: np.ndarray, samples: Samples, limits: Limits, price: Price, slots: int) -> Batches:
    """Cut an order of samples into steps of `slots` padded micro-batches each, as few and as level as may be.

    Returns the slots step by step; only the last step may hold empty ones. A first pass fills each step to the brim and so
    counts the steps; the next gives each an even share of the tokens.
    """
    length, anchors = samples.length[order], samples.anchors[order]
    rows = np.stack([length, limits.width(length), anchors, price.blocks(anchors, length)], axis=1)
    limit = np.array([limits.tokens, limits.anchors, NEVER, price.token, price.square])
    _, sizes = cut_all(rows, slots, limit, 0)
    steps = len(sizes) // slots
    steps += steps // EASE
    while True:
        places, sizes = cut_all(rows, slots, limit, steps)
        if len(sizes) <= steps * slots:
            return Batches(order[places], np.concatenate([[0], np.cumsum(sizes)]))
        steps += max(1, steps // EASE)


@compiled
def cut_all(rows, slots, limit, steps):
    """The steps one after another: places in the order [samples], and how many rows each slot has [steps · slots].

    limit: of a slot's tokens, anchors and cost, then what a token and a square cost; steps: how many there should be, or 0
    for steps as full as may be.
    """
    count, tokens = len(rows), rows[:, 0].sum()
    places, sizes = np.empty(count, np.int64), np.zeros(count + 2 * slots, np.int64)
    waiting = np.empty(0, np.int64)
    position, done, emitted, used = 0, 0, 0, 0
    while position < count or len(waiting) > 0:
        aim = slots * limit[0]
        if done < steps:  # counted from the epoch's start, so that what steps fall short by does not pile up on the last
            even = tokens // steps * (done + 1) + -(-(tokens % steps * (done + 1)) // steps)
            aim = min(aim, even - used + tokens // steps // EARLY)
        drawn, base = candidates(rows, waiting, position, slots, aim)
        widest = np.argsort(-rows[drawn, 1], kind="mergesort")
        taken = choose(rows, drawn, widest, base, slots, limit, aim)
        last = len(waiting) - 1
        for i in range(len(waiting), len(drawn)):
            if taken[i]:
                last = i
        position += last + 1 - len(waiting)
        waiting = drawn[: last + 1][~taken[: last + 1]]
        chosen = drawn[widest[taken[widest]]]
        cuts = cheapest_cut(rows, chosen, min(slots, len(chosen)), limit)
        sizes[done * slots : done * slots + len(cuts) - 1] = cuts[1:] - cuts[:-1]
        places[emitted : emitted + len(chosen)] = chosen
        emitted += len(chosen)
        used += rows[chosen, 0].sum()
        done += 1
    return places, sizes[: done * slots].copy()


@compiled
def candidates(rows, waiting, position, slots, aim):
    """Who might join the step: who waited, the permutation up to the aim, and a few more; and how many are up to the aim."""
    tokens = rows[waiting, 0].sum()
    end = position
    while end < len(rows) and (len(waiting) + end - position < slots or tokens + rows[end, 0] <= aim):
        tokens += rows[end, 0]
        end += 1
    more = min(len(rows), end + LOOK_AHEAD)
    return np.concatenate((waiting, np.arange(position, more))), len(waiting) + end - position


@compiled
def choose(rows, drawn, widest, base, slots, limit, aim):
    """Which candidates the step takes: as many of the first as fit its slots, then whichever else still fits.

    Adding a sample never lowers how many slots are needed, so the prefix is found by bisection.
    """
    taken = np.zeros(len(drawn), np.bool_)
    low, high = min(slots, base), base  # each of the first `slots` has a slot of its own
    while low < high:
        middle = (low + high + 1) // 2
        taken[:middle], taken[middle:] = True, False
        if slots_needed(rows, drawn, widest, taken, limit) <= slots:
            low = middle
        else:
            high = middle - 1
    taken[:low], taken[low:] = True, False
    tokens = rows[drawn[:low], 0].sum()
    for i in range(low, len(drawn)):
        if tokens + rows[drawn[i], 0] <= aim:
            taken[i] = True
            if slots_needed(rows, drawn, widest, taken, limit) <= slots:
                tokens += rows[drawn[i], 0]
            else:
                taken[i] = False
    return taken


@compiled
def slots_needed(rows, drawn, widest, taken, limit):
    """How many slots the taken samples need at least: each filled from the widest on."""
    needed, count, width, anchors = 0, 0, 0, 0
    for i in widest:
        if taken[i]:
            sample = drawn[i]
            count += 1
            anchors += rows[sample, 2]
            if needed == 0 or count * width > limit[0] or anchors > limit[1]:
                needed += 1
                count, width, anchors = 1, rows[sample, 1], rows[sample, 2]
    return needed


@compiled
def reach(rows, chosen, start, limit, cap):
    """How far a slot that starts at a row may go within the limits and the cost cap."""
    width = rows[chosen[start], 1]
    each = width * (limit[3] + limit[4] * width)
    end, anchors, cost = start, 0, 0
    while end < len(chosen):
        anchors += rows[chosen[end], 2]
        cost += each + rows[chosen[end], 3]
        if (end + 1 - start) * width > limit[0] or anchors > limit[1] or cost > cap:
            break
        end += 1
    return end


@compiled
def fits(rows, chosen, count, limit, cap):
    """Whether `count` slots of at most the cost `cap` hold all rows."""
    end = 0
    for _ in range(count):
        if end == len(chosen):
            return True
        end = reach(rows, chosen, end, limit, cap)
    return end == len(chosen)


@compiled
def least_cap(rows, chosen, count, limit):
    """The least cost of the costliest slot, to 1/4096."""
    low, high, start = 0, 0, 0
    while start < len(chosen):  # what the fullest slots would cost
        end = reach(rows, chosen, start, limit, NEVER)
        width = rows[chosen[start], 1]
        high = max(high, (end - start) * width * (limit[3] + limit[4] * width) + rows[chosen[start:end], 3].sum())
        start = end
    for _ in range(CAP_STEPS):
        middle = (low + high) // 2
        if fits(rows, chosen, count, limit, middle):
            high = middle
        else:
            low = middle
    return high


@compiled
def cheapest_cut(rows, chosen, count, limit):
    """Where to cut rows of falling width into `count` slots: int64 [count + 1], from 0 to the number of rows.

    best[k, j] = min over i of best[k − 1, i] + cost of rows i to j in one slot, over the cuts that leave the rest a chance.
    """
    size = len(chosen)
    cap = least_cap(rows, chosen, count, limit)
    cap += cap // ALLOWANCE
    ends = np.empty(size, np.int64)
    for i in range(size):
        ends[i] = reach(rows, chosen, i, limit, cap)
    latest, earliest = np.zeros(count + 1, np.int64), np.full(count + 1, size)
    for k in range(count):  # the latest k + 1 slots can end, if later ones get a row each
        latest[k + 1] = min(ends[latest[k]], size - (count - k - 1))
    for k in range(count - 1, 0, -1):  # the earliest k slots can end, if the others are to hold the rest
        i = earliest[k + 1]
        while i > k and ends[i - 1] >= earliest[k + 1]:
            i -= 1
        earliest[k] = i
    draft = np.zeros(size + 1, np.int64)
    draft[1:] = np.cumsum(rows[chosen, 3])
    earliest[0] = 0
    band = (latest - earliest).max() + 1  # each layer is kept from its earliest end on
    if count * band > MOST_CELLS:
        return latest  # each slot filled to the cap: too large a step for the program's tables
    best, cut = np.full((count + 1, band), NEVER), np.zeros((count + 1, band), np.int64)
    best[0, 0] = 0
    for k in range(count):
        for i in range(earliest[k], latest[k] + 1):
            so_far = best[k, i - earliest[k]]
            if so_far == NEVER:
                continue
            width = rows[chosen[i], 1]
            each = width * (limit[3] + limit[4] * width)
            for j in range(max(i + 1, earliest[k + 1]), min(ends[i], latest[k + 1]) + 1):
                cost = so_far + (j - i) * each + draft[j] - draft[i]
                if cost < best[k + 1, j - earliest[k + 1]]:
                    best[k + 1, j - earliest[k + 1]], cut[k + 1, j - earliest[k + 1]] = cost, i
    cuts = np.full(count + 1, size)
    for k in range(count, 0, -1):
        cuts[k - 1] = cut[k, cuts[k] - earliest[k]]
    return cuts
