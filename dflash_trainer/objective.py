"""The DFlash objective of one micro-batch: weighted cross-entropy of each block's slots 1 … B−1.

DFlash, arXiv 2602.06036: slot 0 of a block holds the real token at its anchor, the others the mask token. In the place of
the real tokens, or beside them, the target's own distributions may be learnt (`--loss kd`, `mix`): the forward divergence
KL(target ‖ draft) of each slot, with the same weights (distillation, arXiv 1503.02531).
"""

from itertools import accumulate
from operator import mul
from typing import NamedTuple

import torch
from torch.nn import functional as F

from dflash_trainer.attention import attend_within
from dflash_trainer.draft import DraftModel
from dflash_trainer.loss import Teacher, head_loss
from dflash_trainer.micro_batch import MicroBatch
from dflash_trainer.target import FrozenTarget

SHARES = {"ce": 0.0, "kd": 1.0, "mix": 0.5}  # of the divergence in the loss; the rest is cross-entropy


class BlockLoss(NamedTuple):
    """Σ weight · loss (takes gradients), Σ weight · cross-entropy, Σ weight; hits and counts of each slot [B−1]."""

    total: torch.Tensor
    cross_entropy: torch.Tensor
    weight: torch.Tensor
    hits: torch.Tensor
    counts: torch.Tensor


def block_loss(draft: DraftModel, target: FrozenTarget, batch: MicroBatch, share: float = 0.0) -> BlockLoss:
    """The summed loss of a micro-batch with at least one block; the whole step's normalisation is left to the caller.

    `share` is the divergence's, see `SHARES`; more than 0 needs a target that is whole.
    """
    size = draft.config.block_size
    features = target.features(batch)
    x = block_embeddings(target, batch.block_tokens, draft.config.mask_token_id, size)
    hidden = draft(features, batch.positions, x, batch.anchors, attend_within(batch))
    weights = batch.weights.to(draft.norm.weight.dtype)
    counted = weights > 0
    rows = hidden[:, 1:][counted]  # a clipped slot stays in attention but needs no logits
    teacher = Teacher(target.states()[predictors(batch)[counted]], target.cap) if share else None
    found = head_loss(rows, target.head, batch.labels[counted], weights[counted], teacher, share)
    slots = counted.nonzero()[:, 1]
    return BlockLoss(
        total=found.total,
        cross_entropy=found.cross_entropy,
        weight=weights.sum(),
        hits=torch.bincount(slots[found.hits], minlength=size - 1),
        counts=torch.bincount(slots, minlength=size - 1),
    )


def predictors(batch: MicroBatch) -> torch.Tensor:
    """Which real token's final state predicts slot k of each block, the one before it: int64 [A, B−1]."""
    starts = (0, *accumulate(batch.lengths))[: len(batch.lengths)]
    first = torch.tensor(starts).repeat_interleave(torch.tensor(batch.block_counts))
    first = F.pad(first, (0, len(batch.anchors) - len(first))).to(batch.anchors.device)
    slots = torch.arange(batch.labels.shape[1], device=first.device)
    return (first + batch.anchors)[:, None] + slots


def expected_acceptance(slot_accuracy: list[float]) -> float:
    """The acceptance length that these accuracies would give if slots were right independently: 1 + Σ of their products.

    The k-th product is the chance that the first k drafted tokens are all accepted; the 1 is the target's own token.
    """
    return 1 + sum(accumulate(slot_accuracy, mul))


def block_embeddings(target: FrozenTarget, tokens: torch.Tensor, mask_token: int, size: int) -> torch.Tensor:
    """Input embeddings [A, B, H] of blocks that start with the real tokens int64 [A]."""
    masks = target.embed(tokens.new_tensor([mask_token])).expand(len(tokens), size - 1, -1)
    return torch.cat([target.embed(tokens)[:, None], masks], dim=1)
