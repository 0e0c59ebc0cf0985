"""Copies: which occurrence of a sample a slot holds, where a plan's weights let samples occur several times an epoch.

A copy's number is how often its sample occurs earlier in the epoch, in the plan's order: by step, slot and place in the
slot. It counts the slots of every rank, and after a resume those before the first step too, so that ranks and resume change
no copy's anchors.
"""

from array import array
from collections.abc import Iterator

from dflash_prep.manifest import Plan


def numbered_rows(plan: Plan, samples: int, epoch: int, first_step: int) -> Iterator[tuple[dict, list[int] | None]]:
    """The rows of an epoch from a step on, each with its samples' copy numbers; None stands for all zeros.

    `samples` is how many the store has. A plan without weights has no second copy, and nothing is counted.
    """
    if not plan.manifest.get("weights"):
        for row in plan.rows(epoch, first_step):
            yield row, None
        return
    seen = array("I", bytes(4 * samples))
    for row in plan.rows(epoch):
        copies = []
        for sample in row["samples"]:
            copies.append(seen[sample])
            seen[sample] += 1
        if row["step"] >= first_step:
            yield row, copies
