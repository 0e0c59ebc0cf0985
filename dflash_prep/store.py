"""The token store: every sample's ids and loss spans in Arrow files that are mapped, never read whole."""

import json
import os
from collections import Counter
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from dflash_prep.anchors import eligible_count
from dflash_prep.errors import UserError
from dflash_prep.files import digest, file_digest, read_json, write_json
from dflash_prep.rules import broken, counts, fingerprint, list_of, object_of, text, whole

FORMAT, VERSION = "dflash-store", 1
SHARD_BYTES = 256 << 20
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


def sample_key(ids: np.ndarray, spans: np.ndarray) -> str:
    """Hex BLAKE2b-128 of a sample's ids and spans, both little-endian uint32."""
    return digest(ids.astype("<u4").tobytes(), spans.astype("<u4").tobytes())


def content_fingerprint(keys: list[str]) -> str:
    """A store's fingerprint: of its samples' keys in store order, whatever wrote them and in how many shards."""
    return digest("".join(keys).encode())


class StoreWriter:
    """Writes a store into an empty directory, shard by shard."""

    def __init__(self, directory: Path, shard_bytes: int = SHARD_BYTES):
        self._directory = directory
        self._shard_bytes = shard_bytes
        self._ids: list[np.ndarray] = []
        self._spans: list[np.ndarray] = []
        self._pending = 0
        self._rows: list[dict] = []
        self._shards: list[dict] = []
        self._special: Counter[int] = Counter()
        self._first: dict[bytes, int] = {}
        self.reasons: Counter[str] = Counter()
        self._rejects = zstandard.ZstdCompressor(level=9).stream_writer((directory / "rejects.jsonl.zst").open("wb"))

    @property
    def kept(self) -> int:
        """Samples added so far."""
        return len(self._rows)

    def first_equal(self, ids: np.ndarray, spans: np.ndarray) -> str | None:
        """Where the first sample with these ids and spans came from, if there is one."""
        row = self._first.get(bytes.fromhex(sample_key(ids, spans)))
        return None if row is None else f"{self._rows[row]['source']}:{self._rows[row]['line']}"

    def add(self, ids: np.ndarray, spans: np.ndarray, source: str, line: int, special_ids: np.ndarray) -> None:
        """Add one sample: its ids and its loss spans [start, end, …], both uint32."""
        self._rows.append(
            {
                "sample": len(self._rows),
                "length": len(ids),
                "loss_tokens": int(spans[1::2].sum()) - int(spans[0::2].sum()),
                "shard": len(self._shards),
                "row": len(self._ids),
                "source": source,
                "line": line,
                "key": sample_key(ids, spans),
                "eligible": eligible_count(spans),
            }
        )
        self._first.setdefault(bytes.fromhex(self._rows[-1]["key"]), len(self._rows) - 1)
        self._special.update(ids[np.isin(ids, special_ids)].tolist())
        self._ids.append(ids)
        self._spans.append(spans)
        self._pending += ids.nbytes + spans.nbytes
        if self._pending >= self._shard_bytes:
            self._flush()

    def reject(self, source: str, line: int, reason: str, data: bytes) -> None:
        """Note one record that is not kept."""
        self.reasons[reason.split(":")[0]] += 1
        entry = {"source": source, "line": line, "reason": reason, "excerpt": data[:120].decode(errors="replace")}
        self._rejects.write(json.dumps(entry, ensure_ascii=False).encode(errors="replace") + b"\n")

    def _flush(self) -> None:
        name = f"shard-{len(self._shards):05d}.arrow"
        columns = [list_array(self._ids), list_array(self._spans)]
        with pa.OSFile(str(self._directory / name), "wb") as sink, pa.ipc.new_file(sink, SHARD_SCHEMA) as writer:
            writer.write_batch(pa.record_batch(columns, schema=SHARD_SCHEMA))
        path = self._directory / name
        self._shards.append(
            {"file": name, "samples": len(self._ids), "bytes": path.stat().st_size, "checksum": file_digest(path)}
        )
        self._ids, self._spans, self._pending = [], [], 0

    def close_rejects(self) -> None:
        """Finish `rejects.jsonl.zst`."""
        self._rejects.close()

    def finish(self, origin: dict) -> dict:
        """Write what is pending, the index and `store.json`; `origin` says what the store was made from."""
        if self._ids:
            self._flush()
        self.close_rejects()
        index = pa.Table.from_pylist(self._rows, schema=INDEX_SCHEMA)
        pq.write_table(index, self._directory / "index.parquet", compression="zstd")
        total = lambda column: sum(row[column] for row in self._rows)  # noqa: E731
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": content_fingerprint([row["key"] for row in self._rows]),
            **origin,
            "counts": {
                "records": self.kept + self.reasons.total(),
                "samples": self.kept,
                "rejected": dict(sorted(self.reasons.items())),
                "tokens": total("length"),
                "loss_tokens": total("loss_tokens"),
                "eligible": total("eligible"),
                "longest": max(row["length"] for row in self._rows),
            },
            "special_tokens": {str(token): count for token, count in sorted(self._special.items())},
            "index_checksum": file_digest(self._directory / "index.parquet"),
            "shards": self._shards,
        }
        write_json(self._directory / "store.json", manifest)
        return manifest


def list_array(parts: list[np.ndarray]) -> pa.ListArray:
    """A list<uint32> column of one numpy array a row."""
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int32)
    values = np.concatenate(parts) if parts else np.empty(0, np.uint32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, pa.uint32()), type=UINT32_LIST)


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
        path = self.path / "index.parquet"
        self._check_file(path.name, self.manifest["index_checksum"])
        try:
            index = pq.read_table(path, schema=INDEX_SCHEMA)
        except (OSError, pa.ArrowException) as fault:
            raise damaged(path, f"cannot read the index ({fault})") from None
        if len(index) != len(self):
            raise damaged(path, f"has {len(index)} rows, store.json states {len(self)} samples")
        return index

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
        """A numeric column of the index as int64, shape [samples]."""
        return self.index[name].to_numpy().astype(np.int64)

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
