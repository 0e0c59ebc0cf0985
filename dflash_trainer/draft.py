"""The DFlash draft: Qwen3-style layers whose queries are one block and whose keys are the target's features and the block.

DFlash, arXiv 2602.06036. Parameter names and shapes are those that servers load (see `checkpoint`). Embedding and LM head
are the target's and not part of the model.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dflash_trainer.attention import Attend, KeyValue
from dflash_trainer.config import DraftConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


def rotary(positions: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the rotary angles, float32 [..., 1, head_dim], for int64 positions [...] (arXiv 2104.09864)."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angle = positions[..., None].float() * (1.0 / theta**exponent)  # rounded as servers round it
    angle = torch.cat([angle, angle], dim=-1).unsqueeze(-2)
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary angles to [..., heads, head_dim]; the two halves of a head are the pairs."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with per-head norms of queries and keys."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.heads, self.kv, self.hd = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.hd, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv * self.hd, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv * self.hd, bias=False)
        self.o_proj = nn.Linear(self.heads * self.hd, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.hd, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.hd, config.rms_norm_eps)

    def key_value(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> KeyValue:
        """Keys and values of [..., H]: of context features, or of a block's normed states."""
        value = self.v_proj(x).unflatten(-1, (self.kv, self.hd))
        key = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv, self.hd)))
        return KeyValue(rotate(key, *angles).to(value.dtype), value)

    def query(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Queries [A, B, heads, hd] of a block's normed states [A, B, H]."""
        query = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.hd)))
        return rotate(query, *angles).to(dtype)


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer, pre-norm. The context enters as keys and values only: neither input norm nor MLP touches it.

    `window` is how many positions back a sliding layer sees, None for a layer that sees everything.
    """

    def __init__(self, config: DraftConfig, window: int | None):
        super().__init__()
        self.window = window
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, context: KeyValue, angles, attend: Attend) -> torch.Tensor:
        query, block = self.before(x, angles)
        return self.after(x, attend(query, context, block, self.window))

    def before(self, x: torch.Tensor, angles) -> tuple[torch.Tensor, KeyValue]:
        """A block's queries, keys and values, of its states [A, B, H]."""
        normed = self.input_layernorm(x)
        block = self.self_attn.key_value(normed, angles)
        return self.self_attn.query(normed, angles, block.value.dtype), block

    def after(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """A block's new states, of its old ones and of what attention mixed, [A, B, heads, hd]."""
        x = x + self.self_attn.o_proj(mixed.flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftModel(nn.Module):
    """The whole draft."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        self.checkpoint_activations = False  # recompute each layer in the backward pass: less memory, a forward pass more
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, window) for window in config.windows)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def initialise(self, seed: int) -> "DraftModel":
        """Draw every matrix from N(0, initializer_range²) by a generator of its own; norms start at 1."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=self.config.initializer_range, generator=generator)
        return self

    def compile_layers(self) -> None:
        """Compile what stands between two attentions, once for all layers and numbers of tokens and blocks."""
        self.context = torch.compile(self.context, dynamic=True)
        for layer in self.layers:
            layer.before, layer.after = (torch.compile(part, dynamic=True) for part in (layer.before, layer.after))

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary angles of absolute positions."""
        return rotary(positions, self.config.head_dim, self.config.rope_theta)

    def context(self, features: torch.Tensor, positions: torch.Tensor) -> list[KeyValue]:
        """Each layer's keys and values of target features [T, K·H] at positions int64 [T]."""
        fused = self.hidden_norm(self.fc(features))
        angles = self.angles(positions)
        return [layer.self_attn.key_value(fused, angles) for layer in self.layers]

    def blocks(self, x: torch.Tensor, anchors: torch.Tensor, context: list[KeyValue], attend: Attend) -> torch.Tensor:
        """Final hidden states [A, B, H] of blocks: embeddings [A, B, H] at positions a … a+B−1 for anchors int64 [A]."""
        angles = self.angles(anchors[:, None] + torch.arange(x.shape[1], device=x.device))
        x = x.to(self.norm.weight.dtype)
        for layer, keys in zip(self.layers, context, strict=True):
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(layer, x, keys, angles, attend, use_reentrant=False)
            else:
                x = layer(x, keys, angles, attend)
        return self.norm(x)

    def forward(
        self, features: torch.Tensor, positions: torch.Tensor, x: torch.Tensor, anchors: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Training: the blocks of several samples at once, each block seeing its own sample before its anchor, and itself.

        features: [T, K·H]; positions: int64 [T]; x: [A, B, H]; anchors: int64 [A]; returns [A, B, H].
        """
        return self.blocks(x, anchors, self.context(features, positions), attend)
