"""Proof that a target computes under our attention what it computes under transformers' own.

Ours is causal, within a sample, with a sliding window where a layer asks for one. Families have more than that (capped
scores, attention sinks, chunks), and others will come that hand it over in ways of their own: so it is tried, not assumed.
"""

import torch

from dflash_prep.errors import UserError
from dflash_trainer.probe import probe, random_samples
from dflash_trainer.shapes import Shapes
from dflash_trainer.target import FrozenTarget

LENGTH = 24
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.bfloat16: 0.1, torch.float16: 0.03}
KINDS = ("full_attention", "sliding_attention")  # of layers, as transformers names them


def settle_attention(
    target: FrozenTarget,
    vocabulary: int,
    dtype: torch.dtype,
    device: torch.device,
    name: str,
    *,
    packed: bool,
    shapes: Shapes | None = None,
) -> str | None:
    """Let a target attend by transformers' own code where ours is not exact for it; packed plans are refused then.

    `packed` and `shapes` are the run's: the attention that is tried is the one that it will use.

    Returns what to tell the user of it, if anything.
    """
    reason = why_not_ours(target, vocabulary, dtype, device, shapes if packed else None)
    if reason is None:
        return None
    if packed:
        raise UserError(f"{name}: cannot be given packed samples ({reason}); plan with --strategy bucketed")
    target.attend(own=False)
    return f"{name}: attends by transformers' own eager code, which takes more time and memory ({reason})"


def why_not_ours(
    target: FrozenTarget, vocabulary: int, dtype: torch.dtype, device: torch.device, shapes: Shapes | None = None
) -> str | None:
    """What our attention lacks to compute a target, in the packed rows of `shapes` if given; None: nothing that shows."""
    try:
        ours = taps(target, vocabulary, device, shapes)
    except (RuntimeError, TypeError, ValueError) as fault:
        return " ".join(str(fault).split())
    for layer, window in target.layers_said.items():
        kind, wanted = kind_of(target.config, layer)
        if kind not in KINDS:
            return f"layer {layer} is of the kind {kind}"
        if wanted != window:
            return f"layer {layer} has a sliding window of {wanted} and asks our attention for {window}"
    target.attend(own=False)
    theirs = taps(target, vocabulary, device)
    target.attend(own=True)
    apart = ((ours - theirs).norm() / theirs.norm()).item()
    return None if apart <= TOLERANCE[dtype] else f"its taps differ by {apart:.1%} from those of transformers' attention"


def taps(target: FrozenTarget, vocabulary: int, device: torch.device, shapes: Shapes | None = None) -> torch.Tensor:
    """Those of one random sample, in float64."""
    row = probe(random_samples([LENGTH], vocabulary), packed=shapes is not None, shapes=shapes)
    return target.features(row.to(device))[:LENGTH].double()


def kind_of(config, layer: int | None) -> tuple[str, int | None]:
    """What the configuration says of an attending layer: its kind and its sliding window."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    kind = kinds[layer] if kinds and layer is not None else KINDS[window is not None]
    return kind, window if kind == KINDS[1] else None
