"""The records of a corpus' files, one after another: lines of JSONL, elements of a JSON array, rows of Parquet.

What is wrong with a file costs its remaining records and no more: it comes as one last record that holds the reason.
"""

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from dflash_prep.corpus import LONGEST, read_chunks, split_lines
from dflash_prep.errors import Reject, UserError
from dflash_prep.jsontext import array_items

ROWS, AT_ONCE = 64, 1 << 18  # of a Parquet file, read at once; bytes of them that travel together


class CorpusFile(NamedTuple):
    """A file of a corpus: its name as records state it, and where its bytes are (elsewhere for standard input)."""

    name: str
    path: Path


class Lost(Reject):
    """Why a file gives no more records."""


class Rows:
    """Rows of a Parquet file as they were read; they become values where they are needed, which may be another process."""

    def __init__(self, batch):
        self._batch = batch  # pyarrow.RecordBatch

    def __reduce__(self):
        """As Arrow's own bytes: these hold the rows of a slice alone, where pickling would take all that it was cut from."""
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._batch.schema) as writer:
            writer.write_batch(self._batch)
        return rows_from, (sink.getvalue().to_pybytes(),)

    @cached_property
    def size(self) -> int:
        """Bytes a row, on average."""
        return self._batch.nbytes // max(len(self._batch), 1)

    @cached_property
    def values(self) -> list[dict | Reject]:
        """Each row as a JSON value; a Reject for one that is none."""
        try:
            return self._batch.to_pylist()
        except (ArithmeticError, ImportError, UnicodeError, ValueError):  # pyarrow's own are of these, too
            return [self._value(number) for number in range(len(self._batch))]

    def _value(self, number: int) -> dict | Reject:
        try:
            return self._batch.slice(number, 1).to_pylist()[0]
        except UnicodeError:
            return Reject("text that is not UTF-8")
        except (ArithmeticError, ImportError, ValueError) as fault:
            return Reject(f"a value that cannot be read: {fault}")


def rows_from(data: bytes) -> Rows:
    """Rows from Arrow's bytes."""
    import pyarrow as pa

    return Rows(pa.ipc.open_stream(data).read_next_batch())


class Row(NamedTuple):
    """One row of a Parquet file."""

    rows: Rows
    number: int

    def value(self) -> dict:
        """Its columns; raises Reject."""
        value = self.rows.values[self.number]
        if isinstance(value, Reject):
            raise value
        return value


class Record(NamedTuple):
    """One record: its file's name, its 1-based number there, and what it is: JSON text, a row, or why there is none."""

    source: str
    line: int
    data: bytes | str | Row | Reject

    def excerpt(self) -> str:
        """The record's beginning, for the list of rejects."""
        if isinstance(self.data, bytes):
            return self.data[:120].decode(errors="replace")
        if isinstance(self.data, Row):
            return json.dumps(self.data.rows.values[self.data.number], ensure_ascii=False, default=str)[:120]
        return "" if isinstance(self.data, Reject) else self.data[:120]

    def size(self) -> int:
        """About how many bytes it holds."""
        return self.data.rows.size if isinstance(self.data, Row) else 0 if isinstance(self.data, Reject) else len(self.data)


def read_records(
    file: CorpusFile, columns: Sequence[str], seen: Callable[[int], None] = lambda count: None
) -> Iterator[Record]:
    """Each record of a file that is not blank; of a Parquet file only the named columns.

    `seen` is told how many bytes of the file were read since it was last told.
    """
    line = 0
    try:
        for line, data in enumerate(read_values(file.path, columns, seen), start=1):
            size = len(data) if isinstance(data, bytes) else data.rows.size if isinstance(data, Row) else 0
            if size > LONGEST:
                yield Record(file.name, line, Reject(f"record longer than {LONGEST >> 20} MiB"))
            elif not isinstance(data, bytes) or data.strip():
                yield Record(file.name, line, data)
    except UserError as fault:
        yield Record(file.name, line + 1, Lost(str(fault).removeprefix(f"{file.path}: ")))


def read_values(path: Path, columns: Sequence[str], seen: Callable[[int], None]) -> Iterator[bytes | str | Row]:
    """What a file holds, by its name: JSON texts, or rows."""
    kind = path.name.lower().removesuffix(".gz").removesuffix(".zst")
    if kind.endswith(".parquet"):
        yield from parquet_rows(path, columns, seen)
    elif kind.endswith(".json"):
        yield from json_values(read_chunks(path, seen))
    else:
        yield from split_lines(read_chunks(path, seen))


def json_values(chunks: Iterator[bytes]) -> Iterator[bytes | str]:
    """An array's elements, or lines where there is no array: many a .json file holds those."""
    start = b""
    while len(start) < len(BOM_UTF8) or not start.removeprefix(BOM_UTF8).strip():
        if (chunk := next(chunks, None)) is None:
            break
        start += chunk
    is_array = start.removeprefix(BOM_UTF8).lstrip().startswith(b"[")
    chunks = chain([start], chunks)
    return array_items(chunks) if is_array else split_lines(chunks)


def parquet_rows(path: Path, columns: Sequence[str], seen: Callable[[int], None]) -> Iterator[Row]:
    """The rows of a Parquet file, of its columns those that are asked for, or all names with null if it has none of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = [name for name in names if name in columns]
            share = path.stat().st_size / max(file.metadata.num_rows, 1)
            batches = (
                file.iter_batches(ROWS, columns=wanted)
                if wanted
                else (
                    pa.record_batch({name: pa.nulls(min(ROWS, file.metadata.num_rows - at)) for name in names})
                    for at in range(0, file.metadata.num_rows, ROWS)
                )
            )
            for batch in batches:
                seen(round(share * len(batch)))
                together = max(1, min(len(batch), AT_ONCE * len(batch) // max(batch.nbytes, 1)))
                for start in range(0, len(batch), together):
                    rows = Rows(batch.slice(start, together))
                    yield from (Row(rows, number) for number in range(min(together, len(batch) - start)))
    except (OSError, pa.ArrowException) as fault:
        raise UserError(f"{path}: no Parquet file, or damaged: {fault}") from None
