"""The records of a corpus' files, one after another: lines of JSONL, elements of a JSON array, rows of Parquet.

What is wrong with a file costs its remaining records and no more: it comes as one last record that holds the reason.
"""

import json
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from dflash_prep.corpus import read_chunks, split_lines
from dflash_prep.errors import Reject, UserError
from dflash_prep.jsontext import array_items

ROWS = 256  # of a Parquet file, decoded at once


class CorpusFile(NamedTuple):
    """A file of a corpus: its name as records state it, and where its bytes are (elsewhere for standard input)."""

    name: str
    path: Path


class Record(NamedTuple):
    """One record: its file's name, its 1-based number there, and its JSON text, its value, or why there is none."""

    source: str
    line: int
    data: object

    def excerpt(self) -> bytes:
        """The record's beginning, for the list of rejects."""
        if isinstance(self.data, bytes):
            return self.data[:120]
        if isinstance(self.data, Reject):
            return b""
        return json.dumps(self.data, ensure_ascii=False, default=str)[:120].encode(errors="replace")


def read_records(file: CorpusFile, columns: Sequence[str]) -> Iterator[Record]:
    """Each record of a file that is not blank; of a Parquet file only the named columns."""
    line = 0
    try:
        for line, data in enumerate(read_values(file.path, columns), start=1):
            if not isinstance(data, bytes) or data.strip():
                yield Record(file.name, line, data)
    except UserError as fault:
        yield Record(file.name, line + 1, Reject(str(fault).removeprefix(f"{file.path}: ")))


def read_values(path: Path, columns: Sequence[str]) -> Iterator[object]:
    """What a file holds, by its name: bytes of JSON texts, or values."""
    kind = path.name.lower().removesuffix(".gz").removesuffix(".zst")
    if kind.endswith(".parquet"):
        yield from parquet_rows(path, columns)
    elif kind.endswith(".json"):
        yield from json_values(read_chunks(path))
    else:
        yield from split_lines(read_chunks(path))


def json_values(chunks: Iterator[bytes]) -> Iterator[object]:
    """An array's elements, or lines where there is no array: many a .json file holds those."""
    start = b""
    while len(start) < len(BOM_UTF8) or not start.removeprefix(BOM_UTF8).strip():
        if (chunk := next(chunks, None)) is None:
            break
        start += chunk
    is_array = start.removeprefix(BOM_UTF8).lstrip().startswith(b"[")
    chunks = chain([start], chunks)
    return array_items(chunks) if is_array else split_lines(chunks)


def parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[dict]:
    """The rows of a Parquet file, of its columns those that are asked for, or all names with null if it has none of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            wanted = [name for name in file.schema_arrow.names if name in columns]
            if not wanted:
                yield from (dict.fromkeys(file.schema_arrow.names) for _ in range(file.metadata.num_rows))
                return
            for batch in file.iter_batches(ROWS, columns=wanted):
                yield from batch.to_pylist()
    except (OSError, pa.ArrowException, UnicodeError) as fault:
        raise UserError(f"{path}: no Parquet file, or damaged: {fault}") from None
