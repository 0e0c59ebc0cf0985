"""Anchors: the positions at which a training block starts.

A position a is eligible if a and a+1 both carry loss: the block's first slot holds the real token at a and its second
predicts a+1. How many a sample has follows from its loss spans alone, so that plans count them off-line.
"""

import numpy as np

from dflash_prep.rng import stream

ANCHOR_STREAM = 2  # the planner's permutations are stream 1
PPM = 1_000_000


def density_ppm(density: float) -> int:
    """The anchor density in parts per million: counts are integer arithmetic, equal on any machine."""
    return round(density * PPM)


def eligible_count(spans: np.ndarray) -> int:
    """How many positions are eligible, for half-open spans [start, end, start, end, …]."""
    lengths = spans[1::2].astype(np.int64) - spans[0::2]
    return int(np.maximum(lengths - 1, 0).sum())


def eligible_positions(spans: np.ndarray) -> np.ndarray:
    """The eligible positions in ascending order, int64."""
    pairs = [np.arange(start, end - 1) for start, end in spans.reshape(-1, 2).astype(np.int64)]
    return np.concatenate(pairs) if pairs else np.empty(0, np.int64)


def anchor_count(eligible: np.ndarray, density: int, max_anchors: int) -> np.ndarray:
    """min(max_anchors, ⌈eligible · density⌉) a sample; `density` in parts per million. DFlash, arXiv 2602.06036."""
    return np.minimum(-(-eligible.astype(np.int64) * density // PPM), max_anchors)


def draw_anchors(spans: np.ndarray, count: int, seed: int, epoch: int, sample: int, copy: int = 0) -> np.ndarray:
    """Draw `count` anchors of a sample without replacement, ascending, int64.

    The draw depends on (seed, epoch, sample, copy) alone: neighbours, rank and resume do not change it.
    """
    positions = eligible_positions(spans)
    keys = stream((ANCHOR_STREAM, seed, epoch, sample, copy), len(positions))
    return np.sort(positions[np.argsort(keys, kind="stable")[:count]])
