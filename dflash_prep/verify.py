"""Proves a plan: everything it claims is derived anew from its store, by other code than that which planned it."""

from collections.abc import Iterator
from pathlib import Path

import polars as pl

from dflash_prep.anchors import density_ppm
from dflash_prep.cost import KNEE
from dflash_prep.errors import UserError
from dflash_prep.manifest import TOTALS, Plan, table_fingerprint
from dflash_prep.store import Store, content_fingerprint, sample_key


def open_store(plan: Plan, data: Path | None) -> Store:
    """The store of a plan, at its noted path or at `data`; an error if it is another store than was planned."""
    store = Store(data or Path(plan["store"]["path"]))
    if store.fingerprint != plan["store"]["fingerprint"]:
        raise UserError(f"{store.path}: not the store that {plan.path} was made from; plan again, or name it with --data")
    return store


def verify(path: Path, data: Path | None = None) -> Iterator[str]:
    """Yield one line for each part that holds; raises UserError with the reason at the first that does not."""
    plan = Plan(path)
    store = open_store(plan, data)
    check_store(store)
    yield f"store {store.path}: {len(store)} samples, checksums, keys and counts agree"
    index = pl.DataFrame(
        {
            "sample": store.column("sample"),
            "length": store.column("length"),
            "loss": store.column("loss_tokens"),
            "eligible": store.column("eligible"),
        }
    ).with_columns(
        planned=pl.min_horizontal(
            (pl.col("eligible") * density_ppm(plan["anchor_density"]) / 1e6).ceil().cast(pl.Int64), plan["max_anchors"]
        )
    )
    for epoch, summary in enumerate(plan["epochs"]):
        check_epoch(plan, epoch, index)
        yield f"{summary['file']}: {summary['samples']} samples once each in {summary['steps']} steps, within budget"


def check_store(store: Store) -> None:
    """Checksums of all files, and the index against the shards' content."""
    store.check_files()
    index = pl.from_arrow(store.index)
    expect(store.path, "sample numbers", index["sample"].to_list(), list(range(len(store))))
    keys, lengths, losses = [], [], []
    for shard in range(len(store.manifest["shards"])):
        batch = store.batch(shard)
        for ids, spans in zip(batch["input_ids"], batch["loss_spans"], strict=True):
            marks = spans.values.to_numpy().astype("int64")
            keys.append(sample_key(ids.values.to_numpy(), spans.values.to_numpy()))
            lengths.append(len(ids))
            losses.append(int(marks[1::2].sum() - marks[::2].sum()))
    expect(store.path, "keys", index["key"].to_list(), keys)
    expect(store.path, "lengths", index["length"].to_list(), lengths)
    expect(store.path, "numbers of loss tokens", index["loss_tokens"].to_list(), losses)
    expect(store.path, "fingerprint", store.fingerprint, content_fingerprint(keys))
    expect(store.path, "total of tokens", store.manifest["counts"]["tokens"], index["length"].cast(pl.Int64).sum())


def check_epoch(plan: Plan, epoch: int, index: pl.DataFrame) -> None:
    """One epoch file against the index and against what plan.json says of it."""
    summary = plan["epochs"][epoch]
    path = plan.path / summary["file"]
    with plan.open_epoch(epoch) as file:
        table = file.read()
    expect(path, "fingerprint", table_fingerprint(table), summary["fingerprint"])
    rows = pl.from_arrow(table).with_row_index("row")
    check_steps(path, rows, plan["slots"], summary["steps"])
    members = rows.select("row", "samples").explode("samples").drop_nulls()
    members = members.with_columns(pl.col("samples").cast(pl.Int64)).rename({"samples": "sample"})
    check_once(path, members, index)
    check_rows(path, rows, members.join(index, on="sample", how="left"), plan)
    for name in TOTALS:
        expect(path, f"total of {name}", rows[name].cast(pl.Int64).sum(), summary[name])
    expect(path, "number of samples", members.height, summary["samples"])
    expect(path, "number of micro-batches", rows.filter(pl.col("samples").list.len() > 0).height, summary["micro_batches"])


def check_steps(path: Path, rows: pl.DataFrame, slots: int, steps: int) -> None:
    """Every step has exactly `slots` rows, in order; only the last may hold empty ones."""
    disorder = rows.filter((pl.col("step") != pl.col("row") // slots) | (pl.col("slot") != pl.col("row") % slots))
    if disorder.height:
        raise UserError(f"{path}: row {disorder['row'][0]} is out of order (rows go by step, then slot); plan again")
    hollow = rows.filter((pl.col("samples").list.len() == 0) & (pl.col("step") < steps - 1))
    if hollow.height:
        raise UserError(f"{path}: step {hollow['step'][0]} has an empty slot, which only the last may; plan again")


def check_once(path: Path, members: pl.DataFrame, index: pl.DataFrame) -> None:
    """Every sample of the store occurs exactly once."""
    counts = index.select("sample").join(members.group_by("sample").len(), on="sample", how="full", coalesce=True)
    counts = counts.with_columns(pl.col("len").fill_null(0)).sort("sample")
    for sample, count in counts.filter(pl.col("len") != 1).head(1).iter_rows():
        raise UserError(f"{path}: sample {sample} occurs {count} times, not once; plan again")
    if members.height != index.height:
        raise UserError(f"{path}: holds samples that the store does not have; plan again")


def check_rows(path: Path, rows: pl.DataFrame, members: pl.DataFrame, plan: Plan) -> None:
    """Each row's numbers from its samples, and its budgets."""
    packed = plan["strategy"] == "packed"
    derived = members.group_by("row").agg(
        real=pl.col("length").sum(),
        shortest=pl.col("length").min(),
        longest=pl.col("length").max(),
        count=pl.len(),
        loss=pl.col("loss").sum(),
        planned=pl.col("planned").sum(),
        work=cost_of(pl.col("length")).sum(),
    )
    joined = rows.join(derived, on="row", how="left").with_columns(
        pl.col("^(real|shortest|longest|count|loss|planned|work)$").fill_null(0)
    )
    claims = {
        "tokens": pl.col("real"),
        "width": pl.col("real") if packed else pl.col("longest"),
        "padded_tokens": pl.col("real") if packed else pl.col("longest") * pl.col("count"),
        "loss_tokens": pl.col("loss"),
        "anchors": pl.col("planned"),
        "cost": (pl.col("work") if packed else cost_of(pl.col("longest")) * pl.col("count")) / KNEE,
    }
    for name, expression in claims.items():
        kind = pl.Float32 if name == "cost" else pl.Int64
        wrong = joined.filter(pl.col(name).cast(kind) != expression.cast(kind))
        if wrong.height:
            raise UserError(f"{path}: row {wrong['row'][0]} states {name} {wrong[name][0]}, not its samples'; plan again")
    budgets = {"padded_tokens": plan["token_budget"], "anchors": plan["anchor_budget"]}
    for name, budget in budgets.items():
        over = joined.filter(pl.col(name) > budget) if budget else joined.clear()
        if over.height:
            raise UserError(f"{path}: row {over['row'][0]} has {over[name][0]} {name}, the budget is {budget}; plan again")
    check_buckets(path, joined, plan)


def check_buckets(path: Path, rows: pl.DataFrame, plan: Plan) -> None:
    """Each row's samples lie within its bucket's bounds (lo, hi]; without buckets every row states 0."""
    bounds = plan["boundaries"] if plan["strategy"] == "bucketed" else []
    filled = rows.filter(pl.col("count") > 0)
    bucket = filled["bucket"].cast(pl.Int64)
    if bounds:
        known = bucket.clip(0, len(bounds) - 1)
        low, high = (pl.Series(limits, dtype=pl.Int64).gather(known) for limits in ([0, *bounds[:-1]], bounds))
        holds = (bucket == known) & (filled["shortest"] > low) & (filled["longest"] <= high)
    else:
        holds = bucket == 0
    if not holds.all():
        row = filled["row"].filter(~holds)[0]
        raise UserError(f"{path}: row {row} holds a sample outside its bucket's bounds; plan again")


def cost_of(length: pl.Expr) -> pl.Expr:
    """The integer cost of a row, as `cost` defines it."""
    return length.cast(pl.Int64) * (length.cast(pl.Int64) + KNEE)


def expect(path: Path, what: str, found: object, stated: object) -> None:
    """Raise unless two accounts of one thing agree."""
    if found != stated:
        raise UserError(f"{path}: the {what} found differs from what was stated; write it again")
