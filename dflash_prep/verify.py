"""Proves a plan: all that it claims is derived anew from what was planned, by other code than that which planned it.

Here: what was planned, and what the plan's options make of each sample. `verify_store` proves a store, `verify_tables` each
epoch, `verify_certificate` the figures.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import polars as pl

from dflash_prep.anchors import PPM, density_ppm
from dflash_prep.errors import UserError
from dflash_prep.manifest import Plan
from dflash_prep.pool import HOLDOUT_STREAM, from_lengths
from dflash_prep.rng import stream
from dflash_prep.store import Store
from dflash_prep.stores import Stores
from dflash_prep.verify_certificate import check_certificate, check_rehearsal, recount
from dflash_prep.verify_store import check_store, expect
from dflash_prep.verify_tables import check_table


def open_stores(plan: Plan, data: Sequence[Path] = ()) -> Stores:
    """The stores of a plan, at their noted paths or at `data`; UserError if they are others than were planned."""
    if plan["lengths"]:
        raise UserError(f"{plan.path}: was planned from lengths alone; tokenize and plan again")
    paths = tuple(data) or tuple(Path(origin["path"]) for origin in plan.origins)
    if len(paths) != len(plan.origins):
        raise UserError(
            f"{plan.path}: was made from {len(plan.origins)} stores, --data names {len(paths)}; name each, in the same order"
        )
    for path, origin in zip(paths, plan.origins, strict=True):
        if Store(path).fingerprint != origin["fingerprint"]:
            raise UserError(f"{path}: not the store that {plan.path} was made from; plan again, or name it with --data")
    return Stores(paths)


def verify(path: Path, data: Sequence[Path] = ()) -> Iterator[str]:
    """Yield one line for each part that holds; raises UserError with the reason at the first that does not.

    data: where the plan's stores, or its table of lengths, lie now; empty: where they lay.
    """
    plan = Plan(path)
    if plan["lengths"]:
        found = listed_samples(plan, data)
        yield f"lengths: those of the {len(found)} samples that were planned"
    else:
        stores = open_stores(plan, data)
        for store in stores.parts:
            check_store(store)
            yield f"store {store.path}: {len(store)} samples, checksums, keys and counts agree"
        found = stored_samples(stores)
    samples = settled(plan, found)
    check_boundaries(plan, samples)
    drawn, tallies = samples, []
    for epoch, summary in enumerate(plan["epochs"]):
        rows, members, drawn = check_table(plan, epoch, drawn)
        tallies.append(recount(plan, epoch, rows, members, samples))
        yield f"{summary['file']}: {summary['samples']} samples as often as stated, {summary['steps']} steps within budget"
    if held := plan["holdout_set"]:
        check_table(plan, None, set_apart(samples))
        yield f"{held['file']}: {held['samples']} samples that no epoch has, within budget"
    check_certificate(plan, tallies)
    check_rehearsal(plan, tallies)
    yield f"certificate: {len(plan['certificate'])} figures and what to rehearse agree"


def listed_samples(plan: Plan, data: Sequence[Path]) -> pl.DataFrame:
    """The samples of the plan's table of lengths: length, loss_tokens, eligible, source and chance, a row each."""
    if len(data) > 1:
        raise UserError(f"{plan.path}: was made from one table of lengths, --data names {len(data)}; name that one")
    path = data[0] if data else Path(plan["lengths"]["path"])
    pool = from_lengths(path, chance=False)
    if pool.fingerprint != plan["lengths"]["fingerprint"]:
        raise UserError(f"{path}: not the lengths that {plan.path} was made from; plan again, or name them with --data")
    frame = pl.DataFrame(
        {
            "length": pool.length,
            "loss_tokens": pool.loss_tokens,
            "source": pl.Series(pool.sources).gather(pool.source),
            "chance": stream((HOLDOUT_STREAM,), len(pool)),
        }
    )
    return frame.with_columns(pl.col("chance") // 2**32, eligible=(pl.col("loss_tokens") - 1).clip(0))


def stored_samples(stores: Stores) -> pl.DataFrame:
    """The same of the samples of stores, one store after another."""
    columns = (
        pl.col("length", "loss_tokens", "eligible").cast(pl.Int64),
        pl.col("source").cast(pl.String),
        pl.col("key").str.head(8).str.to_integer(base=16).alias("chance"),
    )
    return pl.concat(pl.from_arrow(part.index).select(columns) for part in stores.parts)


def settled(plan: Plan, samples: pl.DataFrame) -> pl.DataFrame:
    """What the plan's options make of each sample.

    Adds: sample; anchors; barred: whether it is held out; its source's weight, whole and part (see `weighed`), 0 if it is
    barred; extra: how many copies beyond `whole` it has had, 0 before the first epoch.
    """
    barred = pl.col("chance") < round(plan["holdout"] * 2**32)
    samples = samples.with_row_index("sample").with_columns(pl.col("sample").cast(pl.Int64), barred=barred)
    expect(plan.path, "presence of a hold-out", bool(samples["barred"].any()), plan["holdout_set"] is not None)
    eligible, density = pl.col("eligible"), density_ppm(plan["anchor_density"])
    return (
        samples.join(weighed(plan, samples), on="source")
        .with_columns(
            **{name: pl.when("barred").then(0).otherwise(pl.col(name)) for name in ("weight", "whole", "part")},
            anchors=pl.min_horizontal((eligible * density + (PPM - 1)) // PPM, plan["max_anchors"]),
            extra=pl.lit(0, pl.Int64),
        )
        .sort("sample")
    )


def weighed(plan: Plan, samples: pl.DataFrame) -> pl.DataFrame:
    """Each source's weight, how often an epoch has all of its samples (whole) and how many of them once more (part)."""
    sources = samples.group_by("source", maintain_order=True).agg(free=(~pl.col("barred")).sum())
    if unknown := sorted({*plan["weights"], *plan["sources"]} - {*sources["source"]}):
        raise UserError(f"{plan.path}: names the source '{unknown[0]}', which is not in what was planned; plan again")
    rows = []
    for source, free in sources.iter_rows():
        weight = Fraction(repr(plan["weights"].get(source, 1)))  # 0.3 is three tenths
        whole = int(weight)
        part = round((weight - whole) * free)
        counts = {"samples": free, "weight": float(weight), "per_epoch": whole * free + part}
        expect(plan.path, f"source '{source}'", counts, plan["sources"].get(source))
        rows.append((source, float(weight), whole, part))
    return pl.DataFrame(rows, {"source": pl.String, "weight": pl.Float64, "whole": pl.Int64, "part": pl.Int64}, orient="row")


def set_apart(samples: pl.DataFrame) -> pl.DataFrame:
    """What the hold-out has: each sample once that the epochs have not, and the others barred."""
    return samples.with_columns(whole=pl.col("barred").cast(pl.Int64), part=pl.lit(0, pl.Int64), barred=~pl.col("barred"))


def check_boundaries(plan: Plan, samples: pl.DataFrame) -> None:
    """They rise, are aligned and reach the longest row; that one alone without buckets, none where each step is cut anew."""
    bounds, align = plan["boundaries"], plan["align"]
    longest = -(-samples["length"].max() // align) * align
    if plan["strategy"] != "bucketed":
        holds = bounds == [longest]
    elif plan["bucket_scope"] == "step":
        holds = bounds == []
    else:
        holds = bool(bounds) and bounds[-1] >= longest
        holds = holds and all(low < high and high % align == 0 for low, high in pairwise([0, *bounds]))
    if not holds:
        raise UserError(f"{plan.path}: the boundaries {bounds} are none for rows of up to {longest} tokens; plan again")
