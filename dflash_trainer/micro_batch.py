"""Micro-batches: one slot of one step, from samples and their anchors to tensors that are ready to compute."""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch

from dflash_trainer.blocks import make_blocks


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
    lengths and block_counts: a number a sample, in the order of the real tokens.
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

    @property
    def stretches(self) -> list[int] | None:
        """The lengths that a packed row falls into, the padding at its end included; None where each row is one sample."""
        if not self.packed:
            return None
        padding = self.input_ids.numel() - sum(self.lengths)
        return [*self.lengths, padding] if padding else list(self.lengths)

    def to(self, device: torch.device) -> "MicroBatch":
        """The same micro-batch with its tensors on a device."""
        if device.type == "cpu":
            return self
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.type is torch.Tensor}
        return replace(self, **{name: value.pin_memory().to(device, non_blocking=True) for name, value in tensors.items()})


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
) -> MicroBatch:
    """Lay samples out in rows of `width` tokens, one a row or, packed, all in one row end to end, and cut their blocks.

    `width` may be larger than the samples need: what is left over is padding on the right. `numbers` are the samples' in
    their store.
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
    )
