"""The token store: every sample's ids and loss spans in Arrow files that are mapped, never read whole."""

import os
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dflash_prep.errors import UserError
from dflash_prep.files import digest, file_digest, read_json
from dflash_prep.rules import broken, counts, fingerprint, list_of, object_of, text, whole

FORMAT, VERSION = "dflash-store", 1
UINT32_LIST = pa.list_(pa.uint32())
SHARD_SCHEMA = pa.schema([("input_ids", UINT32_LIST), ("loss_spans", UINT32_LIST)])
INDEX_SCHEMA = pa.schema(
    [
        ("sample", pa.uint32()),
        ("length", pa.uint32()),
        ("loss_tokens", pa.uint32()),
        ("shard", pa.uint32()),
        ("row", pa.uint32()),
        ("source", pa.dictionary(pa.int32(), pa.string())),
        ("line", pa.uint64()),
        ("key", pa.string()),
        ("eligible", pa.uint32()),
    ]
)
COUNTED = ("records", "samples", "tokens", "loss_tokens", "eligible", "longest")
SHARD_STATED = {
    "file": text(r"shard-\d{5,}\.arrow"),
    "samples": whole(1),
    "bytes": whole(1),
    "checksum": fingerprint,
}
STATED = {
    "fingerprint": fingerprint,
    "tokenizer": object_of({"name": text(), "fingerprint": fingerprint}),
    "counts": object_of(dict.fromkeys(COUNTED, whole(0)) | {"samples": whole(1), "rejected": counts}),
    "special_tokens": counts,
    "index_checksum": fingerprint,
    "shards": list_of(object_of(SHARD_STATED), least=1),
}


def content_fingerprint(keys: list[str]) -> str:
    """A store's fingerprint: of its samples' keys in store order, whatever wrote them and in how many shards."""
    return digest("".join(keys).encode())


class Store:
    """A finished store. Shards are mapped when first touched; a sample's arrays are views into the mapping."""

    def __init__(self, path: Path):
        self.path = path
        if not (path / "store.json").is_file():
            raise UserError(f"{path}: no token store here; write one with 'dflash-prep tokenize -o {path}'")
        self.manifest = read_json(path / "store.json", "store's manifest")
        if self.manifest.get("format") != FORMAT or self.manifest.get("version") != VERSION:
            raise damaged(path, f"not a store of format version {VERSION}")
        if key := broken(self.manifest, STATED):
            raise damaged(path, f"store.json states no valid {key}")
        if len(self) != sum(shard["samples"] for shard in self.manifest["shards"]):
            raise damaged(path, "store.json states another number of samples than its shards hold")
        for shard in self.manifest["shards"]:
            file = path / shard["file"]
            if not file.is_file() or file.stat().st_size != shard["bytes"]:
                raise damaged(file, "missing or of another size than store.json says")
        self._shards: dict[int, tuple[np.ndarray, ...]] = {}

    @property
    def fingerprint(self) -> str:
        """Of the store's content."""
        return self.manifest["fingerprint"]

    @cached_property
    def index(self) -> pa.Table:
        """`index.parquet`, a row a sample in store order."""
        return self._read_index(None)

    def _read_index(self, columns: list[str] | None) -> pa.Table:
        """The index, or some of its columns; None: all."""
        path = self._sound_index
        try:
            index = pq.read_table(path, schema=INDEX_SCHEMA, columns=columns)
        except (OSError, pa.ArrowException) as fault:
            raise damaged(path, f"cannot read the index ({fault})") from None
        if len(index) != len(self):
            raise damaged(path, f"has {len(index)} rows, store.json states {len(self)} samples")
        return index

    @cached_property
    def _sound_index(self) -> Path:
        """The index' file, whose checksum holds."""
        self._check_file("index.parquet", self.manifest["index_checksum"])
        return self.path / "index.parquet"

    def check_files(self) -> None:
        """Prove the checksum of every file."""
        self._check_file("index.parquet", self.manifest["index_checksum"])
        for shard in self.manifest["shards"]:
            self._check_file(shard["file"], shard["checksum"])

    def _check_file(self, name: str, checksum: str) -> None:
        path = self.path / name
        if not path.is_file():
            raise damaged(path, "missing")
        if file_digest(path) != checksum:
            raise damaged(path, "its checksum differs from store.json")

    def column(self, name: str) -> np.ndarray:
        """A numeric column of the index as int64, shape [samples]; the others are not read for it."""
        table = self.index if "index" in self.__dict__ else self._read_index([name])
        return table[name].to_numpy().astype(np.int64)

    @cached_property
    def _place(self) -> tuple[np.ndarray, np.ndarray]:
        return self.column("shard"), self.column("row")

    def __len__(self) -> int:
        return self.manifest["counts"]["samples"]

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """A sample's ids [length] and loss spans [start, end, …], uint32, without a copy."""
        shard, row = self._place[0][index], self._place[1][index]
        ids, id_offsets, spans, span_offsets = self._mapped(int(shard))
        return ids[id_offsets[row] : id_offsets[row + 1]], spans[span_offsets[row] : span_offsets[row + 1]]

    def batch(self, shard: int) -> pa.RecordBatch:
        """A shard's samples, mapped."""
        file = self.path / self.manifest["shards"][shard]["file"]
        try:
            batch = pa.ipc.open_file(pa.memory_map(os.fspath(file))).get_batch(0)
        except (OSError, pa.ArrowException) as fault:
            raise damaged(file, f"cannot map the shard ({fault})") from None
        if not batch.schema.equals(SHARD_SCHEMA) or len(batch) != self.manifest["shards"][shard]["samples"]:
            raise damaged(file, "its columns or its number of samples are not those of store.json")
        return batch

    def _mapped(self, shard: int) -> tuple[np.ndarray, ...]:
        if shard not in self._shards:
            batch = self.batch(shard)
            columns = batch.column("input_ids"), batch.column("loss_spans")
            self._shards[shard] = tuple(array.to_numpy() for column in columns for array in (column.values, column.offsets))
        return self._shards[shard]


def damaged(path: Path, reason: str) -> UserError:
    """The error of a store that cannot be used; a store is immutable, so that nothing else would mend it."""
    return UserError(f"{path}: {reason}; the store is damaged or of another release, remove it and tokenize again")
