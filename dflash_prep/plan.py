"""From a store and options to a plan: a pure function, written atomically."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dflash_prep import schedule
from dflash_prep.anchors import anchor_count, density_ppm
from dflash_prep.batching import Limits, Samples
from dflash_prep.buckets import auto_boundaries, optimal_boundaries
from dflash_prep.cost import row_cost
from dflash_prep.diversity import certificate
from dflash_prep.errors import UserError
from dflash_prep.files import check_utf8, is_taken, new_directory, resolved, write_json
from dflash_prep.manifest import (
    FORMAT,
    VERSION,
    Plan,
    epoch_summary,
    epoch_table,
    plan_fingerprint,
    write_epoch,
)
from dflash_prep.schedule import Step
from dflash_prep.store import Store

MOST_TOKENS = 32_768
LEAST_STEPS = 64
NO_LIMIT = 2**62
Strategy = Callable[[Samples, Limits, int, int, int], list[Step]]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the user asked for; None stands for `auto`."""

    epochs: int = 6
    strategy: str = "bucketed"
    bucket_scope: str = "epoch"
    buckets: int | None = None
    boundaries: tuple[int, ...] | None = None
    token_budget: int | None = None
    anchor_density: float = 0.25
    max_anchors: int = 512
    block_size: int = 16
    anchor_budget: int | None = None
    slots: int = 8
    seed: int = 0


def write_plan(store: Store, output: Path, options: PlanOptions) -> dict:
    """Plan every epoch and write the plan `output`, in the place of an older plan; returns its manifest."""
    if is_taken(output):
        if not (output / "plan.json").is_file():
            raise UserError(f"{output}: is there already and is no plan; remove it or choose another with -o")
        Plan(output)  # only a plan is ever replaced
    place = str(resolved(store.path))
    check_utf8(place)
    samples = load_samples(store, options)
    limits = choose_limits(samples, options)
    bounds = choose_boundaries(samples, options)
    strategy = choose_strategy(options, bounds)
    settings = settle(options, limits, bounds)
    packed = options.strategy == "packed"
    summaries, measures = [], None
    with new_directory(output) as directory:
        for epoch in range(options.epochs):
            steps = strategy(samples, limits, options.slots, options.seed, epoch)
            table = epoch_table(steps, samples, options.slots, packed, bounds if bounds else [])
            path = directory / f"epoch-{epoch:03d}.parquet"
            write_epoch(table, path, options.slots)
            summaries.append(epoch_summary(table, path))
            measures = measures or certificate(table, samples.length, options.slots)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": plan_fingerprint(settings, store.fingerprint, summaries),
            "store": {"path": place, "fingerprint": store.fingerprint},
            **settings,
            "certificate": measures,
            "epochs": summaries,
        }
        write_json(directory / "plan.json", manifest)
    return manifest


def load_samples(store: Store, options: PlanOptions) -> Samples:
    """The store's lengths, loss tokens and planned anchors."""
    density = density_ppm(options.anchor_density)
    anchors = anchor_count(store.column("eligible"), density, options.max_anchors)
    return Samples(store.column("length"), store.column("loss_tokens"), anchors)


def choose_limits(samples: Samples, options: PlanOptions) -> Limits:
    """The budgets: as given, or so that an epoch has at least 64 steps where the longest sample allows."""
    longest = int(samples.length.max())
    even = int(samples.length.sum()) // (LEAST_STEPS * options.slots)
    tokens = options.token_budget or min(MOST_TOKENS, max(longest, even))
    anchors = options.anchor_budget or NO_LIMIT
    check_fits("tokens", samples.length, tokens, "raise --token-budget or tokenize with a smaller --max-length")
    check_fits("anchors", samples.anchors, anchors, "raise --anchor-budget or lower --max-anchors")
    return Limits(tokens, anchors)


def check_fits(what: str, values: np.ndarray, budget: int, remedy: str) -> None:
    """No sample may be over a budget by itself."""
    worst = int(values.argmax())
    if values[worst] > budget:
        raise UserError(f"sample {worst} has {values[worst]} {what}, the budget is {budget}: {remedy}")


def choose_boundaries(samples: Samples, options: PlanOptions) -> list[int]:
    """The buckets' inclusive upper bounds; one bucket where there are none, [] where each step cuts its own."""
    longest = int(samples.length.max())
    if options.boundaries and options.buckets:
        raise UserError("--boundaries and --buckets are both given; leave one of them out")
    if options.boundaries or options.buckets:
        if options.strategy != "bucketed":
            raise UserError(f"--strategy {options.strategy} has no buckets; leave --boundaries and --buckets out")
        if options.bucket_scope == "step":
            raise UserError("--bucket-scope step cuts each step anew; leave --boundaries and --buckets out")
    if options.strategy != "bucketed":
        return [longest]
    if options.bucket_scope == "step":
        return []
    if options.boundaries:
        if options.boundaries[-1] < longest:
            raise UserError(f"--boundaries end at {options.boundaries[-1]}, the longest sample has {longest} tokens")
        return list(options.boundaries)
    if options.buckets:
        return optimal_boundaries(samples.length, options.buckets, row_cost)
    return auto_boundaries(samples.length, row_cost)


def choose_strategy(options: PlanOptions, bounds: list[int]) -> Strategy:
    """The function that makes an epoch's steps."""
    if options.strategy == "bucketed" and bounds:
        return lambda *arguments: schedule.bucketed_steps(*arguments, bounds)
    return {
        "sorted": schedule.sorted_steps,
        "shuffled": schedule.shuffled_steps,
        "packed": schedule.packed_steps,
        "bucketed": schedule.step_bucketed_steps,
    }[options.strategy]


def settle(options: PlanOptions, limits: Limits, bounds: list[int]) -> dict:
    """The options as `plan.json` states them, every `auto` replaced by what was chosen."""
    chosen = {
        "token_budget": limits.tokens,
        "boundaries": bounds,
        "bucket_scope": options.bucket_scope if options.strategy == "bucketed" else "epoch",
    }
    settled = asdict(options) | chosen
    del settled["epochs"], settled["buckets"]
    return settled
