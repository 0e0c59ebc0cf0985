"""Proof that packed samples do not see each other in a target, whatever its layers are.

Attention is ours and keeps within a sample, but a target may hold layers with a memory of their own (gated delta rules,
causal convolutions), which know of packing only what transformers tells them.
"""

import numpy as np
import torch

from dflash_prep.errors import UserError
from dflash_trainer.micro_batch import Sample, assemble
from dflash_trainer.target import FrozenTarget

LENGTHS = (11, 7)  # more tokens than the kernels of causal convolutions span
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.bfloat16: 0.03, torch.float16: 0.01}


def leak(target: FrozenTarget, vocabulary: int, device: torch.device) -> float:
    """How much a sample's taps change when another stands before it in a packed row, as a share of their norm."""
    draw = np.random.default_rng(0)
    first, second = (draw.integers(0, vocabulary, length) for length in LENGTHS)
    alone, behind = (
        target.features(packed_row(samples).to(device))[-LENGTHS[1] :].double() for samples in ([second], [first, second])
    )
    return ((alone - behind).norm() / alone.norm()).item()


def packed_row(samples: list[np.ndarray]):
    """A micro-batch of samples laid end to end, with no anchors."""
    nothing = np.empty(0, np.int64)
    parts = [Sample(ids.astype(np.uint32), nothing.astype(np.uint32), nothing) for ids in samples]
    numbers, width = tuple(range(len(parts))), sum(map(len, samples))
    return assemble(parts, packed=True, width=width, block_size=2, epoch=0, step=0, slot=0, numbers=numbers)


def check_isolation(target: FrozenTarget, vocabulary: int, dtype: torch.dtype, device: torch.device, name: str) -> None:
    """Refuse packed plans for a target in which packed samples see each other."""
    try:
        found = leak(target, vocabulary, device)
    except (ImportError, RuntimeError, ValueError) as fault:  # what a family's code says that cannot do it
        reason = " ".join(str(fault).split())
        raise UserError(f"{name}: cannot be given packed samples ({reason}); plan with --strategy bucketed") from None
    if not found <= TOLERANCE[dtype]:
        raise UserError(
            f"{name}: packed samples leak into each other in this target (its taps differ by {found:.1%} where another "
            "sample stands before); plan with --strategy bucketed"
        )
