"""The bytes of a corpus: lines of JSONL files, plain, gzip or zstd (of one or many frames)."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import zstandard

from dflash_prep.errors import UserError

CHUNK = 1 << 20
LONGEST = 1 << 26  # bytes of a record: a longer one is not read, so that memory stays bounded


class Record(NamedTuple):
    """One line of a corpus: the file as the user named it, its 1-based number there, and its bytes."""

    source: str
    line: int
    data: bytes


def read_records(inputs: tuple[str, ...]) -> Iterator[Record]:
    """Each line that is not blank, file by file.

    Lines end at \\n alone: U+2028 and U+0085 may stand inside JSON strings.
    """
    for name in inputs:
        path = Path(name)
        check_input(path)
        for line, data in enumerate(split_lines(read_chunks(path)), start=1):
            if data.strip():
                yield Record(name, line, data)


def check_input(path: Path) -> None:
    """Refuse what is no file: a corpus is read more than once, so that a FIFO will not do."""
    if not path.exists():
        raise UserError(f"{path}: no such file; name a corpus file, a directory of them, a pattern, or - for standard input")
    if path.is_dir():
        raise UserError(f"{path}: is a directory; name the JSONL files in it")
    if not path.is_file():
        raise UserError(f"{path}: is not a regular file; write the records to a JSONL file and name that")


class Counted(io.RawIOBase):
    """A file that tells how many bytes of it were read."""

    def __init__(self, file: BinaryIO, seen: Callable[[int], None]):
        self._file, self._seen = file, seen

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        count = self._file.readinto(buffer)
        self._seen(count)
        return count


def read_chunks(path: Path, seen: Callable[[int], None] = lambda count: None) -> Iterator[bytes]:
    """A file's bytes, decompressed by its suffix; `seen` is told how many bytes of the file were read."""
    try:
        with path.open("rb", buffering=0) as raw:
            file = io.BufferedReader(Counted(raw, seen), CHUNK)
            if path.suffix.lower() == ".zst":
                yield from unzstd(file)
            elif path.suffix.lower() == ".gz":
                with gzip.open(file) as plain:
                    # read1: what lies before damage is given, not lost with it
                    yield from iter(lambda: plain.read1(CHUNK), b"")
            else:
                yield from iter(lambda: file.read(CHUNK), b"")
    except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as fault:
        raise UserError(f"{path}: damaged or truncated compressed file: {fault}; fetch it again") from None
    except OSError as fault:
        raise UserError(f"{path}: cannot read the corpus: {fault.strerror}") from None


def unzstd(file) -> Iterator[bytes]:
    """Every frame of a zstd file; one that ends inside a frame is an error (the stream reader would just stop)."""
    frame = None
    while chunk := file.read(CHUNK):
        while chunk:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
            yield frame.decompress(chunk)
            chunk = frame.unused_data
            if frame.eof:
                frame = None
    if frame is not None:
        raise EOFError("the last frame is incomplete")


def split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines without their \\n; what follows the last \\n is a line too.

    Of a line beyond LONGEST bytes only as much is kept as shows that it is too long.
    """
    pending, size = [], 0
    for chunk in chunks:
        head, *rest = chunk.split(b"\n")
        if size <= LONGEST:
            pending.append(head)
        size += len(head)
        for part in rest:
            yield b"".join(pending)
            pending, size = [part], len(part)
    yield b"".join(pending)
