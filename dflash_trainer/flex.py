"""Attention on GPUs: each query sees one or two runs of keys, and tiles of scores that nobody sees are never computed.

Both kinds of attention in a step are of that form, whatever the layout: a token of the target sees its own sample up to
itself; a row of a draft's block sees its sample before the anchor, and its block. Which tiles of 128 × 128 scores are seen
in part or whole follows from the runs, so it is worked out on the CPU, beside the step before, and not by evaluating a mask
on the GPU. Nothing depends on how many samples or anchors there are, so one compiled kernel serves a whole run.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

TILE = 128


class Runs(NamedTuple):
    """Two runs of keys for each of Q query rows, half-open, int32 [Q] each; an empty one ends where it begins."""

    first: np.ndarray
    first_end: np.ndarray
    second: np.ndarray
    second_end: np.ndarray


class Tiles(NamedTuple):
    """Which tiles of scores are computed: with a mask (they are seen in part), and without (seen by each row whole).

    runs: int32 [4, Q]; counts: int32 [Q/128], how many key tiles; tiles: int32 [Q/128, K/128], those first, then the others.
    """

    runs: torch.Tensor
    masked_counts: torch.Tensor
    masked_tiles: torch.Tensor
    whole_counts: torch.Tensor
    whole_tiles: torch.Tensor


def round_up(number: int) -> int:
    """To whole tiles."""
    return -(-number // TILE) * TILE


def target_runs(stretches: list[int], window: int | None) -> Runs:
    """What each token of a packed row sees: its stretch up to itself, or the last `window` tokens of that."""
    lengths = np.array(stretches, np.int64)
    token = np.arange(lengths.sum())
    start = np.repeat(lengths.cumsum() - lengths, lengths)
    if window is not None:
        start = np.maximum(start, token - window + 1)
    nothing = np.zeros(len(token), np.int64)
    return as_runs(start, token + 1, nothing, nothing)


def draft_runs(starts: np.ndarray, anchors: np.ndarray, size: int, rows: int, context: int, window: int | None) -> Runs:
    """What each row of the blocks sees: its sample before the anchor, and its block.

    starts, anchors: int64 [A], where each block's sample begins among the context's rows, and its anchor within the sample;
    size: rows of a block; rows: Q, at least A · size, those behind the last block see themselves. The keys are `context`
    rows and then the Q rows themselves. With a window a row sees no more than that many positions, none behind itself.
    """
    row = np.arange(rows)
    block, offset = row // size, row % size
    start, anchor = (np.zeros(max(-(-rows // size), 1), np.int64) for _ in range(2))
    start[: len(starts)], anchor[: len(anchors)] = starts, anchors
    start, end = start[block], (start + anchor)[block]
    own, own_end = context + row - offset, np.minimum(context + row - offset + size, context + rows)
    if window is not None:
        start = np.minimum(np.maximum(start, end + offset - window + 1), end)
        own, own_end = own + np.maximum(offset - window + 1, 0), context + row + 1
    return as_runs(start, end, own, own_end)


def as_runs(*parts: np.ndarray) -> Runs:
    """int32, as kernels want it."""
    return Runs(*(part.astype(np.int32) for part in parts))


def find_tiles(runs: Runs, keys: int) -> Tiles:
    """The tiles of Q × `keys` scores that runs touch; both are whole numbers of tiles."""
    columns = keys // TILE
    low, high, seen = np.arange(columns) * TILE, (np.arange(columns) + 1) * TILE, 0
    whole = np.zeros((len(runs.first) // TILE, columns), bool)
    for begin, end in (runs[:2], runs[2:]):
        seen = seen + touched(begin, end, columns)
        by_tile = begin.reshape(-1, TILE).max(1)[:, None], end.reshape(-1, TILE).min(1)[:, None]
        whole |= (by_tile[0] <= low) & (high <= by_tile[1])
    parts = (order_tiles(mask) for mask in ((seen > 0) & ~whole, whole))
    return Tiles(torch.from_numpy(np.stack(runs)), *(torch.from_numpy(array) for part in parts for array in part))


def touched(begin: np.ndarray, end: np.ndarray, columns: int) -> np.ndarray:
    """How many rows' runs touch each tile, [Q/128, columns]."""
    rows = np.flatnonzero(end > begin)
    edges = np.zeros((len(begin) // TILE, columns + 1), np.int64)
    np.add.at(edges, (rows // TILE, begin[rows] // TILE), 1)
    np.add.at(edges, (rows // TILE, -(-end[rows] // TILE)), -1)
    return edges.cumsum(1)[:, :-1]


def order_tiles(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many tiles of each row a mask holds, and the numbers of all with those first."""
    return mask.sum(1).astype(np.int32), np.argsort(~mask, axis=1, kind="stable").astype(np.int32)


def block_mask(tiles: Tiles) -> BlockMask:
    """The same as torch's kernels want it."""
    first, first_end, second, second_end = tiles.runs

    def sees(batch, head, query, key):
        in_first = (first[query] <= key) & (key < first_end[query])
        return in_first | ((second[query] <= key) & (key < second_end[query]))

    parts = (part[None, None] for part in tiles[1:])
    lengths = len(tiles.masked_counts) * TILE, tiles.masked_tiles.shape[1] * TILE
    return BlockMask.from_kv_blocks(*parts, BLOCK_SIZE=TILE, mask_mod=sees, seq_lengths=lengths)


@cache
def kernel():
    """Attention, compiled once a process for each shape."""
    return torch.compile(flex_attention, dynamic=False)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scale: float | None = None):
    """Attention of [1, heads, Q, hd] over [1, kv, K, hd]: the fused kernel on GPUs, elsewhere torch's plain formulas."""
    run = kernel() if query.device.type == "cuda" else flex_attention
    return run(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)
