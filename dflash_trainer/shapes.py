"""The few shapes that a run's micro-batches are padded to where kernels are compiled for shapes.

Kernels compiled for a shape are slow to make and fast to use, so a run has one shape of a packed row and of its context,
and few numbers of blocks: whatever is padded is masked, and changes neither loss nor gradient.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional as F

from dflash_prep.manifest import Plan
from dflash_trainer.flex import TILE, Tiles, draft_runs, find_tiles, round_up, target_runs
from dflash_trainer.micro_batch import MicroBatch

Windows = frozenset[int | None]  # sliding windows of layers, None for layers without one
SIZES = 8  # numbers of blocks; each is compiled for once, while one for all would pad a quarter of the blocks


@dataclass(frozen=True)
class Shapes:
    """What a run's micro-batches are padded to.

    row: tokens of a packed row; context: rows of context that the draft is given (None: as many as there are); blocks:
    numbers of blocks, ascending (empty: as many as there are). target_windows, draft_windows: those of the layers whose
    masks a micro-batch carries.
    """

    row: int
    context: int | None = None
    blocks: tuple[int, ...] = ()
    target_windows: Windows = frozenset()
    draft_windows: Windows = frozenset()


def shapes_for(plan: Plan, device: torch.device, compiled: bool, windows: tuple[Windows, Windows]) -> Shapes | None:
    """What a run pads to: on GPUs, whose attention goes by tiles, and where layers are compiled; None: nothing.

    `windows` are those of the target's layers and of the draft's.
    """
    if device.type == "cuda":
        return tiled_shapes(plan, *windows)
    return Shapes(plan.largest("padded_tokens")) if compiled and plan["strategy"] == "packed" else None


def tiled_shapes(plan: Plan, target_windows: Windows, draft_windows: Windows) -> Shapes:
    """For attention by tiles: whole tiles throughout, and masks."""
    packed = plan["strategy"] == "packed"
    row = round_up(plan.largest("padded_tokens"))
    whole = blocks_to_tiles(plan["block_size"])
    most = -(-max(1, plan.largest("anchors")) // whole)
    blocks = tuple(whole * -(-most * part // SIZES) for part in range(1, SIZES + 1))
    context = row if packed else round_up(plan.largest("tokens"))
    return Shapes(row, context, blocks, target_windows if packed else frozenset(), draft_windows)


def blocks_to_tiles(size: int) -> int:
    """How many blocks it takes to fill whole tiles."""
    return TILE // math.gcd(TILE, size)


def own_shapes(batch: MicroBatch, draft_windows: Windows) -> Shapes:
    """Whole tiles for one micro-batch of padded rows by itself, and no more."""
    whole = blocks_to_tiles(batch.labels.shape[1] + 1)
    blocks = whole * max(1, -(-len(batch.anchors) // whole))
    return Shapes(batch.input_ids.shape[1], round_up(len(batch.real)), (blocks,), frozenset(), draft_windows)


def fit(batch: MicroBatch, shapes: Shapes) -> MicroBatch:
    """A micro-batch padded to a run's shapes, with the masks that its kernels need; its row has its width already."""
    context, blocks = shapes.context or len(batch.real), len(batch.anchors)
    rows = next((count for count in shapes.blocks if count >= blocks), blocks)
    real, positions = (pad(part, context) for part in (batch.real, batch.positions))
    anchors, tokens, labels, weights = (
        pad(part, rows) for part in (batch.anchors, batch.block_tokens, batch.labels, batch.weights)
    )
    target_masks, draft_masks = {}, {}
    if batch.lengths:
        for window in shapes.target_windows:
            target_masks[window] = find_tiles(target_runs(batch.stretches, window), batch.input_ids.shape[1])
        for window in shapes.draft_windows:
            draft_masks[window] = draft_tiles(batch, rows, context, window)
    return replace(
        batch,
        real=real,
        positions=positions,
        anchors=anchors,
        block_tokens=tokens,
        labels=labels,
        weights=weights,
        target_masks=target_masks,
        draft_masks=draft_masks,
    )


def pad(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Zeros behind a tensor's rows."""
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, rows - len(tensor)))


def draft_tiles(batch: MicroBatch, blocks: int, context: int, window: int | None) -> Tiles:
    """What the rows of a micro-batch's blocks see of `context` rows of context, and of themselves."""
    size = batch.labels.shape[1] + 1
    lengths = np.array(batch.lengths, np.int64)
    starts = np.repeat(lengths.cumsum() - lengths, batch.block_counts)
    runs = draft_runs(starts, batch.anchors.numpy(), size, blocks * size, context, window)
    return find_tiles(runs, context + blocks * size)
