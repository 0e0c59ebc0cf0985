"""The frozen target: transformers' model, run for its tapped layers' outputs and no further than the last of them."""

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging

from dflash_prep.embedded import default_target
from dflash_prep.errors import UserError
from dflash_trainer.prefetch import MicroBatch

ATTENTION = "segmented"  # a name with "flash" in it makes transformers look for a FlashAttention kernel


def load_target(name: str | None, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Load a target by directory or hub id (None: the default target), frozen and in evaluation mode."""
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(name or default_target(), dtype=dtype)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as fault:
        raise UserError(f"{name}: cannot load the target ({fault}); name a whole model") from None
    return model.requires_grad_(False).eval().to(device)


def segment_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    segments: list[int] | None = None,
    sliding_window: int | None = None,
    **_,
) -> tuple[torch.Tensor, None]:
    """Causal attention in transformers' interface: rows as they are, or a packed row sample by sample.

    query: [R, heads, W, hd]; key and value: [R, kv, W, hd]; segments: the samples' lengths in a packed row. Right padding
    needs no mask: no real token ever looks to its right.
    """
    outputs = [
        causal_attention(*parts, scaling, sliding_window)
        for parts in zip(*(x.split(segments or [x.shape[2]], dim=2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def causal_attention(query, key, value, scaling: float | None, window: int | None) -> torch.Tensor:
    """Causal attention over one stretch, banded where the layer has a sliding window shorter than it."""
    length, mask = query.shape[2], None
    if window is not None and length > window:
        offset = torch.arange(length, device=query.device)
        offset = offset[:, None] - offset
        mask = (offset >= 0) & (offset < window)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )


AttentionInterface.register(ATTENTION, segment_attention)
AttentionMaskInterface.register(ATTENTION, lambda *arguments, **options: None)


class FrozenTarget:
    """A target cut down to what the draft's training needs: its taps, its embedding and its LM head."""

    def __init__(self, model: nn.Module, taps: tuple[int, ...]):
        decoder = model.get_decoder()
        self._embedding = model.get_input_embeddings()
        self.head = model.get_output_embeddings().weight
        self._decoder = decoder
        decoder.layers = decoder.layers[: max(taps) + 1]
        decoder.norm = nn.Identity()  # nothing above the last tap is computed
        model.set_attn_implementation(ATTENTION)
        self._taps = Taps(decoder.layers, taps)

    @torch.no_grad()
    def features(self, batch: MicroBatch) -> torch.Tensor:
        """The tapped outputs of a micro-batch's real tokens, [T, K·H]."""
        self._taps.select = batch.real
        self._decoder(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            segments=list(batch.lengths) if batch.packed else None,
        )
        return self._taps.take()

    @torch.no_grad()
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's embeddings of token ids."""
        return self._embedding(tokens)


class Taps:
    """Forward hooks that copy the outputs of chosen layers side by side into one tensor.

    `select` names the flattened positions (int64) to keep of the next forward pass; None keeps all.
    """

    def __init__(self, layers: nn.ModuleList, taps: tuple[int, ...]):
        self.select: torch.Tensor | None = None
        self._features: torch.Tensor | None = None
        self._count = len(taps)
        for column, tap in enumerate(taps):
            layers[tap].register_forward_hook(self._hook(column, first=tap == min(taps)))

    def take(self) -> torch.Tensor:
        """What the last forward pass left, [positions, K·H]."""
        features, self._features = self._features, None
        return features

    def _hook(self, column: int, first: bool):
        def copy(module, arguments, output) -> None:
            hidden = (output[0] if isinstance(output, tuple) else output).flatten(0, 1)
            rows = hidden if self.select is None else hidden[self.select]
            size = rows.shape[1]
            if first:
                self._features = rows.new_empty(rows.shape[0], self._count * size)
            self._features[:, column * size : (column + 1) * size] = rows

        return copy
