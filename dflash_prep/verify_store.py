"""Proves a token store: its checksums, and its index and counts against what the shards hold."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import polars as pl
import pyarrow as pa

from dflash_prep.errors import UserError
from dflash_prep.files import digest
from dflash_prep.store import Store, content_fingerprint


def expect(path: Path, what: str, found: object, stated: object) -> None:
    """Raise unless two accounts of one thing agree."""
    if found != stated:
        raise UserError(f"{path}: the {what} is {found}, stated is {stated}; changed or damaged, write it again")


def check_store(store: Store) -> None:
    """Checksums of all files, then every column of the index and every total; UserError at the first that differs."""
    store.check_files()
    shards = [shard_samples(store, number) for number in range(len(store.manifest["shards"]))]
    found, index = pl.concat(shards).with_row_index("sample"), pl.from_arrow(store.index)
    for name in found.columns:
        wrong = (found[name] != index[name].cast(found[name].dtype)).fill_null(True).arg_true()
        if len(wrong):
            sample = wrong[0]
            expect(store.path, f"{name} of sample {sample}", found[name][sample], index[name][sample])
    counts = store.manifest["counts"]
    for name, column in {"tokens": "length", "loss_tokens": "loss_tokens", "eligible": "eligible"}.items():
        expect(store.path, f"total of {name}", found[column].sum(), counts[name])
    expect(store.path, "longest sample", found["length"].max(), counts["longest"])
    records = len(store) + sum(counts["rejected"].values()) - counts.get("pieces", 0)
    expect(store.path, "number of records", records, counts["records"])
    expect(store.path, "fingerprint", content_fingerprint(found["key"].to_list()), store.fingerprint)


def shard_samples(store: Store, shard: int) -> pl.DataFrame:
    """What the index should state of a shard's samples: shard, row, length, loss_tokens, eligible and key."""
    batch = store.batch(shard)
    ids, spans = batch["input_ids"], batch["loss_spans"]
    marks, rise = pl.col("marks"), pl.col("marks").list.diff()
    frame = pl.DataFrame(
        {
            "length": pl.Series(ids).list.len().cast(pl.Int64),
            "marks": pl.Series(spans).cast(pl.List(pl.Int64)),
            "key": [digest(*pair) for pair in zip(pieces(ids), pieces(spans), strict=True)],
        }
    ).with_row_index("row")
    rising, even = rise.list.min().fill_null(0) >= 0, marks.list.len() % 2 == 0
    within = marks.list.max().fill_null(0) <= pl.col("length")
    if len(broken := frame.filter(~(rising & even & within))):
        raise UserError(
            f"{store.path}: the loss spans of row {broken['row'][0]} in shard {shard} are none of its sample; tokenize again"
        )
    inside = rise.list.gather_every(2, 1)  # from each start to its end
    return frame.select(
        "row",
        "length",
        "key",
        shard=pl.lit(shard, pl.UInt32),
        loss_tokens=inside.list.sum(),
        eligible=inside.list.eval((pl.element() - 1).clip(0)).list.sum(),
    )


def pieces(column: pa.ListArray) -> Iterator[bytes]:
    """The rows of a list column as bytes."""
    values, offsets = column.values.to_numpy(), column.offsets.to_pylist()
    return (values[start:end].tobytes() for start, end in pairwise(offsets))
