"""A plan's scheme: every choice settled, so that each epoch can be made by itself."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa

from dflash_prep import schedule
from dflash_prep.anchors import anchor_count, density_ppm
from dflash_prep.batching import FREE, Batches, Limits, Samples
from dflash_prep.buckets import assign, curve, elbow, expected, histogram, padding, refined
from dflash_prep.cost import CostModel, Price, price
from dflash_prep.errors import UserError
from dflash_prep.manifest import Layout, epoch_table
from dflash_prep.mixture import Mixture, mix
from dflash_prep.pool import Pool

MOST_TOKENS = 32_768
LEAST_STEPS = 64
HOLDOUT = 2**32  # the number of the hold-out's "epoch", which no epoch has


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the user asked for; None stands for `auto`."""

    epochs: int = 6
    strategy: str = "bucketed"
    bucket_scope: str = "epoch"
    buckets: int | None = None
    boundaries: tuple[int, ...] | None = None
    fixed_shapes: bool = False
    align: int = 1
    token_budget: int | None = None
    anchor_density: float = 0.25
    max_anchors: int = 512
    block_size: int = 16
    anchor_budget: int | None = None
    slots: int = 8
    seed: int = 0
    weights: tuple[tuple[str, float], ...] = ()
    holdout: float = 0.0
    cost: CostModel = field(default_factory=CostModel)
    calibrated: bool = False  # whether the cost was measured

    @property
    def has_buckets(self) -> bool:
        """Whether boundaries are fixed for the whole run."""
        return self.strategy == "bucketed" and self.bucket_scope == "epoch"


@dataclass(frozen=True)
class Curve:
    """How the boundaries were chosen: the expected seconds of an epoch's micro-batches, all of them one after another."""

    seconds: list[float]  # for 1, 2, … buckets
    chosen: float  # with the plan's boundaries
    optimum: float  # with the best boundaries of as many buckets
    padding: list[float]  # the expected share of padding for 1, 2, … buckets

    def as_dict(self) -> dict:
        """As `plan.json` states it."""
        return asdict(self)


@dataclass(frozen=True)
class Scheme:
    """Everything that decides a plan."""

    pool: Pool
    mixture: Mixture
    samples: Samples
    options: PlanOptions
    limits: Limits
    price: Price
    bounds: list[int]
    curve: Curve | None

    @property
    def layout(self) -> Layout:
        """How rows become a table."""
        options = self.options
        return Layout(options.strategy == "packed", self.bounds, options.fixed_shapes, self.limits, self.price)

    def table(self, epoch: int) -> pa.Table:
        """The rows of one epoch: of the scheme and its number alone."""
        order = self.mixture.order(self.options.seed, epoch)
        return epoch_table(self._steps(order, epoch), self.samples, self.options.slots, self.layout)

    def holdout_table(self) -> pa.Table:
        """The rows of the hold-out, planned as an epoch is."""
        order = self.mixture.held_order(self.options.seed)
        return epoch_table(self._steps(order, HOLDOUT), self.samples, self.options.slots, self.layout)

    def _steps(self, order: np.ndarray, epoch: int) -> Batches:
        options = self.options
        return choose_strategy(options, self.bounds)(
            order, self.samples, self.limits, self.price, options.slots, (options.seed, epoch)
        )

    def settings(self) -> dict:
        """The options as `plan.json` states them, every `auto` replaced by what was chosen."""
        options = self.options
        settled = asdict(options) | {
            "token_budget": self.limits.tokens,
            "boundaries": self.bounds,
            "bucket_scope": options.bucket_scope if options.strategy == "bucketed" else "epoch",
            "weights": {share.source: float(share.weight) for share in self.mixture.shares if share.weight != 1},
            "cost": self.price.model.as_dict(),
        }
        del settled["epochs"], settled["buckets"], settled["calibrated"]
        return settled


def settle(pool: Pool, options: PlanOptions) -> Scheme:
    """Choose whatever was left open: budgets, boundaries, and the integers of the cost model."""
    check_options(options)
    mixture = mix(pool, options.weights, options.holdout)
    anchors = anchor_count(pool.eligible, density_ppm(options.anchor_density), options.max_anchors)
    samples = Samples(pool.length, pool.loss_tokens, anchors)
    planned = np.concatenate([mixture.drawn(options.seed, 0), mixture.held])
    limits = choose_limits(samples, planned, options)
    longest = max(int(limits.width(samples.length.max())), *(options.boundaries or (0,)))
    rounded = price(
        options.cost,
        limits.tokens,
        longest,
        min(limits.anchors, densest(samples, limits.tokens)),
        int(samples.anchors.max()),
        max(len(planned), options.slots),
    )
    bounds, seconds = choose_boundaries(samples, planned, limits, rounded, options)
    return Scheme(pool, mixture, samples, options, limits, rounded, bounds, seconds)


def densest(samples: Samples, tokens: int) -> int:
    """The most anchors that `tokens` tokens can hold: those of the sample that is densest in them, over and over."""
    at = int((samples.anchors / samples.length).argmax())
    return -(-int(samples.anchors[at]) * tokens // int(samples.length[at]))


def check_options(options: PlanOptions) -> None:
    """Refuse options that contradict each other."""
    if options.boundaries and options.buckets:
        raise UserError("--boundaries and --buckets are both given; leave one of them out")
    if (options.boundaries or options.buckets) and not options.has_buckets:
        what = (
            "--bucket-scope step cuts each step anew"
            if options.strategy == "bucketed"
            else f"--strategy {options.strategy} has no buckets"
        )
        raise UserError(f"{what}; leave --boundaries and --buckets out")
    if options.fixed_shapes and not (options.has_buckets or options.strategy == "packed"):
        raise UserError(
            "--fixed-shapes pads to a bucket's bound or, packed, to the budget; plan with --bucket-scope epoch or packed"
        )


def choose_limits(samples: Samples, planned: np.ndarray, options: PlanOptions) -> Limits:
    """The budgets: as given, or so that an epoch has at least 64 steps where the longest sample allows."""
    align = options.align
    width = -(-samples.length // align) * align
    even = int(samples.length[planned].sum()) // (LEAST_STEPS * options.slots) // align * align
    tokens = options.token_budget or min(MOST_TOKENS // align * align, max(int(width.max()), even))
    check_fits(
        "tokens" if align == 1 else f"tokens (a multiple of {align})",
        width,
        tokens,
        "raise --token-budget or tokenize with a smaller --max-length",
    )
    if options.anchor_budget:
        check_fits("anchors", samples.anchors, options.anchor_budget, "raise --anchor-budget or lower --max-anchors")
    return Limits(tokens, options.anchor_budget or FREE, align)


def check_fits(what: str, values: np.ndarray, budget: int, remedy: str) -> None:
    """No sample may be over a budget by itself."""
    worst = int(values.argmax())
    if values[worst] > budget:
        raise UserError(f"sample {worst} has {values[worst]} {what}, the budget is {budget}: {remedy}")


def choose_boundaries(
    samples: Samples, planned: np.ndarray, limits: Limits, rounded: Price, options: PlanOptions
) -> tuple[list[int], Curve | None]:
    """The buckets' inclusive upper bounds; one bucket where there are none, [] where each step cuts its own."""
    longest = int(limits.width(samples.length.max()))
    if not options.has_buckets:
        return ([longest] if options.strategy != "bucketed" else []), None
    lengths = samples.length[planned]
    draft = int(rounded.blocks(samples.anchors[planned], lengths).sum())
    counted = histogram(lengths, draft, limits, rounded, options.fixed_shapes)
    found = curve(counted)
    if options.boundaries:
        bounds = [int(limits.width(bound)) for bound in options.boundaries]
        bounds = sorted(set(bounds))
        if bounds[-1] < longest:
            raise UserError(f"--boundaries end at {bounds[-1]}, the longest sample has {longest} tokens; let them end there")
        if options.fixed_shapes and bounds[-1] > limits.tokens:
            raise UserError(
                f"--boundaries end at {bounds[-1]}, above the budget of {limits.tokens} tokens; padded rows fit nowhere"
            )
    else:
        count = min(options.buckets, len(found)) if options.buckets else elbow(found)
        bounds = refined(counted, found[count - 1][1])
        bounds[-1] = max(bounds[-1], longest)  # a sample that only later epochs draw may be longer
    used = len(np.unique(assign(counted.width, bounds)))
    optimum = expected(counted, refined(counted, found[min(used, len(found)) - 1][1]))
    in_seconds = [
        float(rounded.seconds(cost)) for cost in (*(cost for cost, _ in found), expected(counted, bounds), optimum)
    ]
    tokens = int(lengths.sum())
    padded = [padding(counted, each, tokens) for _, each in found]
    return bounds, Curve(in_seconds[:-2], *in_seconds[-2:], padded)


def choose_strategy(options: PlanOptions, bounds: list[int]) -> Callable[..., Batches]:
    """The function that makes an epoch's steps."""
    if options.has_buckets:
        return partial(schedule.bucketed_steps, bounds=bounds, fixed_shapes=options.fixed_shapes)
    return {
        "sorted": schedule.sorted_steps,
        "shuffled": schedule.shuffled_steps,
        "packed": schedule.packed_steps,
        "bucketed": schedule.step_bucketed_steps,
    }[options.strategy]
