"""A plan inspected: its epochs, what a step holds, and where in each epoch a sample stands."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dflash_prep.console import print_plan
from dflash_prep.errors import UserError
from dflash_prep.lookup import Choice, chosen, indexed, read_sample, tokenizer_of
from dflash_prep.manifest import Plan, members
from dflash_prep.show import Page, place, show_occurrences, show_sample, show_step
from dflash_prep.shown import check_plan
from dflash_prep.store import Store
from dflash_prep.verify import listed_samples, open_stores

Fact = Callable[[int], tuple[int, str]]  # a sample's length and where it came from


def inspect_plan(path: Path, choice: Choice, step: int | None, epoch: int | None, data: Sequence[Path]) -> None:
    """Print a plan's epochs, or a step, or samples and where they stand; errors as `inspect`."""
    plan, page = Plan(path), Page()
    if step is not None:
        epoch, step, rows = step_rows(plan, epoch, step)
        whole = sum(summary["steps"] for summary in plan["epochs"][:epoch]) + step
        of = f"{plan['epochs'][epoch]['steps']:,} (step {whole:,} of the run's {plan.total_steps:,})"
        show_step(page, f"epoch {epoch}, step {step:,} of {of}", rows, fact_of(plan, data))
    if choice:
        inspect_planned(page, plan, choice, data)
    elif step is None:
        check_plan(plan)
        if data:
            fact_of(plan, data)  # proves that it is what was planned
        print_plan(path, plan.manifest)


def inspect_planned(page: Page, plan: Plan, choice: Choice, data: Sequence[Path]) -> None:
    """The chosen samples, and in each epoch the steps and slots that have them."""
    stores = open_stores(plan, data).parts
    numbers = chosen(stores, choice)
    tokenizer = tokenizer_of(stores, choice.tokenizer)
    tables = {f"epoch {epoch}": occurrences(plan, epoch, numbers) for epoch in range(len(plan["epochs"]))}
    if plan["holdout_set"]:
        tables["held out"] = occurrences(plan, None, numbers)
    for number in numbers:
        show_sample(page, read_sample(stores, number), tokenizer, choice.tokens)
        show_occurrences(page, {name: found[number] for name, found in tables.items()})


def fact_of(plan: Plan, data: Sequence[Path]) -> Fact:
    """Looks up a planned sample in the plan's stores, or in its table of lengths."""
    if plan["lengths"]:
        listed = listed_samples(plan, data)
        return lambda number: (listed["length"][number], listed["source"][number] or "(unnamed)")
    stores: Sequence[Store] = open_stores(plan, data).parts

    def fact(number: int) -> tuple[int, str]:
        row = indexed(stores, number)[2]
        return row["length"], place(row["source"], row["line"])

    return fact


def step_rows(plan: Plan, epoch: int | None, step: int) -> tuple[int, int, list[dict]]:
    """Epoch, step there, and its rows, one a slot; without an epoch, steps are counted over the whole run. All from 0."""
    epochs = plan["epochs"]
    if epoch is None:
        if step >= plan.total_steps:
            raise UserError(f"{plan.path}: has no step {step}; its steps are 0 to {plan.total_steps - 1}")
        epoch, step = plan.locate(step)
    if epoch >= len(epochs):
        raise UserError(f"{plan.path}: has no epoch {epoch}; its epochs are 0 to {len(epochs) - 1}")
    if step >= (steps := epochs[epoch]["steps"]):
        raise UserError(f"{plan.path}: epoch {epoch} has no step {step}; its steps are 0 to {steps - 1}")
    rows = []
    for row in plan.rows(epoch, step):
        if row["step"] != step:
            break
        rows.append(row)
    return epoch, step, rows


def occurrences(plan: Plan, epoch: int | None, samples: list[int]) -> dict[int, list[tuple[int, int]]]:
    """The (step, slot) of each occurrence of some samples in an epoch (None: in the hold-out), in order."""
    with plan.open_epoch(epoch) as file:
        table = file.read(["step", "slot", "samples"])
    flat, sizes = members(table)
    at = np.flatnonzero(np.isin(flat, samples))
    rows = np.searchsorted(np.cumsum(sizes), at, "right")
    steps, slots = (table[name].to_numpy()[rows].tolist() for name in ("step", "slot"))
    found: dict[int, list[tuple[int, int]]] = {sample: [] for sample in samples}
    for sample, step, slot in zip(flat[at].tolist(), steps, slots, strict=True):
        found[sample].append((step, slot))
    return found
