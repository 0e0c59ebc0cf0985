"""JSON as corpora have it: one value from bytes, or an array's elements one at a time."""

import codecs
import json
import re
from collections.abc import Iterator

from dflash_prep.errors import Reject, UserError

LONGEST = 1 << 26  # characters within which an array's element must end: else the array is taken for broken
FOLLOWING = tuple(" \t\n\r,]")  # a number or a word; 0. may go on as 0.5
BETWEEN = re.compile(r"[ \t\n\r]*")


def unique(pairs: list[tuple[str, object]]) -> dict:
    """An object; a key that is given twice leaves open which value is meant."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise Reject("a JSON object with a key twice")
    return value


DECODER = json.JSONDecoder()


def from_json(data: bytes | str) -> object:
    """The value of one JSON text; raises Reject."""
    try:
        text = data.removeprefix(codecs.BOM_UTF8) if isinstance(data, bytes) else data
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise Reject("not JSON") from None


def array_items(chunks: Iterator[bytes]) -> Iterator[str]:
    """The JSON texts of the elements of an array of any size.

    Raises UserError where the array breaks: nothing tells where its next element would begin.
    """
    text = Window(chunks)
    text.expect("[")
    if text.next() == "]":
        text.expect("]")
        return text.end()
    while True:
        yield text.value()
        if text.expect(",]") == "]":
            return text.end()


class Window:
    """The part of a text that is being read."""

    def __init__(self, chunks: Iterator[bytes]):
        # bytes that are no UTF-8 become lone surrogates, which cost their own record alone
        self._texts = codecs.iterdecode(chunks, "utf-8-sig", errors="surrogateescape")
        self._text, self._place = "", 0

    def _more(self) -> bool:
        """Read at least as much again, so that a long element is not decoded once a chunk; False at the end."""
        parts, size = [self._text[self._place :]], 0
        while size <= len(parts[0]) and (part := next(self._texts, None)) is not None:
            parts.append(part)
            size += len(part)
        self._text, self._place = "".join(parts), 0
        return size > 0

    def next(self) -> str:
        """The next character that is not white space, not consumed; empty at the end."""
        while True:
            self._place = BETWEEN.match(self._text, self._place).end()
            if self._place < len(self._text):
                return self._text[self._place]
            if not self._more():
                return ""

    def expect(self, characters: str) -> str:
        """Consume one of some characters."""
        found = self.next()
        if not found or found not in characters:
            raise UserError("the JSON array ends early" if not found else f"no JSON array: {found!r} is out of place")
        self._place += 1
        return found

    def value(self) -> str:
        """Consume one value; its text. A number or a word counts only with what follows it, since it might go on."""
        self.next()
        while True:
            try:
                end = DECODER.raw_decode(self._text, self._place)[1]
            except (ValueError, RecursionError):
                end = None
            if end is not None and (self._text[end - 1] in '}]"' or self._text[end : end + 1] in FOLLOWING):
                start, self._place = self._place, end
                return self._text[start:end]
            if len(self._text) - self._place > LONGEST or not self._more():
                raise UserError("the JSON array is broken or ends early")

    def end(self) -> None:
        """Nothing may follow."""
        if self.next():
            raise UserError("something follows the JSON array")
