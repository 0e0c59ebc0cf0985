"""The DFlash draft the slow way: one block at a time, dense attention, no batching, from the formulas alone."""

import numpy as np
import torch

from dflash_trainer.draft import rotary, rotate


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def sample_features(model, ids: list[int], taps: tuple[int, ...]) -> torch.Tensor:
    """Tapped features of one sample alone: transformers' own hidden states."""
    with torch.no_grad():
        states = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[tap + 1][0] for tap in taps], dim=-1)


def block_hidden(
    draft, weights: dict, features: torch.Tensor, embeddings: torch.Tensor, anchor: int, causal: bool = True
) -> torch.Tensor:
    """Final hidden states [B, H] of the block at `anchor`, for one sample's features [S, K·H].

    `causal` is whether the sliding layers hide what comes later in the block.
    """
    config = draft.config
    size, hd, kv = len(embeddings), config.head_dim, config.num_key_value_heads
    group = config.num_attention_heads // kv
    context = norm(features[:anchor] @ weights["fc.weight"].T, weights["hidden_norm.weight"], config.rms_norm_eps)
    positions = torch.cat([torch.arange(anchor), torch.arange(anchor, anchor + size)])
    cos, sin = rotary(positions, hd, config.rope_theta)
    back = positions[anchor:, None] - positions  # how far each key lies before each query
    x = embeddings
    for i in range(config.num_hidden_layers):
        w = {name: weights[f"layers.{i}.{name}.weight"] for name in LAYER}
        h = norm(x, w["input_layernorm"], config.rms_norm_eps)
        keys_from = torch.cat([context, h])
        q = norm((h @ w["self_attn.q_proj"].T).view(size, -1, hd), w["self_attn.q_norm"], config.rms_norm_eps)
        k = norm((keys_from @ w["self_attn.k_proj"].T).view(-1, kv, hd), w["self_attn.k_norm"], config.rms_norm_eps)
        v = (keys_from @ w["self_attn.v_proj"].T).view(-1, kv, hd)
        q, k = rotate(q, cos[anchor:], sin[anchor:]), rotate(k, cos, sin)
        heads = []
        for head in range(config.num_attention_heads):
            scores = q[:, head] @ k[:, head // group].T / hd**0.5
            if config.layer_types[i] == "sliding_attention":
                scores = scores.masked_fill((back >= config.sliding_window) | (causal & (back < 0)), -torch.inf)
            heads.append(scores.softmax(-1) @ v[:, head // group])
        x = x + torch.cat(heads, dim=-1) @ w["self_attn.o_proj"].T
        h = norm(x, w["post_attention_layernorm"], config.rms_norm_eps)
        x = x + (torch.nn.functional.silu(h @ w["mlp.gate_proj"].T) * (h @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    return norm(x, weights["norm.weight"], config.rms_norm_eps)


LAYER = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
LAYER += [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]


def block_loss(draft, weights: dict, model, ids: np.ndarray, loss: np.ndarray, anchor: int, features) -> tuple:
    """Σ w · CE and Σ w of one block, and of each slot that counts whether its best token is the label; `loss` bool [S]."""
    size, gamma = draft.config.block_size, {8: 4.0, 10: 5.0, 16: 7.0}.get(draft.config.block_size, 4.0)
    tokens = torch.tensor([int(ids[anchor])] + [draft.config.mask_token_id] * (size - 1))
    hidden = block_hidden(draft, weights, features, model.get_input_embeddings()(tokens).detach(), anchor)
    total, weight, hits = 0.0, 0.0, []
    for k in range(1, size):
        if anchor + k >= len(ids) or not loss[anchor + k]:
            break
        logits = hidden[k] @ model.get_output_embeddings().weight.detach().T
        w = float(np.exp(-(k - 1) / gamma))
        total = total - w * torch.log_softmax(logits, -1)[int(ids[anchor + k])]
        weight += w
        hits.append(int(logits.argmax()) == int(ids[anchor + k]))
    return total, weight, hits
