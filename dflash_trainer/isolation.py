"""Proof that packed samples do not see each other in a target, whatever its layers are.

Attention is ours and keeps within a sample, but a target may hold layers with a memory of their own (gated delta rules,
causal convolutions), which know of packing only what transformers tells them.
"""

import torch

from dflash_prep.errors import UserError
from dflash_trainer.probe import probe, random_samples
from dflash_trainer.shapes import Shapes
from dflash_trainer.target import FrozenTarget

LENGTHS = (11, 7)  # more tokens than the kernels of causal convolutions span
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.bfloat16: 0.03, torch.float16: 0.01}


def leak(target: FrozenTarget, vocabulary: int, device: torch.device, shapes: Shapes | None = None) -> float:
    """How much a sample's taps change when another stands before it in a packed row, as a share of their norm.

    Rows are as the run's `shapes` make them.
    """
    first, second = random_samples(LENGTHS, vocabulary)
    alone, behind = (
        target.features(probe(samples, packed=True, shapes=shapes).to(device))[: sum(map(len, samples))][-LENGTHS[1] :]
        for samples in ([second], [first, second])
    )
    return ((alone.double() - behind.double()).norm() / alone.double().norm()).item()


def check_isolation(
    target: FrozenTarget,
    vocabulary: int,
    dtype: torch.dtype,
    device: torch.device,
    name: str,
    shapes: Shapes | None = None,
) -> None:
    """Refuse packed plans for a target in which packed samples see each other."""
    try:
        found = leak(target, vocabulary, device, shapes)
    except (ImportError, RuntimeError, ValueError) as fault:  # what a family's code says that cannot do it
        reason = " ".join(str(fault).split())
        raise UserError(f"{name}: cannot be given packed samples ({reason}); plan with --strategy bucketed") from None
    if not found <= TOLERANCE[dtype]:
        raise UserError(
            f"{name}: packed samples leak into each other in this target (its taps differ by {found:.1%} where another "
            "sample stands before); plan with --strategy bucketed"
        )
