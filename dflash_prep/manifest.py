"""The plan's files: `plan.json` and one Parquet file an epoch, a row a micro-batch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dflash_prep.batching import Batches, Limits, Samples
from dflash_prep.buckets import assign
from dflash_prep.cost import STATED as COST_STATED
from dflash_prep.cost import Price
from dflash_prep.errors import UserError
from dflash_prep.files import canonical_json, check_regular, digest, file_digest, read_json, stream_digest
from dflash_prep.rules import (
    broken,
    fingerprint,
    flag,
    having,
    list_of,
    number,
    object_of,
    one_of,
    optional,
    share,
    text,
    values_of,
    whole,
    whole_or_null,
)

FORMAT, VERSION = "dflash-plan", 2
ROWS_PER_GROUP = 4096  # what a reader decodes at once; rounded to whole steps
TOTALS = ("tokens", "padded_tokens", "loss_tokens", "anchors")
EPOCH_STATED = {
    "file": text(r"(epoch-\d{3,}|holdout)\.parquet"),
    "checksum": fingerprint,
    "fingerprint": fingerprint,
    **dict.fromkeys(("steps", "micro_batches", "samples"), whole(1)),
    **dict.fromkeys(TOTALS, whole(0)),
}
CERTIFICATE = (
    *("fewest_copies", "most_copies", "most_tokens", "most_anchors", "slots_per_step", "empty_slots", "real_token_share"),
    *("padding_share", "fill", "seconds", "gap_to_optimum", "straggler_share", "straggler_share_of_cost", "straggler_cost"),
    *("design_effect", "step_correlation", "jaccard", "jaccard_random"),
)
ORIGIN = object_of({"path": text(), "fingerprint": fingerprint})
PLACE = object_of(dict.fromkeys(("epoch", "step", "slot", "width", "padded_tokens", "anchors"), whole(0)))
BESIDE_SETTINGS = {
    "format": one_of(FORMAT),
    "version": whole(VERSION, VERSION),
    "fingerprint": fingerprint,
    "store": optional(ORIGIN),
    "stores": optional(list_of(ORIGIN, least=2)),
    "lengths": optional(ORIGIN),
    "sources": object_of({}),
    "calibrated": flag,
    "curve": optional(object_of({})),
    "certificate": having(*CERTIFICATE),
    "rehearse": object_of({"longest": PLACE, "fullest": PLACE}),
    "epochs": list_of(object_of(EPOCH_STATED), least=1),
    "holdout_set": optional(object_of(EPOCH_STATED)),
}
STATED = BESIDE_SETTINGS | {
    "strategy": one_of("bucketed", "packed", "shuffled", "sorted"),
    "bucket_scope": one_of("epoch", "step"),
    "token_budget": whole(1),
    "boundaries": list_of(whole(1)),
    "slots": whole(1, 65535),
    "seed": whole(0),
    "block_size": whole(2),
    "anchor_density": share,
    "max_anchors": whole(1),
    "anchor_budget": whole_or_null(1),
    "align": whole(1),
    "fixed_shapes": flag,
    "holdout": number(0, 1),
    "weights": values_of(number(0, 1e6)),
    "cost": object_of(COST_STATED),
}
EPOCH_SCHEMA = pa.schema(
    [
        ("step", pa.uint32()),
        ("slot", pa.uint16()),
        ("bucket", pa.uint16()),
        ("samples", pa.list_(pa.uint32())),
        ("width", pa.uint32()),
        ("tokens", pa.uint32()),
        ("padded_tokens", pa.uint32()),
        ("loss_tokens", pa.uint32()),
        ("anchors", pa.uint32()),
        ("cost", pa.float32()),
    ]
)


@dataclass(frozen=True)
class Layout:
    """How the samples of a micro-batch lie: end to end (`packed`), or a row each, padded."""

    packed: bool
    bounds: list[int]
    fixed_shapes: bool  # rows padded to their bucket's bound; packed: the flat row padded to the whole budget
    limits: Limits
    price: Price


def epoch_table(batches: Batches, samples: Samples, slots: int, layout: Layout) -> pa.Table:
    """The rows of one epoch, `slots` a step; an empty slot is all zeros."""
    limits, price = layout.limits, layout.price
    sizes, tokens, longest = batches.sizes, batches.total(samples.length), batches.longest(samples.length)
    bucket = assign(longest, layout.bounds) if layout.bounds else np.zeros(len(batches), np.int64)
    if layout.packed:
        flat = limits.width(np.full(len(batches), limits.tokens - limits.align + 1) if layout.fixed_shapes else tokens)
        width = padded = np.where(sizes > 0, flat, 0)
        work = price.token * width + price.square * batches.total(samples.length**2)
    else:
        width = np.array(layout.bounds)[bucket] if layout.fixed_shapes else limits.width(longest)
        width = np.where(sizes > 0, width, 0)
        padded, work = sizes * width, price.rows(sizes, width)
    draft = batches.total(price.blocks(samples.anchors, samples.length))
    columns = {
        "step": np.arange(len(batches)) // slots,
        "slot": np.arange(len(batches)) % slots,
        "bucket": np.where(sizes > 0, bucket, 0),
        "width": width,
        "tokens": tokens,
        "padded_tokens": padded,
        "loss_tokens": batches.total(samples.loss_tokens),
        "anchors": batches.total(samples.anchors),
        "cost": price.seconds(np.where(sizes > 0, price.fixed + work + draft, 0)),
    }
    offsets, flat_samples = pa.array(batches.offsets.astype(np.int32)), pa.array(batches.samples.astype(np.uint32))
    lists = pa.ListArray.from_arrays(offsets, flat_samples, type=pa.list_(pa.uint32()))
    arrays = [lists if field.name == "samples" else pa.array(columns[field.name]).cast(field.type) for field in EPOCH_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=EPOCH_SCHEMA)


def write_epoch(table: pa.Table, path: Path, slots: int) -> None:
    """Write an epoch, row groups cut at step boundaries."""
    rows = max(1, ROWS_PER_GROUP // slots) * slots
    with pq.ParquetWriter(path, EPOCH_SCHEMA, compression="zstd", use_dictionary=["bucket", "width"]) as writer:
        for start in range(0, table.num_rows, rows):
            writer.write_table(table.slice(start, rows), row_group_size=rows)


def epoch_summary(table: pa.Table, path: Path | None) -> dict:
    """What `plan.json` says of one epoch; without a path, of one that is not written."""
    total = {name: int(table[name].to_numpy().astype(np.int64).sum()) for name in TOTALS}
    sizes = members(table)[1]
    return {
        "file": path.name if path else None,
        "checksum": file_digest(path) if path else None,
        "fingerprint": table_fingerprint(table),
        "steps": int(table["step"][-1].as_py()) + 1,
        "micro_batches": int((sizes > 0).sum()),
        "samples": int(sizes.sum()),
        **total,
    }


def members(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """The samples of all micro-batches one after another, and how many each holds."""
    column = table["samples"].combine_chunks()
    return column.flatten().to_numpy(), column.value_lengths().to_numpy()


def table_fingerprint(table: pa.Table) -> str:
    """Of the decoded columns, so equal whatever wrote the file."""
    parts = []
    for name in EPOCH_SCHEMA.names:
        if name == "samples":
            flat, sizes = members(table)
            parts += [sizes.tobytes(), flat.tobytes()]
        else:
            parts.append(table[name].combine_chunks().to_numpy().tobytes())
    return digest(*parts)


def plan_fingerprint(options: dict, data_fingerprint: str, tables: list[dict]) -> str:
    """A plan's fingerprint: of its options, its data's content and every table's columns."""
    return digest(canonical_json(options), data_fingerprint.encode(), *(table["fingerprint"].encode() for table in tables))


def joint_fingerprint(parts: list[str]) -> str:
    """Of several stores: a single one's own."""
    return parts[0] if len(parts) == 1 else digest(*map(str.encode, parts))


class Plan:
    """A finished plan."""

    def __init__(self, path: Path):
        self.path = path
        self._checked: set[tuple[int, ...]] = set()
        if not (path / "plan.json").is_file():
            raise UserError(f"{path}: no plan here; write one with 'dflash-prep plan-epochs -o {path}'")
        self.manifest = read_json(path / "plan.json", "plan's manifest")
        if self.manifest.get("format") != FORMAT or self.manifest.get("version") != VERSION:
            raise UserError(f"{path}: not a plan of format version {VERSION}; remove it and plan again with this release")
        if key := broken(self.manifest, STATED):
            raise UserError(f"{path}: plan.json states no valid {key}; it is damaged, remove it and plan again")
        settings = {key: value for key, value in self.manifest.items() if key not in BESIDE_SETTINGS}
        tables = self["epochs"] + ([self["holdout_set"]] if self["holdout_set"] else [])
        if len(self.origins) == 0 or self["fingerprint"] != plan_fingerprint(settings, self.data_fingerprint, tables):
            raise UserError(
                f"{path}: plan.json was changed after planning (its fingerprint differs); remove it and plan again"
            )

    def __getitem__(self, key: str):
        return self.manifest.get(key)

    @property
    def origins(self) -> list[dict]:
        """Path and fingerprint of each store that was planned, or of the table of lengths in their stead."""
        return self["stores"] or [self[key] for key in ("store", "lengths") if self[key]]

    @property
    def data_fingerprint(self) -> str:
        """Of the content of all that was planned."""
        return joint_fingerprint([origin["fingerprint"] for origin in self.origins])

    @property
    def total_steps(self) -> int:
        """Optimizer steps of all epochs."""
        return sum(epoch["steps"] for epoch in self["epochs"])

    def locate(self, step: int) -> tuple[int, int]:
        """The epoch that a global 0-based step lies in, and the step's number there; past the end: (epochs, 0)."""
        for epoch, summary in enumerate(self["epochs"]):
            if step < summary["steps"]:
                return epoch, step
            step -= summary["steps"]
        return len(self["epochs"]), 0

    def rows(self, epoch: int | None, first_step: int = 0) -> Iterator[dict]:
        """The rows of an epoch (None: of the hold-out) from a step on, decoded one row group at a time."""
        with self.open_epoch(epoch) as file:
            for group in range(file.num_row_groups):
                if file.metadata.row_group(group).column(0).statistics.max >= first_step:
                    for row in file.read_row_group(group).to_pylist():
                        if row["step"] >= first_step:
                            yield row

    def largest(self, column: str) -> int:
        """The largest number in a column of all epochs and the hold-out; their files say it without being decoded."""
        most = []
        for epoch in [*range(len(self["epochs"])), *([None] if self["holdout_set"] else [])]:
            with self.open_epoch(epoch) as file:
                groups = (file.metadata.row_group(group) for group in range(file.num_row_groups))
                parts = (group.column(place) for group in groups for place in range(group.num_columns))
                most += [part.statistics.max for part in parts if part.path_in_schema == column]
        return max(most)

    @contextmanager
    def open_epoch(self, epoch: int | None) -> Iterator[pq.ParquetFile]:
        """The Parquet file of an epoch (None: of the hold-out), proven to be the one that was planned.

        Faults of decoding it are user errors.
        """
        summary = self["holdout_set"] if epoch is None else self["epochs"][epoch]
        path = self.path / summary["file"]
        check_regular(path)
        try:
            with path.open("rb") as raw:
                self._check_bytes(raw, path, summary)
                with pq.ParquetFile(raw) as file:
                    self._check_shape(file, path, summary)
                    yield file
        except (OSError, pa.ArrowException) as fault:
            raise UserError(f"{path}: cannot read the epoch ({fault}); plan again") from None

    def _check_bytes(self, raw: BinaryIO, path: Path, summary: dict) -> None:
        """The checksum of an opened file, once for each file: another may have taken its place since."""
        stat = os.fstat(raw.fileno())
        identity = stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size
        if identity in self._checked:
            return
        if stream_digest(raw) != summary["checksum"]:
            raise UserError(
                f"{path}: its checksum differs from plan.json: plan changed or damaged; plan again and begin anew"
            )
        raw.seek(0)
        self._checked.add(identity)

    def _check_shape(self, file: pq.ParquetFile, path: Path, summary: dict) -> None:
        """Columns and number of rows."""
        if not file.schema_arrow.equals(EPOCH_SCHEMA):
            raise UserError(f"{path}: its columns are not a plan's; plan again with this release")
        rows, slots = file.metadata.num_rows, self["slots"]
        if rows != summary["steps"] * slots:
            raise UserError(
                f"{path}: the number of rows is {rows}, not {summary['steps']} steps of {slots} as plan.json says: "
                "plan changed; plan again"
            )
