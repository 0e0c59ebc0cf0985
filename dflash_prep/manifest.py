"""The plan's files: `plan.json` and one Parquet file an epoch, a row a micro-batch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dflash_prep.batching import Samples
from dflash_prep.buckets import assign
from dflash_prep.cost import row_cost, to_tokens
from dflash_prep.errors import UserError
from dflash_prep.files import canonical_json, check_regular, digest, file_digest, read_json, stream_digest
from dflash_prep.rules import broken, fingerprint, list_of, object_of, one_of, share, text, whole, whole_or_null
from dflash_prep.schedule import Step

FORMAT, VERSION = "dflash-plan", 1
ROWS_PER_GROUP = 4096  # what a reader decodes at once; rounded to whole steps
TOTALS = ("tokens", "padded_tokens", "loss_tokens", "anchors")
EPOCH_STATED = {
    "file": text(r"epoch-\d{3,}\.parquet"),
    "checksum": fingerprint,
    "fingerprint": fingerprint,
    **dict.fromkeys(("steps", "micro_batches", "samples"), whole(1)),
    **dict.fromkeys(TOTALS, whole(0)),
}
BESIDE_SETTINGS = {
    "format": one_of(FORMAT),
    "version": whole(VERSION, VERSION),
    "fingerprint": fingerprint,
    "store": object_of({"path": text(), "fingerprint": fingerprint}),
    "certificate": object_of({}),
    "epochs": list_of(object_of(EPOCH_STATED), least=1),
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


def epoch_table(steps: list[Step], samples: Samples, slots: int, packed: bool, bounds: list[int]) -> pa.Table:
    """The rows of one epoch, `slots` a step; an empty slot is all zeros."""
    groups = [group for step in steps for group in [*step, *[np.empty(0, np.int64)] * (slots - len(step))]]
    sizes = np.array([len(group) for group in groups])
    flat = np.concatenate(groups)
    owner = np.repeat(np.arange(len(groups)), sizes)

    def total(values: np.ndarray) -> np.ndarray:
        sums = np.zeros(len(groups), np.int64)
        np.add.at(sums, owner, values[flat])
        return sums

    longest = np.zeros(len(groups), np.int64)
    np.maximum.at(longest, owner, samples.length[flat])
    tokens = total(samples.length)
    width = tokens if packed else longest
    costs = total(row_cost(samples.length)) if packed else sizes * row_cost(longest)
    columns = {
        "step": np.arange(len(groups)) // slots,
        "slot": np.arange(len(groups)) % slots,
        "bucket": np.where(sizes > 0, assign(longest, bounds), 0) if bounds else np.zeros(len(groups), np.int64),
        "width": width,
        "tokens": tokens,
        "padded_tokens": tokens if packed else sizes * longest,
        "loss_tokens": total(samples.loss_tokens),
        "anchors": total(samples.anchors),
        "cost": to_tokens(costs),
    }
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat.astype(np.uint32)), type=pa.list_(pa.uint32()))
    arrays = [
        lists if field.name == "samples" else pa.array(columns[field.name].astype(field.type.to_pandas_dtype()))
        for field in EPOCH_SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=EPOCH_SCHEMA)


def write_epoch(table: pa.Table, path: Path, slots: int) -> None:
    """Write an epoch, row groups cut at step boundaries."""
    rows = max(1, ROWS_PER_GROUP // slots) * slots
    with pq.ParquetWriter(path, EPOCH_SCHEMA, compression="zstd") as writer:
        for start in range(0, table.num_rows, rows):
            writer.write_table(table.slice(start, rows), row_group_size=rows)


def epoch_summary(table: pa.Table, path: Path) -> dict:
    """What `plan.json` says of one epoch."""
    total = {name: int(table[name].to_numpy().astype(np.int64).sum()) for name in TOTALS}
    sizes = table["samples"].combine_chunks().value_lengths().to_numpy()
    return {
        "file": path.name,
        "checksum": file_digest(path),
        "fingerprint": table_fingerprint(table),
        "steps": int(table["step"][-1].as_py()) + 1,
        "micro_batches": int((sizes > 0).sum()),
        "samples": int(sizes.sum()),
        **total,
    }


def table_fingerprint(table: pa.Table) -> str:
    """Of the decoded columns, so equal whatever wrote the file."""
    parts = []
    for name in EPOCH_SCHEMA.names:
        column = table[name].combine_chunks()
        if name == "samples":
            parts += [column.value_lengths().to_numpy().tobytes(), column.flatten().to_numpy().tobytes()]
        else:
            parts.append(column.to_numpy().tobytes())
    return digest(*parts)


def plan_fingerprint(options: dict, store_fingerprint: str, epochs: list[dict]) -> str:
    """A plan's fingerprint: of its options, its store's content and every epoch's columns."""
    return digest(canonical_json(options), store_fingerprint.encode(), *(epoch["fingerprint"].encode() for epoch in epochs))


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
        if self["fingerprint"] != plan_fingerprint(settings, self["store"]["fingerprint"], self["epochs"]):
            raise UserError(
                f"{path}: plan.json was changed after planning (its fingerprint differs); remove it and plan again"
            )

    def __getitem__(self, key: str):
        return self.manifest[key]

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

    def rows(self, epoch: int, first_step: int = 0) -> Iterator[dict]:
        """The rows of an epoch from a step on, decoded one row group at a time."""
        with self.open_epoch(epoch) as file:
            for group in range(file.num_row_groups):
                if file.metadata.row_group(group).column(0).statistics.max >= first_step:
                    for row in file.read_row_group(group).to_pylist():
                        if row["step"] >= first_step:
                            yield row

    @contextmanager
    def open_epoch(self, epoch: int) -> Iterator[pq.ParquetFile]:
        """The Parquet file of an epoch, proven to be the one that was planned; faults of decoding it are user errors."""
        summary = self["epochs"][epoch]
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
