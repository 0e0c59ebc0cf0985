"""Writes a token store shard by shard, so that a run that is killed goes on after its last finished shard.

Beside the shards the directory holds `parts/` while it is written: a shard's rows of the index and its rejects, and, as the
last thing that is written of each shard, `progress.json` with all that the next records build on.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from dflash_prep.arrow import list_array, read_arrow, write_arrow
from dflash_prep.dedup import Seen
from dflash_prep.errors import Reject, UserError
from dflash_prep.files import canonical_json, digest, file_digest, read_json, sync_file, write_json
from dflash_prep.near_dedup import NearSeen
from dflash_prep.sample import Outcome, Sample
from dflash_prep.store import FORMAT, INDEX_SCHEMA, SHARD_SCHEMA, VERSION

PARTS, PROGRESS = "parts", "progress.json"
SHARD_BYTES, SHARD_SAMPLES = 256 << 20, 1 << 19  # whichever is reached first: short samples cost memory by the piece
CHUNK = 1 << 20
DUPLICATE, NEAR_DUPLICATE = "duplicate", "near-duplicate"
PART_SCHEMA = INDEX_SCHEMA.set(INDEX_SCHEMA.get_field_index("source"), pa.field("source", pa.int32())).append(
    pa.field("sketch", pa.binary())
)


@dataclass
class Tally:
    """What was counted up to the last finished shard, and the shards themselves."""

    records: int = 0
    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    eligible: int = 0
    longest: int = 0
    truncated: int = 0  # records
    split: int = 0  # records
    pieces: int = 0  # samples and rejects beyond one a record
    special_texts: int = 0  # kept records whose text spells a special token
    rejected: dict[str, int] = field(default_factory=dict)
    special_tokens: dict[str, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)  # files that could not be read to their end, and from which record on
    sources: list[str] = field(default_factory=list)
    shards: list[dict] = field(default_factory=list)
    parts: list[dict] = field(default_factory=list)  # the checksums of each checkpoint's rejects and rows of the index


class StoreWriter:
    """Takes what became of each record, in order, into a directory; goes on where an earlier writer of it stopped.

    `unique`: of equal samples only the first is kept. `near`: of samples that share so much of what they say, likewise.
    """

    def __init__(
        self,
        directory: Path,
        special_ids: Iterable[int] = (),
        unique: bool = False,
        near: float | None = None,
        shard_bytes: int = SHARD_BYTES,
    ):
        self._directory, self._parts = directory, directory / PARTS
        self._special = np.array(sorted(special_ids), np.uint32)
        self._unique, self._shard_bytes = unique, shard_bytes
        self._parts.mkdir(exist_ok=True)
        progress = self._parts / PROGRESS
        self.tally = read_tally(progress) if progress.exists() else Tally()
        self._sources = {name: number for number, name in enumerate(self.tally.sources)}
        self._names = list(self._sources)
        self._near = None if near is None else NearSeen(near)
        self._seen, self._places = Seen(), []  # of each shard its samples' sources and lines
        self._remove_unfinished()
        for number in range(len(self.tally.shards)):
            self._recall(self._part(number))
        self._begin()

    def take(self, outcome: Outcome) -> None:
        """Add a record's samples, or note why they are not kept."""
        tally, number = self.tally, self.tally.samples
        like = self._near.first(outcome.sketch) if self._near and outcome.sketch else None
        kept = [self._take(outcome, sample, like) for sample in outcome.samples]
        if any(kept) and self._near:
            self._near.add(outcome.sketch, number)
            self._sketches[number - tally.samples] = outcome.sketch
        tally.records += 1
        tally.pieces += len(kept) - 1
        tally.split += len(kept) > 1
        tally.truncated += outcome.truncated and any(kept)
        tally.special_texts += outcome.spelled and any(kept)
        if outcome.lost:
            tally.lost.append(f"{outcome.source} from record {outcome.line} on: {outcome.samples[0]}")
        if len(self._ids) + len(self._spans) >= self._shard_bytes or len(self._keys) >= SHARD_SAMPLES:
            self.checkpoint()

    def _take(self, outcome: Outcome, sample: Sample | Reject, like: int | None) -> bool:
        """Whether a sample is kept; `like` is an earlier one that says nearly the same."""
        if not isinstance(sample, Reject) and self._unique:
            first = self._seen.first(sample.key)
            if first is not None:
                sample = Reject(f"{DUPLICATE}: of {self._place(first)}")
            elif like is None:
                self._seen.add(sample.key, self.tally.samples)
        if not isinstance(sample, Reject) and like is not None:
            sample = Reject(f"{NEAR_DUPLICATE}: of {self._place(like)}")
        if isinstance(sample, Reject):
            self._reject(outcome, str(sample))
            return False
        self._ids += sample.ids
        self._spans += sample.spans
        self._keys.append(sample.key)
        self._lengths.append(len(sample.ids) // 4)
        self._span_lengths.append(len(sample.spans) // 4)
        self._from.append(self._source(outcome.source))
        self._lines.append(outcome.line)
        self._sketches.append(None)
        self.tally.samples += 1
        return True

    def _source(self, name: str) -> int:
        """A source's number."""
        if name not in self._sources:
            self._sources[name] = len(self._names)
            self._names.append(name)
        return self._sources[name]

    def _reject(self, outcome: Outcome, reason: str) -> None:
        kind = reason.split(":")[0]
        self.tally.rejected[kind] = self.tally.rejected.get(kind, 0) + 1
        entry = {"source": outcome.source, "line": outcome.line, "reason": reason, "excerpt": outcome.excerpt}
        self._rejects.write(json.dumps(entry, ensure_ascii=False).encode(errors="replace") + b"\n")

    def _place(self, number: int) -> str:
        """Where a sample came from."""
        for sources, lines in [*self._places, (self._from, self._lines)]:
            if number < len(lines):
                return f"{self._names[sources[number]]}:{lines[number]}"
            number -= len(lines)
        raise IndexError(number)

    @property
    def tokens(self) -> int:
        """Tokens of the samples so far."""
        return self.tally.tokens + len(self._ids) // 4

    def checkpoint(self) -> None:
        """Finish the shard that is being filled; from here on a run that is killed goes on after it."""
        name, tally = f"shard-{len(self.tally.shards):05d}.arrow", self.tally
        self._rejects.close()
        if self._lengths:
            path = self._directory / name
            ids, spans = (np.frombuffer(part, np.uint32) for part in (self._ids, self._spans))
            columns = [list_array(ids, self._lengths), list_array(spans, self._span_lengths)]
            write_arrow(path, pa.record_batch(columns, schema=SHARD_SCHEMA))
            part = self._index_part(spans)
            write_arrow(self._part(len(tally.shards)), part)
            for column, count in {"length": "tokens", "loss_tokens": "loss_tokens", "eligible": "eligible"}.items():
                setattr(tally, count, getattr(tally, count) + int(part[column].to_numpy().sum()))
            tally.longest = max(tally.longest, *self._lengths)
            tally.special_tokens = dict(Counter(tally.special_tokens) + special_counts(ids, self._special))
            tally.shards.append(
                {"file": name, "samples": len(part), "bytes": path.stat().st_size, "checksum": file_digest(path)}
            )
            self._seen.pack()
            self._places.append((part["source"].to_numpy(), part["line"].to_numpy()))
        sync_file(self._rejects_path(len(tally.parts)))
        files = {"rejects": self._rejects_path(len(tally.parts))}
        files |= {"index": self._part(len(tally.shards) - 1)} if self._lengths else {}
        tally.parts.append({name: file_digest(path) for name, path in files.items()})
        tally.sources = self._names
        stated = asdict(tally)
        write_json(self._parts / PROGRESS, stated | {"checksum": digest(canonical_json(stated))})
        self._begin()

    def _index_part(self, spans: np.ndarray) -> pa.RecordBatch:
        """The rows of the index for the shard that is being filled."""
        inside = spans[1::2].astype(np.int64) - spans[0::2]
        borders = np.concatenate([[0], np.cumsum(self._span_lengths)]) // 2
        total = lambda values: np.diff(np.concatenate([[0], np.cumsum(values)])[borders])  # noqa: E731
        count, before = len(self._lengths), self.tally.samples - len(self._lengths)
        columns = {
            "sample": np.arange(before, before + count),
            "length": self._lengths,
            "loss_tokens": total(inside),
            "shard": np.full(count, len(self.tally.shards)),
            "row": np.arange(count),
            "source": self._from,
            "line": self._lines,
            "key": [key.hex() for key in self._keys],
            "eligible": total(np.maximum(inside - 1, 0)),
            "sketch": pa.array(self._sketches, pa.binary()),
        }
        arrays = [pa.array(columns[entry.name]).cast(entry.type) for entry in PART_SCHEMA]
        return pa.record_batch(arrays, schema=PART_SCHEMA)

    def _part(self, number: int) -> Path:
        return self._parts / f"index-{number:05d}.arrow"

    def _rejects_path(self, number: int) -> Path:
        return self._parts / f"rejects-{number:05d}.jsonl.zst"

    def _begin(self) -> None:
        """An empty shard, and a new part of the rejects."""
        self._ids, self._spans = bytearray(), bytearray()
        self._lengths, self._span_lengths, self._keys, self._from, self._lines, self._sketches = [], [], [], [], [], []
        self._rejects = zstandard.ZstdCompressor().stream_writer(self._rejects_path(len(self.tally.parts)).open("wb"))

    def _remove_unfinished(self) -> None:
        """Remove what an earlier writer began after its last finished shard."""
        finished = {shard["file"] for shard in self.tally.shards}
        for path in self._directory.glob("shard-*"):
            if path.name not in finished:
                path.unlink()
        stated = [(self._directory / shard["file"], shard["checksum"]) for shard in self.tally.shards]
        for number, part in enumerate(self.tally.parts):
            stated.append((self._rejects_path(number), part["rejects"]))
        indexes = [part["index"] for part in self.tally.parts if "index" in part]
        stated += [(self._part(number), checksum) for number, checksum in enumerate(indexes)]
        for path, checksum in stated:
            if not path.is_file() or file_digest(path) != checksum:
                raise UserError(
                    f"{path}: missing or another than was written; remove {self._directory} and run the same again"
                )

    def _recall(self, path: Path) -> None:
        """Know again the samples of a finished shard."""
        part = read_arrow(path)
        if self._unique:
            for number, key in zip(part["sample"].to_pylist(), part["key"].to_pylist(), strict=True):
                self._seen.add(bytes.fromhex(key), number)
            self._seen.pack()
        for number, sketch in zip(part["sample"].to_pylist(), part["sketch"].to_pylist(), strict=True):
            if self._near and sketch:
                self._near.add(sketch, number)
        self._places.append((part["source"].to_numpy(), part["line"].to_numpy()))

    def rejects(self) -> Path:
        """Write `rejects.jsonl.zst`, all rejects in one frame; after this nothing can be taken any more."""
        self._rejects.close()
        path = self._directory / "rejects.jsonl.zst"
        with path.open("wb") as file, zstandard.ZstdCompressor(level=9).stream_writer(file) as packed:
            for number in range(len(self.tally.parts) + 1):
                with (
                    self._rejects_path(number).open("rb") as source,
                    zstandard.ZstdDecompressor().stream_reader(source) as plain,
                ):
                    while chunk := plain.read(CHUNK):
                        packed.write(chunk)
        return path

    def finish(self, origin: dict) -> dict:
        """Write what is pending, the index and `store.json`; `origin` says what the store was made from."""
        self.checkpoint()
        self.rejects()
        self._write_index()
        tally = asdict(self.tally)
        counts = ("records", "samples", "tokens", "loss_tokens", "eligible", "longest", "truncated", "split", "pieces")
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self._fingerprint(),
            **origin,
            "counts": {name: tally[name] for name in counts} | {"rejected": dict(sorted(tally["rejected"].items()))},
            "special_tokens": dict(sorted(tally["special_tokens"].items(), key=lambda entry: int(entry[0]))),
            "special_texts": tally["special_texts"],
            "lost_files": tally["lost"],
            "index_checksum": file_digest(self._directory / "index.parquet"),
            "shards": tally["shards"],
        }
        write_json(self._directory / "store.json", manifest)
        shutil.rmtree(self._parts)
        return manifest

    def _write_index(self) -> None:
        """`index.parquet`, a row group a shard."""
        with pq.ParquetWriter(self._directory / "index.parquet", INDEX_SCHEMA, compression="zstd") as writer:
            for number in range(len(self.tally.shards)):
                part = read_arrow(self._part(number))
                columns = {name: part[name] for name in INDEX_SCHEMA.names}
                columns["source"] = pa.DictionaryArray.from_arrays(part["source"], pa.array(self.tally.sources, pa.string()))
                writer.write_batch(pa.record_batch(list(columns.values()), schema=INDEX_SCHEMA))

    def _fingerprint(self) -> str:
        """The store's fingerprint (store.content_fingerprint), without all keys in memory."""
        state = blake2b((32 * self.tally.samples).to_bytes(8, "little"), digest_size=16)
        for number in range(len(self.tally.shards)):
            state.update("".join(read_arrow(self._part(number))["key"].to_pylist()).encode())
        return state.hexdigest()


def read_tally(path: Path) -> Tally:
    """What an earlier run had counted, if it is whole."""
    stated = read_json(path, "progress of this store")
    checksum = stated.pop("checksum", None)
    if checksum != digest(canonical_json(stated)):
        raise UserError(f"{path}: damaged, or of another release; remove {path.parent.parent} and run the same again")
    return Tally(**stated)


def special_counts(ids: np.ndarray, special: np.ndarray) -> Counter[str]:
    """How often each special token occurs."""
    found = Counter()
    for start in range(0, len(ids), CHUNK):
        part = ids[start : start + CHUNK]
        numbers, counts = np.unique(part[np.isin(part, special)], return_counts=True)
        found.update(dict(zip(map(str, numbers.tolist()), counts.tolist(), strict=True)))
    return found
