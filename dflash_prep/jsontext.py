"""JSON as corpora have it: one value from bytes, or an array's elements one at a time."""

import codecs
import json
import re
from collections.abc import Iterator

from dflash_prep.errors import Reject, UserError

LONGEST = 1 << 28  # characters within which an array's element must end: else the array is taken for broken
BETWEEN = re.compile(r"[ \t\n\r]*")


def unique(pairs: list[tuple[str, object]]) -> dict:
    """An object; a key that is given twice leaves open which value is meant."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise Reject("a JSON object with a key twice")
    return value


STRICT, LENIENT = json.JSONDecoder(object_pairs_hook=unique), json.JSONDecoder()


def from_json(data: bytes) -> object:
    """The value of one JSON text; raises Reject."""
    try:
        return json.loads(data.removeprefix(codecs.BOM_UTF8), object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise Reject("not JSON") from None


def array_items(chunks: Iterator[bytes]) -> Iterator[object]:
    """The elements of a JSON array of any size, a Reject in the place of one whose keys are not unique.

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

    def value(self) -> object:
        """Consume one value. A number or a word counts only with what follows it, since it might go on."""
        self.next()
        while True:
            try:
                value, end = self._decode()
            except (ValueError, RecursionError):
                value, end = None, len(self._text)
            if end < len(self._text) or (value is not None and self._text[end - 1] in '}]"'):
                self._place = end
                return value
            if len(self._text) - self._place > LONGEST or not self._more():
                raise UserError("the JSON array is broken or ends early")

    def _decode(self) -> tuple[object, int]:
        try:
            return STRICT.raw_decode(self._text, self._place)
        except Reject as reject:
            return reject, LENIENT.raw_decode(self._text, self._place)[1]

    def end(self) -> None:
        """Nothing may follow."""
        if self.next():
            raise UserError("something follows the JSON array")
