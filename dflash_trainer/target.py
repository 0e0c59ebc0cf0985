"""The frozen target: transformers' model, run for its tapped layers' outputs and no further than the last of them."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from transformers import AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging

from dflash_prep.embedded import default_target
from dflash_prep.errors import UserError
from dflash_prep.files import canonical_json, digest
from dflash_trainer.config import INHERITED
from dflash_trainer.flex import attention, block_mask
from dflash_trainer.micro_batch import MicroBatch
from dflash_trainer.sharding import in_step, is_sharded, stand_in

ATTENTION = "segmented"  # a name with "flash" in it makes transformers look for a FlashAttention kernel


def load_target(name: str | None, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Load a target by directory or hub id (None: the default target), whole, frozen and in evaluation mode."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # what is wrong with the weights is said once, below
    source = name or str(default_target())
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, trust_remote_code=False, ignore_mismatched_sizes=True, output_loading_info=True
        )
        model = model.requires_grad_(False).eval().to(device)
    except Exception as fault:  # transformers, safetensors, the hub, memory: many classes, one meaning
        reason = " ".join(str(fault).split()) or type(fault).__name__
        raise UserError(f"{source}: cannot load the target ({reason}); name a whole model") from None
    check_decoder(model, source)
    check_weights(report, source)
    return model


def check_decoder(model: nn.Module, source: str) -> None:
    """A target has what training and decoding take hold of: layers and a norm under an LM head, and their sizes."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    config = model.config.get_text_config()
    lacks = [name for name in ("layers", "norm") if not hasattr(decoder, name)]
    lacks += [name for name in (*INHERITED, "num_hidden_layers") if getattr(config, name, None) is None]
    if not lacks and len(decoder.layers) != config.num_hidden_layers:
        lacks = [f"{config.num_hidden_layers} layers"]
    if getattr(model.get_output_embeddings(), "weight", None) is None:
        lacks.append("an LM head")
    if lacks:
        raise UserError(f"{source}: not a Llama-like decoder, it lacks {', '.join(lacks)}; name another target")


def check_weights(report: dict, source: str) -> None:
    """Refuse a target some of whose layers were filled with random numbers, or some of whose weights found no place.

    `report` is transformers' loading information. Weights outside the decoder's layers may be left over (a vision tower),
    and so may the rotary frequencies that old checkpoints hold.
    """
    surplus = {
        key
        for key in report["unexpected_keys"]
        if key.removeprefix("model.").removeprefix("language_model.").startswith("layers.")
    }
    faults = {
        "lacks": set(report["missing_keys"]),
        "has another shape of": {key if isinstance(key, str) else key[0] for key in report["mismatched_keys"]},
        "does not know": {key for key in surplus if not key.endswith("rotary_emb.inv_freq")},
    }
    for fault, keys in faults.items():
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            subject = "its config.json" if fault == "does not know" else "its weights file"
            raise UserError(f"{source}: {subject} {fault} {min(keys)}{more}: config and weights differ; name a whole model")


def target_fingerprint(model: nn.Module) -> str:
    """Which target this is, cheaply: its sizes and some rows of its embedding, rounded so that each --dtype has the same."""
    config = model.config.get_text_config()
    sizes = {name: getattr(config, name) for name in (*INHERITED, "num_hidden_layers")}
    rows = model.get_input_embeddings().weight[:64].detach().to("cpu", torch.bfloat16).float()
    return digest(rows.contiguous().numpy().tobytes(), canonical_json(sizes))


@torch.compiler.disable
def segment_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    packing: "Packing | None" = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_,
) -> tuple[torch.Tensor, None]:
    """Causal attention in transformers' interface: rows as they are, or a packed row sample by sample, or by tiles.

    query: [R, heads, W, hd]; key and value: [R, kv, W, hd]. Right padding needs no mask: no real token ever looks to its
    right. Capped scores and attention sinks are a ValueError; `fidelity` finds what else a layer may want.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError("its attention has " + ("attention sinks" if softcap is None else "capped scores"))
    if packing is not None:
        packing.windows[getattr(module, "layer_idx", None)] = sliding_window
    if packing is not None and packing.masks:
        if sliding_window not in packing.masks:
            raise ValueError(f"a layer asks for a sliding window of {sliding_window}, which its configuration does not name")
        return attention(query, key, value, packing.masks[sliding_window], scaling).transpose(1, 2), None
    lengths = (packing and packing.stretches) or [query.shape[2]]
    outputs = [
        causal_attention(*parts, scaling, sliding_window)
        for parts in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


class Packing:
    """How the rows at hand fall into samples, told to each layer's attention without passing through the layers.

    What a compiled layer is given anew it is compiled for anew; this stays the same object throughout a run.
    """

    def __init__(self):
        self.stretches: list[int] | None = None
        self.masks: dict[int | None, BlockMask] = {}
        self.windows: dict[int | None, int | None] = {}  # what each layer said of its sliding window

    def describe(self, batch: MicroBatch) -> None:
        """Speak of a micro-batch from now on."""
        self.stretches = batch.stretches
        self.masks = {window: block_mask(tiles) for window, tiles in batch.target_masks.items()}


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
    """A target cut down to what the draft's training needs: its taps, its embedding and its LM head.

    One that is kept `whole` runs all its layers and its final norm, whose `states` its own predictions are made of; `cap`
    is then the one that its logits are bent to, if any.

    The target computes in the dtype that it was loaded in; the features and `head` are handed over in `dtype`, that of the
    draft's matrix products (None: the target's own). `place` brings the cut model to its device (see `sharding`); where the
    model is sharded, all ranks have to call `features` equally often, or `stand_by` in its stead.
    """

    def __init__(
        self,
        model: nn.Module,
        taps: tuple[int, ...],
        dtype: torch.dtype | None = None,
        place: Callable[[nn.Module], None] | None = None,
        whole: bool = False,
    ):
        decoder = model.get_decoder()
        self._embedding = model.get_input_embeddings()
        self._decoder = decoder
        self._whole, self._states = whole, None
        self.cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        if not whole:  # nothing above the last tap is computed
            decoder.layers = decoder.layers[: max(taps) + 1]
            decoder.norm = nn.Identity()
        self._model = model
        self.attend(own=True)
        if place is not None:
            place(model)
        self.sharded = is_sharded(decoder)
        self.head = model.get_output_embeddings().weight.detach().to(dtype)
        self._taps = Taps(decoder.layers, taps, dtype)
        self._packing = Packing()
        kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
        self._has_memory = any("attention" not in kind or "linear" in kind for kind in kinds)

    def attend(self, *, own: bool) -> None:
        """Compute attention by our code, or by transformers' own, which is exact for every family but cannot be packed."""
        self._model.set_attn_implementation(ATTENTION if own else "eager")

    @property
    def layers_said(self) -> dict[int | None, int | None]:
        """The sliding window that each layer asked our attention for in passes so far, by the layer's number."""
        return self._packing.windows

    @property
    def config(self):
        """Transformers' configuration of the decoder."""
        return self._decoder.config

    @property
    def windows(self) -> frozenset[int | None]:
        """The sliding windows that the layers may have, None for none."""
        return frozenset({None, getattr(self.config, "sliding_window", None)})

    def compile(self) -> None:
        """Compile each layer for the shapes that it meets; attention is a kernel of its own."""
        for layer in self._decoder.layers:
            layer.forward = torch.compile(layer.forward, dynamic=False)

    @torch.no_grad()
    def features(self, batch: MicroBatch) -> torch.Tensor:
        """The tapped outputs of a micro-batch's real tokens, [T, K·H]."""
        self._taps.select = batch.real
        self._packing.describe(batch)
        plain = torch.autocast(batch.input_ids.device.type, enabled=False)  # the target's dtype is its own
        with plain, in_step() if self.sharded else nullcontext():
            output = self._decoder(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                packing=self._packing,
                **(starts_of_samples(batch) if self._has_memory and batch.packed else {}),
            )
        if self._whole:
            self._states = output.last_hidden_state.flatten(0, 1)[batch.real]
        return self._taps.take()

    def states(self) -> torch.Tensor:
        """The final states [T, H] of the real tokens of the micro-batch whose features were last computed; once."""
        states, self._states = self._states, None
        return states

    def stand_by(self) -> None:
        """What a rank does that needs no features where others may: gather the layers with them if they are sharded."""
        if self.sharded:
            self.features(stand_in().to(self.head.device))

    @torch.no_grad()
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's embedding rows of token ids: as they are stored, since servers pass them unscaled to a draft."""
        return F.embedding(tokens, self._embedding.weight)


def starts_of_samples(batch: MicroBatch) -> dict[str, torch.Tensor]:
    """Where samples begin, as transformers' gated delta rules and causal convolutions want to know it."""
    device, lengths = batch.input_ids.device, torch.tensor(batch.stretches)
    numbers = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return {"cu_seq_lens_q": starts.to(device, torch.int32), "seq_idx": numbers[None].to(device)}


class Taps:
    """Forward hooks that copy the outputs of chosen layers side by side into one tensor.

    `select` names the flattened positions (int64) to keep of the next forward pass; None keeps all. `dtype` is what the copy
    is made in, None: the layers' own.
    """

    def __init__(self, layers: nn.ModuleList, taps: tuple[int, ...], dtype: torch.dtype | None = None):
        self.select: torch.Tensor | None = None
        self._dtype = dtype
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
            count, size = (len(hidden) if self.select is None else len(self.select)), hidden.shape[1]
            if first:
                self._features = hidden.new_empty(count, self._count * size, dtype=self._dtype)
            place = self._features[:, column * size : (column + 1) * size]
            if self.select is not None and place.dtype == hidden.dtype:
                torch.index_select(hidden, 0, self.select, out=place)  # straight into its place, with no copy between
            else:
                place.copy_(hidden if self.select is None else hidden[self.select])

        return copy
