"""Proves a plan's certificate: each figure derived anew from the tables. `certificate` says what the figures mean."""

import math
from dataclasses import dataclass
from itertools import combinations

import polars as pl

from dflash_prep.errors import UserError
from dflash_prep.manifest import Plan

COMPARED = 8  # the first epochs, whose compositions are compared with one another
KNEE = 24_576  # straggler shares are judged by L · (1 + L / 24,576), whatever cost was planned by
CLOSE, NOTHING = 1e-6, 1e-12  # the relative distance that two accounts of a figure may have, and the absolute one
LEVEL = 1e-9  # mean log lengths that differ by less are equal but for rounding


@dataclass(frozen=True)
class Tally:
    """What one epoch's table comes to."""

    steps: int
    empty_slots: int
    tokens: int
    padded_tokens: int
    filled: int  # real tokens of all steps but the last
    most_tokens: int
    most_anchors: int
    fewest: int  # occurrences of a sample that may occur
    most: int
    seconds: float  # Σ over steps of their dearest slot
    busy: float  # Σ over slots
    floor: float  # Σ over slots if nothing were padded and every slot full
    straggler_share: float
    design_effect: float | None
    step_correlation: float | None
    company: pl.DataFrame  # sample and the row where it first occurs; empty beyond the epochs that are compared
    widest: int
    dearest: float
    rehearsed: dict[str, dict]  # by what plan.json calls them: the rows of this epoch that it names


def recount(plan: Plan, epoch: int, rows: pl.DataFrame, members: pl.DataFrame, samples: pl.DataFrame) -> Tally:
    """The tally of an epoch; `rows` and `members` as check_table returns them, `samples` as they were settled."""
    linear = "tokens" if plan["strategy"] == "packed" else "padded_tokens"
    rows = rows.with_columns(judged=pl.col(linear) + pl.col("squares") / KNEE)
    slowest = rows.group_by("step").agg(pl.col("cost", "judged").max())
    met = members.group_by("sample").agg(pl.col("row").min(), copies=pl.len())
    effect, correlation = likeness(members, plan["slots"])
    met = met.with_columns(pl.col("sample", "row").cast(pl.UInt32))  # to keep the company of eight epochs
    named = {
        name: rows.filter(step=at["step"], slot=at["slot"]) for name, at in plan["rehearse"].items() if at["epoch"] == epoch
    }
    return Tally(
        steps=len(slowest),
        empty_slots=(rows["count"] == 0).sum(),
        tokens=rows["tokens"].sum(),
        padded_tokens=rows["padded_tokens"].sum(),
        filled=rows.filter(pl.col("step") < pl.col("step").max())["tokens"].sum(),
        most_tokens=rows["padded_tokens"].max(),
        most_anchors=rows["anchors"].max(),
        fewest=met["copies"].min() if len(met) == (samples["weight"] > 0).sum() else 0,
        most=met["copies"].max(),
        seconds=slowest["cost"].sum(),
        busy=rows["cost"].sum(),
        floor=least_seconds(members, plan),
        straggler_share=1 - rows["judged"].sum() / plan["slots"] / slowest["judged"].sum(),
        design_effect=effect,
        step_correlation=correlation,
        company=met.select("sample", "row") if epoch < COMPARED else met.select("sample", "row").clear(),
        widest=rows["width"].max(),
        dearest=rows["cost"].max(),
        rehearsed={name: row for name, found in named.items() for row in found.to_dicts()},
    )


def least_seconds(members: pl.DataFrame, plan: Plan) -> float:
    """The slot-seconds of an epoch's samples without padding, in as few micro-batches as their tokens fill."""
    cost, length, anchors = plan["cost"], pl.col("length"), pl.col("anchors")
    tokens, squares, blocks, reach = members.select(
        length.sum().alias("tokens"),
        (length**2).sum().alias("squares"),
        anchors.sum(),
        (anchors * length).sum().alias("reach"),
    ).row(0)
    launches = -(-tokens // plan["token_budget"])
    return cost["c0"] * launches + cost["a"] * tokens + cost["b"] * squares + cost["d"] * blocks + cost["e"] * reach


def likeness(members: pl.DataFrame, slots: int) -> tuple[float | None, float | None]:
    """The design effect of an epoch's steps, and the correlation of each step's mean log length with the next one's."""
    logs = members.select(step=pl.col("row") // slots, log=pl.col("length").log())
    steps = logs.group_by("step").agg(mean=pl.col("log").mean(), count=pl.len()).sort("step")
    effect = correlation = None
    if len(steps) > 1 and members["length"].n_unique() > 1:
        effect = steps["mean"].var() * steps["count"].mean() / logs["log"].var(ddof=0)
    pairs = steps.select(one="mean", next=pl.col("mean").shift(-1)).drop_nulls()
    if len(pairs) > 1 and all(pairs[name].max() - pairs[name].min() > LEVEL for name in pairs.columns):
        correlation = pairs.select(pl.corr("one", "next")).item()
    return effect, correlation


def check_certificate(plan: Plan, epochs: list[Tally]) -> None:
    """Every figure of the certificate, and no other, is what the tables come to."""
    found, stated = derived(plan, epochs), plan["certificate"]
    for name in [*found, *(stated.keys() - found.keys())]:
        if name not in found or name not in stated or not agree(found[name], stated[name]):
            true, claim = found.get(name, "nothing"), stated.get(name, "nothing")
            raise UserError(f"{plan.path}: the certificate states {name} {claim}, the tables come to {true}; plan again")


def derived(plan: Plan, epochs: list[Tally]) -> dict:
    """The certificate anew."""
    total = {name: sum(getattr(epoch, name) for epoch in epochs) for name in ("tokens", "padded_tokens", "steps", "filled")}
    slots, seconds = plan["slots"], sum(epoch.seconds for epoch in epochs)
    room = (total["steps"] - len(epochs)) * slots * plan["token_budget"]
    jaccard, random = overlap([epoch.company for epoch in epochs[:COMPARED]])
    return {
        "fewest_copies": min(epoch.fewest for epoch in epochs),
        "most_copies": max(epoch.most for epoch in epochs),
        "most_tokens": max(epoch.most_tokens for epoch in epochs),
        "most_anchors": max(epoch.most_anchors for epoch in epochs),
        "slots_per_step": slots,
        "empty_slots": sum(epoch.empty_slots for epoch in epochs),
        "real_token_share": total["tokens"] / total["padded_tokens"],
        "padding_share": 1 - total["tokens"] / total["padded_tokens"],
        "fill": total["filled"] / room if room else None,
        "seconds": seconds,
        "gap_to_optimum": seconds * slots / sum(epoch.floor for epoch in epochs) - 1,
        "straggler_share": mean([epoch.straggler_share for epoch in epochs]),
        "straggler_share_of_cost": 1 - sum(epoch.busy for epoch in epochs) / (slots * seconds),
        "straggler_cost": f"L*(1+L/{KNEE})",
        "design_effect": mean([epoch.design_effect for epoch in epochs]),
        "step_correlation": mean([epoch.step_correlation for epoch in epochs]),
        "jaccard": jaccard,
        "jaccard_random": random,
    }


def overlap(epochs: list[pl.DataFrame]) -> tuple[float | None, float | None]:
    """The mean Jaccard index of who shares a row with whom, over all pairs of epochs, and that of random rows.

    None for a single epoch, or where nobody ever meets.
    """
    found, random = [], []
    for one, other in combinations(epochs, 2):
        both = one.join(other, on="sample", how="full", coalesce=True, suffix="_other")
        first, second, shared = pairs(both, "row"), pairs(both, "row_other"), pairs(both, "row", "row_other")
        if first + second == 0:
            return None, None
        chance = first * second / math.comb(len(both), 2)
        found.append(shared / (first + second - shared))
        random.append(chance / (first + second - chance))
    return mean(found), mean(random)


def pairs(frame: pl.DataFrame, *columns: str) -> int:
    """How many pairs of rows agree in all of some columns; where one is missing, nobody agrees."""
    size = pl.col("len").cast(pl.Int64)
    groups = frame.drop_nulls(columns).group_by(columns).len()
    return groups.select((size * (size - 1) // 2).sum()).item()


def mean(values: list[float | None]) -> float | None:
    """The mean of those that are defined."""
    return pl.Series(values, dtype=pl.Float64).mean()


def agree(found: object, stated: object) -> bool:
    """Whether two accounts of a figure are the same up to rounding."""
    if isinstance(found, float) and type(stated) in (int, float):
        return math.isclose(found, stated, rel_tol=CLOSE, abs_tol=NOTHING)
    return type(found) is type(stated) and found == stated


def check_rehearsal(plan: Plan, epochs: list[Tally]) -> None:
    """`rehearse` names a micro-batch of the largest width and one of the largest cost, and states its sizes."""
    rehearsed = {name: row for epoch in epochs for name, row in epoch.rehearsed.items()}
    largest = {"longest": ("width", max(t.widest for t in epochs)), "fullest": ("cost", max(t.dearest for t in epochs))}
    for name, (column, most) in largest.items():
        place, row = plan["rehearse"][name], rehearsed.get(name)
        if row is None or row[column] != most:
            raise UserError(f"{plan.path}: the {name} micro-batch to rehearse is not where plan.json says; plan again")
        for size in ("width", "padded_tokens", "anchors"):
            if place[size] != row[size]:
                raise UserError(
                    f"{plan.path}: the {name} micro-batch to rehearse has {size} {row[size]}, not {place[size]}; plan again"
                )
