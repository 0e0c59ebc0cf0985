"""Steps: which micro-batches share one optimizer step, for each strategy.

An epoch is a list of micro-batches, `slots` a step, in which each drawn sample stands exactly once. Steps are level: the
epoch is spread evenly over them, and only the last may hold empty slots (where samples run out).
"""

import numpy as np

from dflash_prep.batching import Batches, Limits, Rows, Samples, costs, fill, halve, level, make_rows, recut
from dflash_prep.buckets import assign
from dflash_prep.cost import Price
from dflash_prep.cutting import cut_steps
from dflash_prep.dealing import Leaning, deal_to_steps, design_effect, leaning, more_counts
from dflash_prep.packing import pack
from dflash_prep.rng import permutation

DEAL_STREAM = 3  # 1 is the epochs' permutations, 2 the anchors
WELL_MIXED = 2.0  # a design effect up to this needs no remedy; a full shuffle has 1
MOST_SPLIT = 20  # the remedy may cost 1/20 more micro-batches
CAPS = 16  # cost caps that are tried, each 1/16 below the one before
NEAR = 40  # an epoch may take 1/40 longer than with the quickest of them if that saves steps


def sorted_steps(order: np.ndarray, samples: Samples, limits: Limits, price: Price, slots: int, names: tuple) -> Batches:
    """Sort by length, cut into batches, shuffle the batches: the same neighbours in every epoch."""
    order = np.sort(order)
    order = order[np.argsort(samples.length[order], kind="stable")]
    batches = plain_batches(order, samples, limits, price, slots)
    return whole_steps(batches, permutation((DEAL_STREAM, *names), len(batches)), slots)


def shuffled_steps(order: np.ndarray, samples: Samples, limits: Limits, price: Price, slots: int, names: tuple) -> Batches:
    """Shuffle everything and pad each batch to its longest row."""
    batches = plain_batches(order, samples, limits, price, slots)
    return whole_steps(batches, np.arange(len(batches)), slots)


def packed_steps(order: np.ndarray, samples: Samples, limits: Limits, price: Price, slots: int, names: tuple) -> Batches:
    """Draw a step's samples from the permutation and deal them to its slots, end to end."""
    return pack(order, samples, limits, price, slots)


def step_bucketed_steps(
    order: np.ndarray, samples: Samples, limits: Limits, price: Price, slots: int, names: tuple
) -> Batches:
    """Draw a step's samples from the permutation and cut them, sorted, into its padded slots."""
    return cut_steps(order, samples, limits, price, slots)


def bucketed_steps(
    order: np.ndarray,
    samples: Samples,
    limits: Limits,
    price: Price,
    slots: int,
    names: tuple,
    bounds: list[int],
    fixed_shapes: bool,
) -> Batches:
    """Batch within each length bucket, in the order of the permutation, then give each step its share of every bucket."""
    bucket = assign(samples.length[order], bounds)
    by_bucket = np.argsort(bucket.astype(np.uint16), kind="stable")  # of 16 bits: a radix sort
    order, bucket = order[by_bucket], bucket[by_bucket]
    width = np.array(bounds)[bucket] if fixed_shapes else limits.width(samples.length[order])
    rows = make_rows(order, bucket, width, samples, price)
    cuts = level(rows, limits, price, quickest_count(rows, limits, price, slots))
    return mixed_steps(rows, cuts, limits, price, leaning(samples.length[order]), slots, (DEAL_STREAM, *names))


def mixed_steps(
    rows: Rows, cuts: np.ndarray, limits: Limits, price: Price, lean: Leaning, slots: int, names: tuple
) -> Batches:
    """Deal micro-batches to steps; cut buckets that spoil the mixture smaller until it is good or takes too many steps."""
    counts = np.diff(np.searchsorted(cuts, rows.edges))
    best = None
    for more in more_counts(counts, lean.pull(rows.edges), -(-len(cuts) // slots)):
        if more is not counts:
            if more.sum() * MOST_SPLIT > counts.sum() * (MOST_SPLIT + 1):
                break
            cuts = smaller(rows, cuts, limits, price, np.minimum(more, np.diff(rows.edges)))
            cuts = halve(rows, cuts, price, -(-(len(cuts) - 1) // slots) * slots)
        pull = lean.pull(cuts)
        order = deal_to_steps(pull, slots, names)
        effect = design_effect(order, pull, np.diff(cuts), slots, lean.variance)
        if best is None or effect < best[0]:
            best = effect, order, cuts
        if effect <= WELL_MIXED:
            break
    _, order, cuts = best
    return Batches(rows.sample, cuts).taken(order)


def smaller(rows: Rows, cuts: np.ndarray, limits: Limits, price: Price, counts: np.ndarray) -> np.ndarray:
    """Cut anew the buckets that are to have more micro-batches than they have."""
    ends = np.searchsorted(cuts, rows.edges)
    parts = [np.zeros(1, np.int64)]
    for bucket, count in enumerate(counts):
        own = cuts[ends[bucket] : ends[bucket + 1] + 1]
        parts.append((own if count < len(own) else recut(rows, bucket, limits, price, count))[1:])
    return np.concatenate(parts)


def plain_batches(order: np.ndarray, samples: Samples, limits: Limits, price: Price, slots: int) -> Batches:
    """Padded batches of an order, a multiple of `slots` of them."""
    rows = make_rows(order, np.zeros(len(order), np.int64), limits.width(samples.length[order]), samples, price)
    count = len(fill(rows, limits, price)) - 1
    return Batches(order, level(rows, limits, price, -(-count // slots) * slots))


def quickest_count(rows: Rows, limits: Limits, price: Price, slots: int) -> int:
    """How many micro-batches, a multiple of `slots`, make the epoch about as short as can be.

    Ranks wait for the dearest slot. Full micro-batches of long rows are dearer than others; a cap on what each may cost
    makes more steps, but shorter ones. Near the best cap time hardly changes, so the fewest steps near it are taken.
    """
    cap = int(costs(rows, fill(rows, limits, price), price).max())
    tried = []
    for _ in range(CAPS):
        cuts = fill(rows, limits, price, cap)
        steps = -(-(len(cuts) - 1) // slots)
        tried.append((steps * int(costs(rows, cuts, price).max()), steps))
        cap -= cap // 16
    quickest = min(tried)[0]
    return slots * min(steps for time, steps in tried if time <= quickest + quickest // NEAR)


def whole_steps(batches: Batches, order: np.ndarray, slots: int) -> Batches:
    """Micro-batches in an order, with empty slots at the end where they fill no whole step."""
    return batches.taken(np.concatenate([order, np.full(-len(order) % slots, -1)]))
