"""Training blocks: what each anchor's block sees, what it has to predict, and what each prediction weighs."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Blocks:
    """The A blocks of a micro-batch, sample by sample and ascending within a sample.

    anchors: int64 [A], positions within the sample; tokens: int64 [A], the real token at each anchor;
    labels: int64 [A, B−1], the tokens at a+1 … a+B−1 (0 where clipped); weights: float64 [A, B−1];
    counts: how many blocks each sample has.
    """

    anchors: np.ndarray
    tokens: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    counts: tuple[int, ...]


def decay_gamma(block_size: int) -> float:
    """γ of the loss weights: DFlash's 7, 5 and 4 for blocks of 16, 10 and 8 (arXiv 2602.06036), linear between them."""
    return float(np.interp(block_size, [8, 10, 16], [4, 5, 7]))


def slot_weights(block_size: int) -> np.ndarray:
    """exp(−(k−1)/γ) for slots k = 1 … B−1, float64 [B−1]. DFlash, arXiv 2602.06036."""
    return np.exp(-np.arange(block_size - 1) / decay_gamma(block_size))


def make_blocks(ids: list[np.ndarray], spans: list[np.ndarray], anchors: list[np.ndarray], block_size: int) -> Blocks:
    """Blocks of several samples: their ids, loss spans [start, end, …] and anchors.

    A block's weights are 0 from its first slot on that lies past the sample or carries no loss.
    """
    slots = np.arange(1, block_size)
    tokens, labels, weights = [], [], []
    for sample, marks, starts in zip(ids, spans, anchors, strict=True):
        at = starts[:, None] + slots
        inside = np.minimum(at, len(sample) - 1)
        counted = (at < len(sample)) & loss_mask(marks, len(sample))[inside]
        counted = np.logical_and.accumulate(counted, axis=1)
        tokens.append(sample[starts].astype(np.int64))
        labels.append(np.where(counted, sample[inside], 0).astype(np.int64))
        weights.append(counted * slot_weights(block_size))
    return Blocks(
        anchors=np.concatenate([*anchors, np.empty(0, np.int64)]),
        tokens=np.concatenate([*tokens, np.empty(0, np.int64)]),
        labels=np.concatenate([*labels, np.empty((0, block_size - 1), np.int64)]),
        weights=np.concatenate([*weights, np.empty((0, block_size - 1))]),
        counts=tuple(len(starts) for starts in anchors),
    )


def loss_mask(spans: np.ndarray, length: int) -> np.ndarray:
    """Which positions carry loss, bool [length]."""
    mask = np.zeros(length, bool)
    for start, end in spans.reshape(-1, 2):
        mask[start:end] = True
    return mask
