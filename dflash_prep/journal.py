"""What is finished of a long run, kept beside its output so that a killed run goes on where it was.

One line an entry, appended in any order and handed to the system at once: a checksum, the entry's number and whether it was
kept, its counts, a tab, and its bytes. A line that a kill left torn, or that fails its checksum, counts as not there.
"""

import json
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from dflash_prep.errors import UserError
from dflash_prep.files import read_json, write_json
from dflash_prep.unfinished import LOCK, locked, remove

VERSION = 1
MISSING = -1
ORIGIN = "origin"


class Entry(NamedTuple):
    """One record's outcome: its row of the output, or of the rejects where it was not kept, and what it came to."""

    kept: bool
    counts: Counter
    row: bytes


class Journal:
    """The entries of one run, by the record's number; one process at a time has it."""

    def __init__(self, path: Path, origin: dict):
        """Open or begin the journal in the directory `path` for a run that `origin` describes."""
        self.path = path
        with ExitStack() as stack:
            stack.enter_context(locked(path))
            try:
                check_origin(path, {"version": VERSION} | json.loads(json.dumps(origin)))
                self._file = stack.enter_context((path / "journal").open("a+b", buffering=0))
                self._places = array("q")  # of each record's line: twice its offset, and 1 more where it was not kept
                self._end = self._load()
            except OSError as fault:
                raise self._unwritable(fault) from None
            self._held = stack.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *fault):
        self._held.close()

    def begun(self) -> bool:
        """Whether anything is noted."""
        return len(self._places) > 0

    def kept(self, number: int) -> bool:
        """Whether a record was kept."""
        place = self._place(number)
        return place != MISSING and place % 2 == 0

    def failures(self) -> int:
        """How many records were not kept."""
        return sum(place != MISSING and place % 2 for place in self._places)

    def add(self, number: int, entry: Entry) -> None:
        """Note one record's outcome; a later one replaces an earlier."""
        head = json.dumps([number, entry.kept, entry.counts], separators=(",", ":")).encode()
        line = head + b"\t" + entry.row
        line = b"%08x %b\n" % (zlib.crc32(line), line)
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as fault:
            raise self._unwritable(fault) from None
        self._note(number, entry.kept, self._end)
        self._end += len(line)

    def entries(self, total: int) -> Iterator[Entry]:
        """The outcomes of the first records, in order."""
        with (self.path / "journal").open("rb") as file:
            for number in range(total):
                place = self._place(number)
                file.seek(max(place, 0) // 2)
                read = read_line(file.readline()) if place != MISSING else None
                if read is None:
                    raise UserError(f"{self.path}: record {number + 1} is damaged there; run the same again to ask it anew")
                yield read[1]

    def remove(self) -> None:
        """Remove it all, the lock last: once it is gone another process may begin here, which is then left alone."""
        with suppress(OSError):
            for entry in self.path.iterdir():
                if entry.name not in (ORIGIN, LOCK):  # while the origin is there, what a kill leaves is a journal
                    entry.unlink()
            remove(self.path)

    def _unwritable(self, fault: OSError) -> UserError:
        return UserError(f"{self.path}: cannot write: {fault.strerror}; make room and run the same again")

    def _place(self, number: int) -> int:
        return self._places[number] if number < len(self._places) else MISSING

    def _note(self, number: int, kept: bool, offset: int) -> None:
        if number >= len(self._places):
            self._places.extend([MISSING] * (number + 1 - len(self._places)))
        self._places[number] = 2 * offset + (not kept)

    def _load(self) -> int:
        """Note every whole line, cut off a torn last one, and return where the next goes."""
        place = 0
        self._file.seek(0)
        with (self.path / "journal").open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                if read := read_line(line):
                    self._note(read[0], read[1].kept, place)
                place += len(line)
        self._file.truncate(place)
        return place


def read_line(line: bytes) -> tuple[int, Entry] | None:
    """The number and the entry of a line; None if it is damaged."""
    try:
        if not line.endswith(b"\n") or int(line[:8], 16) != zlib.crc32(line[9:-1]):
            return None
        head, _, row = line[9:-1].partition(b"\t")
        number, kept, counts = json.loads(head)
        return number, Entry(kept, Counter(counts), row)
    except ValueError:
        return None


def check_origin(path: Path, origin: dict) -> None:
    """Hold a journal's origin against this run's, and state it where the journal is new."""
    file = path / ORIGIN
    if file.exists():
        other = read_json(file, "origin of the answers")
        differs = [key for key in sorted({*origin, *other}) if origin.get(key) != other.get(key)]
        if differs:
            raise UserError(
                f"{path}: holds what was finished with other {', '.join(differs)}; run with those again to go on, remove it "
                "to begin anew, or choose another output with -o"
            )
        return
    if foreign := {entry.name for entry in path.iterdir()} - {LOCK, f"{ORIGIN}.new"}:
        raise UserError(f"{path}: is to hold the answers, but has {min(foreign)}; move it away, or choose another with -o")
    write_json(file, origin)
