"""The DFlash objective of one micro-batch: weighted cross-entropy of each block's slots 1 … B−1.

DFlash, arXiv 2602.06036: slot 0 of a block holds the real token at its anchor, the others the mask token.
"""

from itertools import accumulate
from operator import mul
from typing import NamedTuple

import torch

from dflash_trainer.attention import attend_within
from dflash_trainer.draft import DraftModel
from dflash_trainer.loss import head_cross_entropy
from dflash_trainer.micro_batch import MicroBatch
from dflash_trainer.target import FrozenTarget


class BlockLoss(NamedTuple):
    """Σ weight · cross-entropy (a scalar that takes gradients), Σ weight, and hits and counts a slot, both [B−1]."""

    total: torch.Tensor
    weight: torch.Tensor
    hits: torch.Tensor
    counts: torch.Tensor


def block_loss(draft: DraftModel, target: FrozenTarget, batch: MicroBatch) -> BlockLoss:
    """The summed loss of a micro-batch with at least one block; the whole step's normalisation is left to the caller."""
    size = draft.config.block_size
    features = target.features(batch)
    x = block_embeddings(target, batch.block_tokens, draft.config.mask_token_id, size)
    hidden = draft(features, batch.positions, x, batch.anchors, attend_within(batch))
    weights = batch.weights.to(draft.norm.weight.dtype)
    counted = weights > 0
    rows = hidden[:, 1:][counted]  # a clipped slot stays in attention but needs no logits
    total, hits = head_cross_entropy(rows, target.head, batch.labels[counted], weights[counted])
    slots = counted.nonzero()[:, 1]
    return BlockLoss(
        total=total,
        weight=weights.sum(),
        hits=torch.bincount(slots[hits], minlength=size - 1),
        counts=torch.bincount(slots, minlength=size - 1),
    )


def expected_acceptance(slot_accuracy: list[float]) -> float:
    """The acceptance length that these accuracies would give if slots were right independently: 1 + Σ of their products.

    The k-th product is the chance that the first k drafted tokens are all accepted; the 1 is the target's own token.
    """
    return 1 + sum(accumulate(slot_accuracy, mul))


def block_embeddings(target: FrozenTarget, tokens: torch.Tensor, mask_token: int, size: int) -> torch.Tensor:
    """Input embeddings [A, B, H] of blocks that start with the real tokens int64 [A]."""
    masks = target.embed(tokens.new_tensor([mask_token])).expand(len(tokens), size - 1, -1)
    return torch.cat([target.embed(tokens)[:, None], masks], dim=1)
