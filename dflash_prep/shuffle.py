"""A corpus' records in random order, whatever its files are: laid down once in a file without compression, read by place.

In memory a record takes 20 bytes.
"""

import json
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

from dflash_prep.errors import Reject
from dflash_prep.records import Record, Row
from dflash_prep.rng import permutation

SHUFFLE_STREAM = 7  # of its own among the named random streams


def shuffled(records: Iterable[tuple[Record, str | None]], seed: int, path: Path) -> Iterator[tuple[Record, str | None]]:
    """Records with their files' formats in the order that a seed draws; `path` is where they are laid down meanwhile."""
    places, lines, kinds, seen, faults = array("Q"), array("Q"), array("I"), {}, {}
    with path.open("w+b") as file:
        end = 0
        for number, (record, form) in enumerate(records):
            try:
                text = text_of(record)
            except Reject as fault:
                text, faults[number] = b"", fault
            places.append(end)
            lines.append(record.line)
            kinds.append(seen.setdefault((record.source, form), len(seen)))
            end += file.write(text)
        places.append(end)
        sources = list(seen)
        for number in permutation((SHUFFLE_STREAM, seed), len(lines)).tolist():
            file.seek(places[number])
            data = faults.get(number) or file.read(places[number + 1] - places[number])
            source, form = sources[kinds[number]]
            yield Record(source, lines[number], data), form
    path.unlink()


def text_of(record: Record) -> bytes:
    """A record's JSON text; raises the Reject that it is, if it is one."""
    if isinstance(record.data, Reject):
        raise record.data
    if isinstance(record.data, Row):
        return json.dumps(record.data.value(), default=str).encode()
    return record.data if isinstance(record.data, bytes) else record.data.encode(errors="surrogatepass")
