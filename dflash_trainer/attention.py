"""The draft's attention: the blocks of a micro-batch, each over its own sample before its anchor and over itself.

Keys of context and block are one softmax, but no block's keys are ever laid against another block's queries, and no sample's
against another sample's.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from dflash_trainer.flex import attention, block_mask
from dflash_trainer.micro_batch import MicroBatch

SCORES_AT_ONCE = 1 << 26  # attention scores held at once in training


class Segment(NamedTuple):
    """One sample of a micro-batch: where its context tokens and its blocks lie in the flat tensors."""

    tokens: slice
    blocks: slice


class KeyValue(NamedTuple):
    """A layer's keys and values, both [..., kv heads, head_dim]."""

    key: torch.Tensor
    value: torch.Tensor


# Of a layer's queries [A, B, heads, hd], context, block and sliding window (None: it has none), to [A, B, heads, hd].
Attend = Callable[[torch.Tensor, KeyValue, KeyValue, int | None], torch.Tensor]


def attend_within(batch: MicroBatch) -> Attend:
    """Attention of a micro-batch's blocks: by tiles where it carries masks for that, else sample by sample."""
    if batch.draft_masks:
        masks = {window: block_mask(tiles) for window, tiles in batch.draft_masks.items()}
        return lambda query, context, block, window: tiled_attention(query, context, block, masks[window])
    found = segments(batch)
    return lambda query, context, block, window: segment_attention(query, context, block, batch.anchors, found, window)


def segments(batch: MicroBatch) -> list[Segment]:
    """Where each sample that has blocks keeps its tokens and its blocks."""
    tokens, blocks = ((0, *accumulate(sizes)) for sizes in (batch.lengths, batch.block_counts))
    found = (Segment(slice(*tokens[i : i + 2]), slice(*blocks[i : i + 2])) for i in range(len(batch.lengths)))
    return [segment for segment in found if segment.blocks.start < segment.blocks.stop]


def tiled_attention(query: torch.Tensor, context: KeyValue, block: KeyValue, mask: BlockMask) -> torch.Tensor:
    """All blocks in one kernel, over the keys of all samples and their own, as the mask lets them."""
    key, value = (torch.cat([one, own.flatten(0, 1)]).transpose(0, 1)[None] for one, own in zip(context, block, strict=True))
    mixed = attention(query.flatten(0, 1).transpose(0, 1)[None], key, value, mask)
    return mixed[0].transpose(0, 1).view(query.shape)


def block_attention(
    query: torch.Tensor, context: KeyValue, block: KeyValue, visible: torch.Tensor | None, window: int | None = None
) -> torch.Tensor:
    """Attention of A blocks over a shared context and each over itself.

    query: [A, B, heads, hd]; context: [S, kv, hd]; block: [A, B, kv, hd]; visible: int64 [A], how many context positions
    each block sees (None: all); its slots stand right behind them. Returns [A, B, heads, hd]. Without a window each slot
    sees all of its block; with one, the slot at p sees what stands at p−window+1 … p, in context and block alike, as
    published drafts have it. The scores of context and block are one softmax; no block's keys are ever laid against another
    block's queries.
    """
    blocks, size, heads, hd = query.shape
    tokens, kv = context.key.shape[:2]
    shape = kv, blocks, size, heads // kv
    grouped = query.view(blocks, size, kv, heads // kv, hd).permute(2, 0, 1, 3, 4).reshape(kv, blocks, -1, hd)
    grouped = grouped * hd**-0.5
    key, value = (part.permute(2, 0, 1, 3) for part in block)  # [kv, A, B, hd]
    scores = (grouped.flatten(1, 2) @ context.key.permute(1, 2, 0)).view(*shape, tokens)
    own = (grouped @ key.transpose(2, 3)).view(*shape, size)
    at, slot = (torch.arange(count, device=query.device) for count in (tokens, size))
    if visible is not None:
        visible = visible[:, None, None, None]
        scores = scores.masked_fill(at >= visible, -torch.inf)
    if window is not None:
        back = slot[:, None, None] - slot
        scores = scores.masked_fill(
            at <= (tokens if visible is None else visible) + slot[:, None, None] - window, -torch.inf
        )
        own = own.masked_fill((back < 0) | (back >= window), -torch.inf)
    precision = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.cat([scores, own], dim=-1).softmax(dim=-1, dtype=precision).to(value.dtype).flatten(2, 3)
    over_context, over_block = weights.split([tokens, size], dim=-1)
    mixed = over_context.flatten(1, 2) @ context.value.transpose(0, 1)
    mixed = mixed.view(kv, blocks, -1, hd) + over_block @ value
    return mixed.view(kv, blocks, size, heads // kv, hd).permute(1, 2, 0, 3, 4).reshape(blocks, size, heads, hd)


def segment_attention(
    query: torch.Tensor,
    context: KeyValue,
    block: KeyValue,
    anchors: torch.Tensor,
    segments: list[Segment],
    window: int | None = None,
) -> torch.Tensor:
    """`block_attention` sample by sample, in runs of blocks that compute little more than they see.

    The blocks of a sample ascend. Where its scores are too many to hold at once, they are recomputed in the backward pass.
    """
    parts, rows, positions = [], query.shape[1] * query.shape[2], anchors.tolist()
    for tokens, blocks in segments:
        at = positions[blocks]
        keys = at[-1] if window is None else min(at[-1], 2 * window)
        most = max(1, SCORES_AT_ONCE // max(1, rows * keys))
        for first, last in runs(at, most, window):
            part = slice(blocks.start + first, blocks.start + last)
            begin = 0 if window is None else max(0, at[first] - window + 1)
            seen = slice(tokens.start + begin, tokens.start + at[last - 1])
            keys_seen, own = (KeyValue(pair.key[span], pair.value[span]) for pair, span in ((context, seen), (block, part)))
            arguments = query[part], keys_seen, own, anchors[part] - begin, window
            if len(at) > most:
                parts.append(checkpoint(block_attention, *arguments, use_reentrant=False))
            else:
                parts.append(block_attention(*arguments))
    return torch.cat(parts)


def runs(anchors: list[int], most: int, window: int | None) -> Iterator[tuple[int, int]]:
    """Cut ascending anchors into runs [first, last) of at most `most`, in which all lie less than a window apart."""
    first = 0
    for last in range(1, len(anchors) + 1):
        far = last < len(anchors) and window is not None and anchors[last] - anchors[first] >= window
        if last == len(anchors) or last - first == most or far:
            yield first, last
            first = last
