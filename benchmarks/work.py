"""What a training step has to compute, in floating-point operations of its matrix products, and how fast those can be.

A multiplication and an addition count as two. Padding does not count, nor does what is computed again: this is the work
that the model asks for, whatever a trainer does.
"""

import time

import numpy as np
import torch
from torch import nn

from dflash_trainer.config import DraftConfig

SIDE = {"cpu": 2048, "cuda": 8192}  # of the square matrices whose product is timed


def per_token(layers: nn.ModuleList, config: DraftConfig, length: float) -> float:
    """Of a token of a sample of `length`: the target's layers up to its last tap, and the draft's fusion and context."""
    layers = layers[: max(config.target_layer_ids) + 1]
    weights = sum(parameter.numel() for layer in layers for parameter in layer.parameters() if parameter.dim() == 2)
    attention = 2 * len(layers) * config.num_attention_heads * config.head_dim * length  # causal: half of what is square
    fusion = len(config.target_layer_ids) * config.hidden_size**2  # its input takes no gradient
    context = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * config.hidden_size
    return 2 * weights + attention + 4 * fusion + 6 * context


def per_anchor(config: DraftConfig, length: float) -> float:
    """Of a block in a sample of `length`, forward and backward; the LM head takes no gradient for its weights."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.block_size
    query, key = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    layer = 2 * hidden * (2 * query + 2 * key + 3 * inner) + 4 * query * (length / 2 + size)
    return 3 * config.num_hidden_layers * size * layer + 4 * (size - 1) * hidden * config.vocab_size


def token_length(lengths: np.ndarray) -> float:
    """The length of the sample that a token is in, on average."""
    return float((lengths**2).sum() / lengths.sum())


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of one large matrix product here, the best of a few: what utilisation is a share of."""
    side = SIDE[device.type]
    left, right = torch.randn(2, side, side, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(3):
        began = synchronised(device)
        left @ right
        best = min(best, synchronised(device) - began)
    return 2 * side**3 / best


def synchronised(device: torch.device) -> float:
    """The time at which everything asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
