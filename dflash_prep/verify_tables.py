"""Proves a plan's tables: their order, every number in them, the budgets, and how often each sample occurs."""

from pathlib import Path

import polars as pl
import pyarrow as pa

from dflash_prep.errors import UserError
from dflash_prep.manifest import TOTALS, Plan, table_fingerprint
from dflash_prep.verify_store import expect

CLOSE = 1e-5  # costs are stated as float32: the relative distance that two of them may have


def check_table(plan: Plan, epoch: int | None, samples: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """The table of an epoch (None: of the hold-out) against its samples and against what plan.json states of it.

    Returns its rows, with `count` and `squares` (Σ width², packed: Σ length²) of each; its members: row and sample, with the
    sample's own columns; and the samples with their extra copies so far.
    """
    summary = plan["holdout_set"] if epoch is None else plan["epochs"][epoch]
    path = plan.path / summary["file"]
    with plan.open_epoch(epoch) as file:
        table = file.read()
    check_nulls(path, table)
    expect(path, "fingerprint", table_fingerprint(table), summary["fingerprint"])
    rows = pl.from_arrow(table).with_row_index("row")
    check_steps(path, rows, plan["slots"], summary["steps"])
    members = rows.select("row", sample=pl.col("samples").cast(pl.List(pl.Int64))).explode("sample").drop_nulls()
    for row, sample in members.filter(pl.col("sample") >= len(samples)).head(1).iter_rows():
        raise UserError(f"{path}: row {row} holds sample {sample}, there are {len(samples)} samples; plan again")
    samples = check_copies(path, members, samples)
    members = members.join(samples, on="sample")
    rows = check_rows(path, rows, members, plan)
    for name in TOTALS:
        expect(path, f"total of {name}", rows[name].sum(), summary[name])
    expect(path, "number of samples", len(members), summary["samples"])
    expect(path, "number of micro-batches", (rows["count"] > 0).sum(), summary["micro_batches"])
    return rows, members, samples


def check_nulls(path: Path, table: pa.Table) -> None:
    """Every number is there."""
    inner = sum(chunk.flatten().null_count for chunk in table["samples"].chunks)
    if inner or any(column.null_count for column in table.columns):
        raise UserError(f"{path}: lacks some of its numbers (nulls); plan again")


def check_steps(path: Path, rows: pl.DataFrame, slots: int, steps: int) -> None:
    """Every step has exactly `slots` rows, in order; only the last may hold empty ones."""
    disorder = rows.filter((pl.col("step") != pl.col("row") // slots) | (pl.col("slot") != pl.col("row") % slots))
    if len(disorder):
        raise UserError(f"{path}: row {disorder['row'][0]} is out of order (rows go by step, then slot); plan again")
    hollow = rows.filter((pl.col("samples").list.len() == 0) & (pl.col("step") < steps - 1))
    if len(hollow):
        raise UserError(f"{path}: step {hollow['step'][0]} has an empty slot, which only the last may; plan again")


def check_rows(path: Path, rows: pl.DataFrame, members: pl.DataFrame, plan: Plan) -> pl.DataFrame:
    """Each row's numbers from its samples, and its budgets; returns the rows as check_table does."""
    length, anchors = pl.col("length"), pl.col("anchors")
    own = members.group_by("row").agg(
        count=pl.len().cast(pl.Int64),
        real=length.sum(),
        shortest=length.min(),
        longest=length.max(),
        length_squares=(length**2).sum(),
        loss=pl.col("loss_tokens").sum(),
        blocks=anchors.sum(),
        reach=(anchors * length).sum(),
    )
    numbers = pl.col("step", "slot", "bucket", "width", *TOTALS).cast(pl.Int64), pl.col("cost").cast(pl.Float64)
    rows = (
        rows.with_columns(numbers).join(own, on="row", how="left").with_columns(pl.col(own.columns).fill_null(0)).sort("row")
    )
    check_buckets(path, rows, plan)
    rows = rows.with_columns(computed=pl.when(pl.col("count") > 0).then(width(rows, plan)).otherwise(0))
    packed, row_squares = plan["strategy"] == "packed", pl.col("count") * pl.col("computed") ** 2
    rows = rows.with_columns(squares=pl.col("length_squares") if packed else row_squares)
    claims = {
        "tokens": pl.col("real"),
        "width": pl.col("computed"),
        "padded_tokens": pl.col("computed") if packed else pl.col("count") * pl.col("computed"),
        "loss_tokens": pl.col("loss"),
        "anchors": pl.col("blocks"),
        "cost": seconds(plan["cost"]),
    }
    for name, claim in claims.items():
        found = rows.select("row", stated=pl.col(name), found=claim)
        close = (pl.col("stated") - pl.col("found")).abs() <= (pl.col("found") * CLOSE if name == "cost" else 0)
        for row, stated, true in found.filter(~close).head(1).iter_rows():
            raise UserError(f"{path}: row {row} states {name} {stated}, its samples have {true}; plan again")
    for name, budget in {"padded_tokens": plan["token_budget"], "anchors": plan["anchor_budget"]}.items():
        over = rows.filter(pl.col(name) > budget) if budget else rows.clear()
        if len(over):
            raise UserError(f"{path}: row {over['row'][0]} has {over[name][0]} {name}, the budget is {budget}; plan again")
    return rows


def width(rows: pl.DataFrame, plan: Plan) -> pl.Expr:
    """How wide a row of samples is as computed."""
    align, bounds = plan["align"], plan["boundaries"]
    if plan["strategy"] == "packed":
        least = plan["token_budget"] // align * align if plan["fixed_shapes"] else 0
        return pl.max_horizontal(aligned(pl.col("real"), align), least)
    if plan["fixed_shapes"] and bounds:
        return pl.lit(pl.Series(bounds, dtype=pl.Int64).gather(rows["bucket"]))
    return aligned(pl.col("longest"), align)


def aligned(tokens: pl.Expr, align: int) -> pl.Expr:
    """Rounded up to a multiple of `align`."""
    return (tokens + (align - 1)) // align * align


def seconds(cost: dict) -> pl.Expr:
    """What a row costs by the plan's model; nothing where it is empty."""
    target = cost["c0"] + cost["a"] * pl.col("padded_tokens") + cost["b"] * pl.col("squares")
    draft = cost["d"] * pl.col("blocks") + cost["e"] * pl.col("reach")
    return pl.when(pl.col("count") > 0).then(target + draft).otherwise(0.0)


def check_buckets(path: Path, rows: pl.DataFrame, plan: Plan) -> None:
    """Each row's samples lie within its bucket's bounds (lo, hi]; an empty row, and every row without buckets, states 0."""
    bounds = plan["boundaries"] if plan["strategy"] == "bucketed" else []
    bucket = rows["bucket"]
    holds = bucket == 0
    if bounds:
        known = bucket.clip(0, len(bounds) - 1)
        low, high = (pl.Series(limits, dtype=pl.Int64).gather(known) for limits in ([0, *bounds[:-1]], bounds))
        inside = (bucket == known) & (rows["shortest"] > low) & (rows["longest"] <= high)
        holds = (holds & (rows["count"] == 0)) | inside
    if not holds.all():
        row = rows["row"].filter(~holds)[0]
        raise UserError(f"{path}: row {row} holds a sample outside its bucket's bounds; plan again")


def check_copies(path: Path, members: pl.DataFrame, samples: pl.DataFrame) -> pl.DataFrame:
    """Each sample occurs `whole` times, and `part` samples of its source once more; none is barred.

    Those once more are fresh: none has an extra copy again before all of its source have had one. Returns the samples with
    their extra copies so far.
    """
    occurs = members.group_by("sample").agg(times=pl.len().cast(pl.Int64))
    samples = samples.join(occurs, on="sample", how="left").with_columns(pl.col("times").fill_null(0)).sort("sample")
    for sample in samples.filter(pl.col("barred") & (pl.col("times") > 0))["sample"].head(1):
        raise UserError(f"{path}: holds sample {sample}, which belongs on the other side of the hold-out; plan again")
    more = pl.col("times") - pl.col("whole")
    wrong = samples.filter(~more.is_between(0, pl.col("part").clip(0, 1)))
    for sample, times, whole, part in wrong.select("sample", "times", "whole", "part").head(1).iter_rows():
        stated = f"{whole} or {whole + 1}" if part else whole
        raise UserError(f"{path}: sample {sample} occurs {times} times, not {stated}; plan again")
    samples = samples.with_columns(extra=pl.col("extra") + more)
    extra = pl.col("extra")
    figures = pl.col("part").first(), more.sum().alias("drawn"), extra.min().alias("least"), extra.max().alias("most")
    sources = samples.filter(pl.col("part") > 0).group_by("source").agg(figures).sort("source")
    for source, part, drawn, least, most in sources.iter_rows():
        if drawn != part:
            raise UserError(f"{path}: {drawn} samples of source '{source}' occur once more, not {part}; plan again")
        if most > least + 1:
            raise UserError(f"{path}: draws samples of source '{source}' again before all of it had their turn; plan again")
    return samples.drop("times")
