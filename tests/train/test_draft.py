"""The draft's parts against other people's, and its configuration."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from dflash_prep.errors import UserError
from dflash_trainer.attention import KeyValue, Segment, block_attention, segment_attention
from dflash_trainer.config import DraftConfig, derive_config, read_overrides, tap_layers
from dflash_trainer.decode import newest
from dflash_trainer.draft import DraftModel, rotary, rotate


def test_rotary_equals_transformers():
    config = Qwen3Config(
        head_dim=16, rope_theta=100_000.0, rope_parameters={"rope_type": "default", "rope_theta": 100_000.0}
    )
    positions = torch.tensor([0, 1, 5, 4000, 8191])
    x = torch.randn(1, 3, 5, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = Qwen3RotaryEmbedding(config)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    mine = rotate(x[0].transpose(0, 1), *rotary(positions, 16, 100_000.0)).transpose(0, 1)
    torch.testing.assert_close(mine, expected[0], rtol=0, atol=1e-6)


def test_rotary_frequencies_stay_float32_under_autocast():
    positions = torch.tensor([8191])
    with torch.autocast("cpu", torch.bfloat16):
        cos, _ = rotary(positions, 16, 10_000.0)
    assert cos.dtype == torch.float32
    assert torch.equal(cos, rotary(positions, 16, 10_000.0)[0])


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 7, 100])
def test_attention_equals_masked_dense_attention(window):
    """Block by block, whatever a layer's window; a sample's blocks together, in runs, are the same."""
    generator = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    blocks, size, heads, kv, hd, tokens = 5, 3, 4, 2, 8, 11
    query, context = make(blocks, size, heads, hd), KeyValue(make(tokens, kv, hd), make(tokens, kv, hd))
    block = KeyValue(make(blocks, size, kv, hd), make(blocks, size, kv, hd))
    visible = torch.tensor([0, 3, 3, 10, 11])
    mine = block_attention(query, context, block, visible, window)
    keys, values = (torch.cat([c, b.flatten(0, 1)]) for c, b in zip(context, block, strict=True))
    mask = torch.zeros(blocks * size, tokens + blocks * size, dtype=torch.bool)
    for b, start in enumerate(visible.tolist()):
        for slot in range(size):
            seen = [*((key, key) for key in range(start)), *((tokens + b * size + k, start + k) for k in range(size))]
            for key, position in seen:
                mask[b * size + slot, key] = window is None or start + slot - window < position <= start + slot
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.flatten(0, 1).transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=True,
    )
    expected = expected[0].transpose(0, 1).view_as(mine)
    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
    together = segment_attention(query, context, block, visible, [Segment(slice(0, tokens), slice(0, blocks))], window)
    torch.testing.assert_close(together, expected, rtol=1e-12, atol=1e-12)
    last = block_attention(query[4:], newest(context, window), KeyValue(block.key[4:], block.value[4:]), None, window)
    torch.testing.assert_close(last, expected[4:], rtol=1e-12, atol=1e-12)


def test_sliding_layers_hold_only_scores_near_their_blocks(monkeypatch):
    """What a run lays its queries against: all that its blocks see, and less than two windows."""
    laid = []
    monkeypatch.setattr(
        "dflash_trainer.attention.block_attention",
        lambda query, context, block, visible, window: laid.append((len(context.key), visible)) or query,
    )
    anchors = torch.tensor([0, 5, 5, 90, 95, 120, 199])
    query, keys = torch.zeros(7, 4, 2, 8), torch.zeros(200, 1, 8)
    own = torch.zeros(7, 4, 1, 8)
    segments = [Segment(slice(0, 200), slice(0, 7))]
    segment_attention(query, KeyValue(keys, keys), KeyValue(own, own), anchors, segments, 16)
    assert torch.cat([visible for _, visible in laid]).tolist() == [0, 5, 5, 15, 20, 15, 15]
    assert [length for length, _ in laid] == [5, 20, 15, 15]


def test_taps_follow_the_paper():
    assert tap_layers(36, 5) == (1, 9, 17, 25, 33)
    assert tap_layers(36, 1) == (18,)
    assert tap_layers(30, 2) == (1, 27)


def test_taps_that_do_not_fit_are_refused(target_dir):
    target = AutoModelForCausalLM.from_pretrained(target_dir).config
    for taps in ((1, 1), (0, 5), (-1,), (6,)):
        with pytest.raises(UserError, match="--taps"):
            derive_config(target, block_size=4, mask_token_id=259, taps=taps)
    with pytest.raises(UserError, match="--taps"):
        derive_config(target, block_size=4, mask_token_id=259)  # five taps of six layers collide


def test_configuration_round_trip(target_dir, tmp_path):
    target = AutoModelForCausalLM.from_pretrained(target_dir).config
    config = derive_config(target, block_size=8, mask_token_id=259, overrides={"num_hidden_layers": 2})
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    assert DraftConfig.load(tmp_path) == config
    written = config.to_json()
    assert written["block_size"] == written["dflash_config"]["block_size"] == 8
    assert written["dflash_config"] == {"mask_token_id": 259, "target_layer_ids": (1, 3), "block_size": 8}
    # a draft's own configuration is a valid --draft-config
    assert (
        derive_config(target, block_size=8, mask_token_id=259, overrides=read_overrides(tmp_path / "config.json")) == config
    )


@pytest.mark.parametrize(
    "content",
    [
        '{"layers": 2}',
        '{"num_hidden_layers": 0}',
        '{"num_hidden_layers": "2"}',
        "[]",
        "{",
        '{"hidden_size": 64}',
        '{"num_key_value_heads": 3}',
        '{"head_dim": 7}',
    ],
)
def test_wrong_configurations_are_refused(content, target_dir, tmp_path):
    (tmp_path / "draft.json").write_text(content)
    target = AutoModelForCausalLM.from_pretrained(target_dir).config
    with pytest.raises(UserError):
        derive_config(target, block_size=8, mask_token_id=1, taps=(1, 2), overrides=read_overrides(tmp_path / "draft.json"))


def test_initialisation_depends_on_the_seed_alone(target_dir):
    target = AutoModelForCausalLM.from_pretrained(target_dir).config
    config = derive_config(target, block_size=8, mask_token_id=259, overrides={"num_hidden_layers": 2})
    torch.manual_seed(5)
    one = DraftModel(config).initialise(1).state_dict()
    torch.manual_seed(6)
    two = DraftModel(config).initialise(1).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["fc.weight"], DraftModel(config).initialise(2).state_dict()["fc.weight"])
