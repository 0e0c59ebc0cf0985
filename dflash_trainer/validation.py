"""Validation: what the draft makes of the plan's hold-out, by all ranks together, with nothing learnt from it."""

import json
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from dflash_prep.manifest import Plan
from dflash_prep.stores import Stores
from dflash_trainer.launch import Ranks, others_needed
from dflash_trainer.objective import block_loss, expected_acceptance
from dflash_trainer.prefetch import make_micro_batch
from dflash_trainer.shapes import Shapes
from dflash_trainer.step import Stepper

EPOCH = 0  # of the anchors' draw: the same at every validation, so that only the draft changes between two


class Validation(NamedTuple):
    """What the whole hold-out came to, over all ranks; its loss is the cross-entropy, whatever is trained."""

    loss: float
    slot_accuracy: list[float]
    expected_acceptance: float
    tokens: int
    anchors: int
    seconds: float


def validate(plan: Plan, store: Stores, stepper: Stepper, ranks: Ranks, shapes: Shapes | None = None) -> Validation:
    """Loss and accuracies of the hold-out. Parameters, moments and random numbers stay as they are.

    Rank r takes slots r, r + W, … as in training, as many as any other; sums are float64 and are reduced once, so that the
    result is the same on any number of ranks but for rounding.
    """
    began = time.perf_counter()
    slots = stepper.draft.config.block_size - 1
    sums = torch.zeros(4 + 2 * slots, dtype=torch.float64)
    with torch.no_grad():
        for row in plan.rows(None):
            if row["slot"] % ranks.world_size != ranks.rank:
                continue
            if not row["anchors"]:
                stepper.target.stand_by()
                continue
            batch = make_micro_batch(row, EPOCH, plan, store, shapes=shapes).to(ranks.device)
            with stepper.autocast():
                loss = block_loss(stepper.draft, stepper.target, batch)
            figures = [loss.weight, loss.cross_entropy, batch.tokens, batch.blocks, *loss.hits, *loss.counts]
            sums += torch.tensor([float(figure) for figure in figures], dtype=torch.float64)
    if ranks.world_size > 1:
        on_device = sums.to(ranks.device)
        with others_needed():
            dist.all_reduce(on_device)
        sums = on_device.cpu()
    (weight, loss, tokens, anchors), hits, counts = sums[:4].tolist(), *sums[4:].split(slots)
    accuracy = (hits / counts.clamp(min=1)).tolist()
    acceptance, seconds = expected_acceptance(accuracy), time.perf_counter() - began
    return Validation(loss / weight if weight else 0.0, accuracy, acceptance, int(tokens), int(anchors), seconds)


def note(run: Path, step: int, found: Validation) -> None:
    """Add a line to the run's `validation.jsonl`."""
    with (run / "validation.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **found._asdict()}) + "\n")
