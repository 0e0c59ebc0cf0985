"""Micro-batches: one slot of one step, from samples and their anchors to tensors that are ready to compute."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import numpy as np
import torch

from dflash_trainer.blocks import make_blocks
from dflash_trainer.flex import Tiles


class Sample(NamedTuple):
    """A sample as a slot holds it: ids [length], loss spans [start, end, …] and the positions of its anchors, ascending."""

    ids: np.ndarray
    spans: np.ndarray
    anchors: np.ndarray


@dataclass(frozen=True)
class MicroBatch:
    """One slot of one step: R rows of W tokens for the target, T real tokens and A blocks for the draft.

    input_ids, position_ids: int64 [R, W]; a packed row has R = 1 and positions that start anew with each sample.
    real: int64 [T], where the real tokens stand in the flattened rows; positions: int64 [T], within their samples.
    anchors, block_tokens: int64 [A]; labels: int64 [A, B−1]; weights: float64 [A, B−1] (see `blocks`).
    lengths, block_counts and copies (see `copies`): a number a sample, in the order of the real tokens.
    features: bfloat16 [T, K·H], the target's tapped outputs where they are known already; no rows where they are not.
    target_masks, draft_masks: for attention by tiles, what each row sees under each sliding window (see `shapes`).
    Rows of padding may stand behind the T real tokens and the A blocks; those have weight 0.
    """

    epoch: int
    step: int
    slot: int
    samples: tuple[int, ...]
    packed: bool
    lengths: tuple[int, ...]
    block_counts: tuple[int, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    real: torch.Tensor
    positions: torch.Tensor
    anchors: torch.Tensor
    block_tokens: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    copies: tuple[int, ...] = ()
    features: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.bfloat16))
    target_masks: dict[int | None, Tiles] = field(default_factory=dict)
    draft_masks: dict[int | None, Tiles] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return sum(self.lengths)

    @property
    def blocks(self) -> int:
        """Blocks that are no padding."""
        return sum(self.block_counts)

    @property
    def stretches(self) -> list[int] | None:
        """The lengths that a packed row falls into, the padding at its end included; None where each row is one sample."""
        if not self.packed:
            return None
        padding = self.input_ids.numel() - self.tokens
        return [*self.lengths, padding] if padding else list(self.lengths)

    def tensors(self) -> list[torch.Tensor]:
        """All tensors, in a fixed order."""
        masks = (tiles for each in (self.target_masks, self.draft_masks) for tiles in each.values())
        return [*(getattr(self, name) for name in PARTS), *(tensor for tiles in masks for tensor in tiles)]

    def with_tensors(self, tensors: Iterable[torch.Tensor]) -> "MicroBatch":
        """The same micro-batch with other tensors for its own, in the order of `tensors`."""
        following = iter(tensors)
        parts = {name: next(following) for name in PARTS}
        masks = [
            {window: Tiles(*(next(following) for _ in tiles)) for window, tiles in each.items()}
            for each in (self.target_masks, self.draft_masks)
        ]
        return replace(self, **parts, target_masks=masks[0], draft_masks=masks[1])

    def to(self, device: torch.device) -> "MicroBatch":
        """The same micro-batch with its tensors on a device."""
        return self.with_tensors(tensor.to(device) for tensor in self.tensors())


PARTS = [part.name for part in fields(MicroBatch) if part.type is torch.Tensor]


def assemble(
    samples: list[Sample],
    *,
    packed: bool,
    width: int,
    block_size: int,
    epoch: int = 0,
    step: int = 0,
    slot: int = 0,
    numbers: tuple[int, ...] = (),
    copies: tuple[int, ...] = (),
) -> MicroBatch:
    """Lay samples out in rows of `width` tokens, one a row or, packed, all in one row end to end, and cut their blocks.

    `width` may be larger than the samples need: what is left over is padding on the right. `numbers` are the samples' in
    their store, `copies` their copies'.
    """
    ids, spans, anchors = ([sample[part] for sample in samples] for part in range(3))
    blocks = make_blocks(ids, spans, anchors, block_size)
    lengths = tuple(map(len, ids))
    positions = np.concatenate([*map(np.arange, lengths), np.empty(0, np.int64)])
    flat = np.concatenate([*ids, np.empty(0, np.uint32)]).astype(np.int64)
    if packed:
        real, shape = np.arange(len(flat)), (min(1, len(ids)), width)
    else:
        starts = np.repeat(np.arange(len(ids)) * width, lengths)
        real, shape = starts + positions, (len(ids), width)
    input_ids, position_ids = np.zeros((2, shape[0] * shape[1]), np.int64)
    input_ids[real], position_ids[real] = flat, positions
    return MicroBatch(
        epoch=epoch,
        step=step,
        slot=slot,
        samples=numbers,
        packed=packed,
        lengths=lengths,
        block_counts=blocks.counts,
        input_ids=torch.from_numpy(input_ids).view(shape),
        position_ids=torch.from_numpy(position_ids).view(shape),
        real=torch.from_numpy(real),
        positions=torch.from_numpy(positions),
        anchors=torch.from_numpy(blocks.anchors),
        block_tokens=torch.from_numpy(blocks.tokens),
        labels=torch.from_numpy(blocks.labels),
        weights=torch.from_numpy(blocks.weights),
        copies=copies,
    )
