"""Rehearsal: the plan's longest and fullest micro-batch, forward and backward before the first step.

What runs out of memory does so in the first minute instead of hours in. Each rank computes both, so that none meets the like
first in training. Nothing that training starts from is changed: parameters, gradients, moments, random numbers.
"""

import torch

from dflash_prep.errors import UserError
from dflash_prep.manifest import Plan
from dflash_prep.stores import Stores
from dflash_trainer.launch import Ranks, refuse_together
from dflash_trainer.prefetch import make_micro_batch
from dflash_trainer.shapes import Shapes
from dflash_trainer.step import Stepper


def rehearse(plan: Plan, store: Stores, stepper: Stepper, ranks: Ranks, shapes: Shapes | None = None) -> None:
    """Compute what `plan.json` names under `rehearse`, if anything; a GPU's lack of memory is a user error."""
    named = plan.manifest.get("rehearse")
    if not named:
        return
    kinds: dict[tuple[int, int, int], str] = {}
    for kind in ("longest", "fullest"):
        place = named[kind]["epoch"], named[kind]["step"], named[kind]["slot"]
        kinds[place] = f"{kinds[place]} and {kind}" if place in kinds else kind
    sizes, fault = [], None
    try:
        with torch.random.fork_rng([ranks.device] if ranks.device.type == "cuda" else []):
            for place, kind in kinds.items():
                row = find_row(plan, *place)
                sizes.append(f"{row['padded_tokens']:,} tokens, {row['anchors']:,} anchors")
                here = f"the plan's {kind} micro-batch (epoch {place[0]}, step {place[1]}, slot {place[2]}: {sizes[-1]})"
                stepper.rehearse(make_micro_batch(row, place[0], plan, store, shapes=shapes).to(ranks.device))
    except torch.OutOfMemoryError:
        remedy = "plan with a smaller --token-budget or --anchor-budget, and with more --slots to keep a step's size"
        fault = f"{here} does not fit the memory of {ranks.device}; {remedy}"
    if fault:
        torch.cuda.empty_cache()  # ranks need some to talk
        if stepper.target.sharded:  # others may be waiting for this rank's part of a layer, and hear nothing else
            raise UserError(fault)
    refuse_together(fault, ranks)
    if ranks.leads:
        print(f"rehearsed the longest and the fullest micro-batch ({'; '.join(sizes)})", flush=True)


def find_row(plan: Plan, epoch: int, step: int, slot: int) -> dict:
    """The plan's row of one slot."""
    for row in plan.rows(epoch, step):
        if (row["step"], row["slot"]) == (step, slot):
            return row
    raise UserError(f"{plan.path}: has no epoch {epoch}, step {step}, slot {slot} to rehearse; plan again")
