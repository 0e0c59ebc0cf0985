"""Packed steps: samples drawn from the epoch's permutation and laid end to end in the step's slots.

Step first: a step draws its samples in the order of the permutation, so that its composition is that of a full shuffle,
and only then deals them to its slots. Longest first to the cheapest slot is a good start (LPT); after it pairs of samples
are exchanged between the worst slot and another until no slot is over its budget and the slots' costs agree.

Work is measured in two *loads* a sample, the target's cost and the draft's: slots that agree in both agree under any mix of
the two. They are scaled to integers of about 2^22 a slot, so that squares of deviations are exact in int64.
"""

import numpy as np

from dflash_prep.batching import Batches, Limits, Samples
from dflash_prep.compiled import compiled
from dflash_prep.cost import Price

SLACK = 900  # a slot is aimed at its budget less a 1/900th, so that the exchange has room to move
EASE = 2000  # 1/2000 more steps than the slots' aim alone asks for: a pass that leaves samples over is in vain
AHEAD = 256  # steps aim 1/256 of a step ahead of the even share, so that none who wait are left at the end
LOOK_AHEAD = 64  # samples among which the last gap of a step is filled
EARLY = 95  # percent of a step's tokens, the longest samples, that are dealt by squares
LOAD_BITS = 22  # of a mean slot's load
WIDEST_BITS = 26  # of any sample's load
AGREED = 600  # millionths of a slot's load: slots that agree so well are left alone
SHED = 8  # times that: a slot dearer by so much gives samples back to the next step
EXCHANGES = 3  # for every two slots of a step, at most
SATISFIED = 20  # an exchange that leaves 1/20 of two slots' unevenness is not searched for a better one
OVER = 4  # how much worse a token over the budget is than one that is only uneven
EDGE = 16  # tokens that any excess counts for on top: a small one must not pass for agreement


def pack(order: np.ndarray, samples: Samples, limits: Limits, price: Price, slots: int) -> Batches:
    """Pack an order of samples into steps of `slots` micro-batches each, as few and as level as may be.

    Returns the slots step by step; only the last step may hold empty ones. Where anchors or bad luck leave samples over, the
    epoch is dealt anew over more steps, so that the last is a full update like the others.
    """
    length, anchors = samples.length[order], samples.anchors[order]
    most = limits.tokens // limits.align * limits.align
    budget = np.array([most, limits.anchors])
    loads = make_loads(length, anchors, price, -(-int(length.sum()) // most))
    aimed = [slots * (limit - limit // SLACK) for limit in budget.tolist()]
    steps = max(-(-int(total.sum()) // aim) for total, aim in zip((length, anchors), aimed, strict=True))
    steps += steps // EASE
    more = 1
    while True:
        places, sizes = pack_steps(np.stack([length, anchors], axis=1), loads, slots, budget, steps)
        over = len(sizes) // slots - steps
        if over <= 0:
            return Batches(order[places], np.concatenate([[0], np.cumsum(sizes)]))
        steps, more = steps + over * more, more * 2


def make_loads(length: np.ndarray, anchors: np.ndarray, price: Price, slots: int) -> np.ndarray:
    """The target's and the draft's load of each sample, int64 [samples, 2], for about `slots` slots in all.

    The draft's is scaled to half the target's, which then agrees the more closely.
    """
    loads = np.zeros((len(length), 2), np.int64)
    for column, part in enumerate((price.rows(1, length), price.blocks(anchors, length))):
        unit = max(1, int(part.sum()) // slots >> (LOAD_BITS - column), int(part.max()) >> WIDEST_BITS)
        loads[:, column] = part // unit
    return loads


@compiled
def pack_steps(held, loads, slots, budget, steps):
    """The steps one after another: places in the order [samples], and how many each slot holds [steps · slots].

    held: tokens and anchors of each sample, int64 [samples, 2]; budget: of a slot, int64 [2]; steps: how many to aim at.
    """
    count = len(held)
    tokens = held[:, 0].sum()
    places, sizes = np.empty(count, np.int64), np.zeros(count + 2 * slots, np.int64)
    drawn, waiting = np.empty(count, np.int64), np.empty(count, np.int64)
    position, wait, done, emitted, used = 0, 0, 0, 0, 0
    while position < count or wait > 0:
        aim = slots * budget[0]
        if done < steps:  # counted from the epoch's start, so that what steps fall short by does not pile up on the last
            even = tokens // steps * (done + 1) + -(-(tokens % steps * (done + 1)) // steps)
            aim = min(aim, even - used + tokens // steps // AHEAD)
        size, position, wait = draw(held, drawn, waiting, position, wait, slots, aim, slots * budget[1])
        start, member = deal(held, drawn[:size], slots, budget)
        exchange(held, loads, start, member, budget)
        spare = (steps - done - 1) * slots * (budget[0] - budget[0] // (2 * SLACK)) - (tokens - used - held[member, 0].sum())
        keep = shed(held, loads, start, member, budget, spare)
        for i in range(size):
            if not keep[i]:
                waiting[wait] = member[i]
                wait += 1
        for slot in range(slots):
            for i in range(start[slot], start[slot + 1]):
                if keep[i]:
                    places[emitted] = member[i]
                    emitted += 1
                    used += held[member[i], 0]
                    sizes[done * slots + slot] += 1
        done += 1
    return places, sizes[: done * slots].copy()


@compiled
def draw(held, drawn, waiting, position, wait, slots, most_tokens, most_anchors):
    """Choose a step's samples: who waited, then the permutation until the next does not fit, then what fills the gap.

    A step has no empty slot while samples are left, so the first `slots` are taken whatever they hold. Fills `drawn`, keeps
    in `waiting` who was passed over; returns how many were drawn, the new position and how many wait.
    """
    size, tokens, anchors, kept = 0, 0, 0, 0
    for i in range(wait):
        sample = waiting[i]
        if size < slots or (tokens + held[sample, 0] <= most_tokens and anchors + held[sample, 1] <= most_anchors):
            drawn[size] = sample
            size += 1
            tokens += held[sample, 0]
            anchors += held[sample, 1]
        else:
            waiting[kept] = sample
            kept += 1
    while position < len(held) and (
        size < slots or (tokens + held[position, 0] <= most_tokens and anchors + held[position, 1] <= most_anchors)
    ):
        drawn[size] = position
        size += 1
        tokens += held[position, 0]
        anchors += held[position, 1]
        position += 1
    end = min(len(held), position + LOOK_AHEAD)
    taken = np.zeros(LOOK_AHEAD, np.bool_)
    last = position - 1
    while True:
        best = -1
        for i in range(position, end):
            fits = tokens + held[i, 0] <= most_tokens and anchors + held[i, 1] <= most_anchors
            if fits and not taken[i - position] and (best < 0 or held[i, 0] > held[best, 0]):
                best = i
        if best < 0:
            break
        taken[best - position] = True
        drawn[size] = best
        size += 1
        tokens += held[best, 0]
        anchors += held[best, 1]
        last = max(last, best)
    for i in range(position, last + 1):
        if not taken[i - position]:
            waiting[kept] = i
            kept += 1
    return size, last + 1, kept


@compiled
def deal(held, drawn, slots, budget):
    """Deal samples to slots, the longest first: first so that squares of lengths agree, then so that tokens do.

    Attention's work hangs on the few long samples, and only many short ones can then fill the slots to the same mark. Each
    goes to the least slot with room, else to the one with most room. Returns the slots as one list of members and where each
    starts, int64 [slots + 1].
    """
    size = len(drawn)
    longest = np.argsort(-held[drawn, 0], kind="mergesort")
    tokens, anchors = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
    squares, count = np.zeros(slots, np.float64), np.zeros(slots, np.int64)
    slot_of = np.empty(size, np.int64)
    dealt, total = 0, held[drawn, 0].sum()
    for i in longest:
        length, blocks = held[drawn[i], 0], held[drawn[i], 1]
        best, roomy, least = -1, 0, 0.0
        early = dealt * 100 < total * EARLY
        for slot in range(slots):
            if tokens[slot] + length <= budget[0] and anchors[slot] + blocks <= budget[1]:
                key = squares[slot] if early else float(tokens[slot])
                if best < 0 or key < least or (key == least and count[slot] < count[best]):
                    best, least = slot, key
            if tokens[slot] < tokens[roomy]:
                roomy = slot
        if best < 0:
            best = roomy
        slot_of[i] = best
        dealt += length
        tokens[best] += length
        anchors[best] += blocks
        squares[best] += float(length) * length
        count[best] += 1
    start = np.zeros(slots + 1, np.int64)
    start[1:] = np.cumsum(count)
    member, filled = np.empty(size, np.int64), start[:-1].copy()
    for i in longest:  # each slot's own from long to short
        member[filled[slot_of[i]]] = drawn[i]
        filled[slot_of[i]] += 1
    return start, member


@compiled
def unevenness(target, draft, tokens, anchors, budget, weight):
    """The square of how far a slot is from the mean, and over its budget."""
    value = target * target + draft * draft
    if tokens > budget[0]:
        value += ((tokens - budget[0] + EDGE) * weight[0]) ** 2
    if anchors > budget[1]:
        value += ((anchors - budget[1] + EDGE) * weight[1]) ** 2
    return value


@compiled
def exchange(held, loads, start, member, budget):
    """Exchange pairs of samples between the worst slot and another while that makes the two more even; in place.

    `state` holds, for each slot, how far its target's and its draft's load are from the mean, its tokens and its anchors.
    """
    slots, size = len(start) - 1, len(member)
    state = np.zeros((slots, 4), np.int64)
    item = np.empty((size, 4), np.int64)  # the same of each member, in the slots' order
    for slot in range(slots):
        for i in range(start[slot], start[slot + 1]):
            item[i, :2], item[i, 2:] = loads[member[i]], held[member[i]]
            state[slot] += item[i]
    mean = state.sum(axis=0) // slots
    state[:, 0] -= mean[0]
    state[:, 1] -= mean[1]
    weight = np.maximum(1, (OVER << LOAD_BITS) // budget)
    agreed = (AGREED * (1 << LOAD_BITS) // 1_000_000) ** 2
    settled = np.zeros(slots, np.bool_)
    uneven = np.empty(slots, np.int64)
    for slot in range(slots):
        uneven[slot] = unevenness(state[slot, 0], state[slot, 1], state[slot, 2], state[slot, 3], budget, weight)
    for _ in range(EXCHANGES * slots // 2):
        worst = -1
        for slot in range(slots):
            if not settled[slot] and (worst < 0 or uneven[slot] > uneven[worst]):
                worst = slot
        if worst < 0 or uneven[worst] < agreed:
            break
        mine, theirs, other = best_exchange(state, item, start, uneven, worst, budget, weight)
        if other < 0:
            if state[worst, 2] <= budget[0] and state[worst, 3] <= budget[1]:
                break  # the worst slot, for which the others wait, cannot be helped
            settled[worst] = True  # until an exchange with another changes it
            continue
        settled[other] = False
        difference = item[theirs] - item[mine]
        state[worst] += difference
        state[other] -= difference
        for column in range(4):
            item[mine, column], item[theirs, column] = item[theirs, column], item[mine, column]
        member[mine], member[theirs] = member[theirs], member[mine]
        restore_order(item, member, start[worst], start[worst + 1], mine)
        restore_order(item, member, start[other], start[other + 1], theirs)
        for slot in (worst, other):
            uneven[slot] = unevenness(state[slot, 0], state[slot, 1], state[slot, 2], state[slot, 3], budget, weight)


@compiled
def restore_order(item, member, low, high, place):
    """Move the one item that may be out of place among those of its slot, which fall in the target's load."""
    while place > low and item[place, 0] > item[place - 1, 0]:
        swap_items(item, member, place, place - 1)
        place -= 1
    while place + 1 < high and item[place, 0] < item[place + 1, 0]:
        swap_items(item, member, place, place + 1)
        place += 1


@compiled
def swap_items(item, member, one, other):
    """Exchange two neighbours."""
    for column in range(4):
        item[one, column], item[other, column] = item[other, column], item[one, column]
    member[one], member[other] = member[other], member[one]


@compiled
def best_exchange(state, item, start, uneven, worst, budget, weight):
    """The pair, one of the worst slot and one of another, whose exchange leaves the two slots least uneven.

    Slots are tried from the most opposite one on, and the search ends with a pair that leaves next to nothing. Only items
    near the load that would even out the target's come into question. Returns the two items and the other slot, −1 where no
    exchange helps.
    """
    sign = 1 if state[worst, 0] > 0 else -1
    mine, theirs, other = -1, -1, -1
    gain = 0
    for slot in np.argsort(sign * state[:, 0], kind="mergesort"):
        if slot == worst:
            continue
        before = uneven[worst] + uneven[slot]
        for i in range(start[worst], start[worst + 1]):
            ideal = item[i, 0] - (state[worst, 0] - state[slot, 0]) // 2
            low, high = start[slot], start[slot + 1]
            while low < high:  # the first that is lighter than ideal
                middle = (low + high) // 2
                if item[middle, 0] >= ideal:
                    low = middle + 1
                else:
                    high = middle
            for step in (-1, 1):
                j = low - 1 if step < 0 else low
                while start[slot] <= j < start[slot + 1]:
                    difference = item[j, 0] - item[i, 0]
                    up, down = state[worst, 0] + difference, state[slot, 0] - difference
                    if up * up + down * down >= before - gain:
                        break  # further off the target's loads alone are too uneven
                    draft, tokens = item[j, 1] - item[i, 1], item[j, 2] - item[i, 2]
                    anchors = item[j, 3] - item[i, 3]
                    after = unevenness(
                        up, state[worst, 1] + draft, state[worst, 2] + tokens, state[worst, 3] + anchors, budget, weight
                    ) + unevenness(
                        down, state[slot, 1] - draft, state[slot, 2] - tokens, state[slot, 3] - anchors, budget, weight
                    )
                    if before - after > gain:
                        gain, mine, theirs, other = before - after, i, j, slot
                    j += step
            if gain > before - before // SATISFIED:
                return mine, theirs, other
    return mine, theirs, other


@compiled
def shed(held, loads, start, member, budget, spare):
    """Which members stay: slots over the budget give back who came last, and much dearer ones what brings them to the mean.

    The latter only while later steps have more than a slot's worth of tokens to spare. No slot gives back its last.
    """
    slots = len(start) - 1
    keep = np.ones(len(member), np.bool_)
    mean = loads[member, 0].sum() // slots
    for slot in range(slots):
        tokens, anchors, load, left = 0, 0, 0, start[slot + 1] - start[slot]
        for i in range(start[slot], start[slot + 1]):
            tokens += held[member[i], 0]
            anchors += held[member[i], 1]
            load += loads[member[i], 0]
        while left > 1:
            over = tokens > budget[0] or anchors > budget[1]
            excess = load - mean
            if not over and (excess < (SHED * AGREED << LOAD_BITS) // 1_000_000 or spare < budget[0]):
                break
            best = -1
            for i in range(start[slot], start[slot + 1]):
                if not keep[i]:
                    continue
                if over:
                    better = best < 0 or member[i] > member[best]  # the shortest would flock together in later steps
                else:
                    miss = abs(loads[member[i], 0] - excess)
                    better = miss < excess and (best < 0 or miss < abs(loads[member[best], 0] - excess))
                if better:
                    best = i
            if best < 0:
                break
            keep[best] = False
            left -= 1
            tokens -= held[member[best], 0]
            anchors -= held[member[best], 1]
            load -= loads[member[best], 0]
            spare -= held[member[best], 0]
    return keep
