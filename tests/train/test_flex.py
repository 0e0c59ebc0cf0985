"""Attention by runs of keys: tiles against a dense mask, output and gradients against attention sample by sample."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trainer.attention import KeyValue, Segment, segment_attention
from dflash_trainer.flex import TILE, attention, block_mask, draft_runs, find_tiles, round_up, target_runs


def dense(runs, keys: int) -> np.ndarray:
    """The mask that runs mean, bool [Q, keys]."""
    key = np.arange(keys)
    first, first_end, second, second_end = (part[:, None] for part in runs)
    return ((first <= key) & (key < first_end)) | ((second <= key) & (key < second_end))


def check_tiles(runs, keys: int) -> None:
    """Tiles against the dense mask, tile by tile."""
    mask = dense(runs, keys).reshape(-1, TILE, keys // TILE, TILE)
    any_seen, all_seen = mask.any((1, 3)), mask.all((1, 3))
    tiles = find_tiles(runs, keys)
    for row in range(len(any_seen)):
        masked = set(tiles.masked_tiles[row, : tiles.masked_counts[row]].tolist())
        whole = set(tiles.whole_tiles[row, : tiles.whole_counts[row]].tolist())
        assert not masked & whole
        assert masked | whole == set(np.flatnonzero(any_seen[row]))
        assert whole <= set(np.flatnonzero(all_seen[row]))
        assert sorted(tiles.masked_tiles[row].tolist()) == list(range(keys // TILE))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.none() | st.integers(1, 400))
def test_target_tiles(lengths, window):
    padding = round_up(sum(lengths)) - sum(lengths)
    stretches = [*lengths, *([padding] if padding else [])]
    runs, keys = target_runs(stretches, window), round_up(sum(lengths))
    check_tiles(runs, keys)
    sample = np.repeat(np.arange(len(stretches)), stretches)
    near = np.arange(keys)[:, None] - np.arange(keys)
    expected = (sample[:, None] == sample) & (near >= 0) & ((near < window) if window else True)
    assert np.array_equal(dense(runs, keys), expected)


@st.composite
def micro_batches(draw):
    """Samples' lengths, their anchors, the block size, and how many blocks and context rows of padding there are."""
    lengths = draw(st.lists(st.integers(2, 250), min_size=1, max_size=6))
    anchors = [sorted(draw(st.sets(st.integers(0, length - 1), max_size=12))) for length in lengths]
    return lengths, anchors, draw(st.sampled_from([2, 4, 10, 16])), draw(st.integers(0, 200)), draw(st.integers(0, 300))


@settings(max_examples=60, deadline=None)
@given(micro_batches(), st.none() | st.integers(1, 60))
def test_draft_tiles(case, window):
    lengths, anchors, size, more_rows, more_context = case
    runs, keys, rows, context = runs_of(lengths, anchors, size, more_rows, more_context, window)
    check_tiles(runs, keys)
    mask = dense(runs, keys)
    samples = [number for number, each in enumerate(anchors) for _ in each]
    positions = [anchor for each in anchors for anchor in each]
    starts = np.cumsum([0, *lengths])
    for row in np.random.default_rng(0).integers(0, rows, 40):
        block, offset = divmod(row, size)
        for key in range(keys):
            if block >= len(samples):  # padding: it sees its own block alone
                visible = key >= context and (key - context) // size == block and (window is None or key - context <= row)
                if window is not None and visible:
                    visible = row - (key - context) < window
            elif key < context:
                where = key - starts[samples[block]]
                visible = 0 <= where < positions[block]
                if window is not None:
                    visible = visible and positions[block] + offset - where < window
            else:
                near = row - (key - context)
                visible = (key - context) // size == block and (window is None or 0 <= near < window)
            assert mask[row, key] == visible, (row, key)


def runs_of(lengths, anchors, size, more_rows, more_context, window):
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    flat = np.array([anchor for each in anchors for anchor in each], np.int64)
    begin = np.repeat(starts, [len(each) for each in anchors])
    rows, context = round_up(len(flat) * size + more_rows + 1), round_up(sum(lengths) + more_context)
    return draft_runs(begin, flat, size, rows, context, window), context + rows, rows, context


@pytest.fixture
def differentiable(monkeypatch):
    """torch refuses gradients of this kind of attention on CPUs, whose plain formulas have them all the same."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 3, 20])
@pytest.mark.parametrize("seed", range(4))
def test_draft_attention_is_that_of_segments(differentiable, seed, window):
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    size, heads, kv, hd = [4, 16][seed % 2], 4, 2, 8
    lengths = random.integers(2, 120, 4).tolist()
    counts = np.minimum(lengths, [3, 0, 5, 2])
    anchors = [sorted(random.choice(length, count, replace=False)) for length, count in zip(lengths, counts, strict=True)]
    runs, keys, rows, context = runs_of(lengths, anchors, size, 9, 17, window)
    flat = torch.tensor([int(anchor) for each in anchors for anchor in each])
    query, own_key, own_value = (
        torch.randn(len(flat), size, n, hd, dtype=torch.float64, requires_grad=True) for n in (heads, kv, kv)
    )
    key, value = (torch.randn(sum(lengths), kv, hd, dtype=torch.float64, requires_grad=True) for _ in range(2))
    inputs = query, key, value, own_key, own_value
    segments, token, block = [], 0, 0
    for length, each in zip(lengths, anchors, strict=True):
        if each:
            segments.append(Segment(slice(token, token + length), slice(block, block + len(each))))
        token, block = token + length, block + len(each)
    expected = segment_attention(query, KeyValue(key, value), KeyValue(own_key, own_value), flat, segments, window)

    def laid(context_part, block_part):
        """Padded with what must never be seen."""
        noise = lambda n: torch.full((n, *block_part.shape[2:]), 7.0, dtype=torch.float64)  # noqa: E731
        parts = [] if context_part is None else [context_part, noise(context - len(context_part))]
        flat_block = block_part.flatten(0, 1)
        return torch.cat([*parts, flat_block, noise(rows - len(flat_block))]).transpose(0, 1)[None]

    mask = block_mask(find_tiles(runs, keys))
    found = attention(laid(None, query), laid(key, own_key), laid(value, own_value), mask)
    found = found[0].transpose(0, 1)[: len(flat) * size].view_as(expected)
    assert torch.allclose(found, expected, atol=1e-12)
    slope = torch.randn_like(expected)
    gradients = (torch.autograd.grad(output, inputs, slope) for output in (expected, found))
    assert all(torch.allclose(*pair, atol=1e-11) for pair in zip(*gradients, strict=True))
