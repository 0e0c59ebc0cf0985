"""Strings that remember where they came from, so that one rendering tells where each message stands in the text.

A chat template joins, trims and splits the contents it is given. A `Traced` string is, in every comparison and test, the
string it is; through the operations that templates use it also keeps where parts of the originals are in it. Any other
operation gives an ordinary string: a part's place is then unknown, never wrong.
"""

from collections.abc import Hashable, Iterable

Origin = tuple[Hashable, str]  # who said it, and where in what was said
Part = tuple[int, int, Origin]  # characters [start, end) come from an origin; plain tuples, since there are so many


concat = str.__add__


class Traced(str):
    """A string and its parts in the order in which they were put together; private, since templates can read attributes."""

    __slots__ = ("_parts",)

    def __new__(cls, text: str = "", parts: tuple[Part, ...] = ()):
        return made(text, parts)

    def __str__(self) -> str:
        return self

    def __add__(self, other: object) -> str:
        if type(other) is str:  # as nearly always: nothing moves
            return made(concat(self, other), self._parts)
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> str:
        if type(other) is str and len(self._parts) == 1:
            ((start, end, origin),), by = self._parts, len(other)
            return made(concat(other, self), ((start + by, end + by, origin),))
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: object) -> str:
        text = super().__getitem__(key)
        if not isinstance(key, slice):
            return text
        start, end, step = key.indices(len(self))
        return made(text, self._between(start, max(start, end))) if step == 1 else text

    def _between(self, start: int, end: int) -> tuple[Part, ...]:
        """The parts of a slice. An empty part stays, and so does one of which an empty slice is all that is left."""
        kept = []
        for begin, finish, origin in self._parts:
            first, last = max(begin, start), min(finish, end)
            if first < last or (first == last and (start == end or begin == finish)):
                kept.append((first - start, last - start, origin))
        return tuple(kept)

    def lstrip(self, chars: str | None = None) -> str:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> str:
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None) -> str:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> str:
        return self[len(self) - len(super().removeprefix(prefix)) :]

    def removesuffix(self, suffix: str) -> str:
        return self[: len(super().removesuffix(suffix))]

    def split(self, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        return self._found(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        return self._found(super().rsplit(sep, maxsplit), sep)

    def _found(self, pieces: list[str], sep: str | None) -> list[str]:
        """The pieces of a split, each from its place."""
        found, position = [], 0
        for piece in pieces:
            start = self.find(piece, position) if sep is None else position
            found.append(self[start : start + len(piece)])
            position = start + len(piece) + len(sep or "")
        return found

    def partition(self, sep: str) -> tuple[str, str, str]:
        before, found, after = super().partition(sep)
        return self[: len(before)], found, self[len(self) - len(after) :]

    def replace(self, old: str, new: str, count: int = -1) -> str:
        return self if old not in self else between(new, self.split(old, count)) if old else super().replace(old, new, count)


def made(text: str, parts: tuple[Part, ...], new=str.__new__) -> Traced:
    """A traced string; a plain function, since so many are made."""
    string = new(Traced, text)
    string._parts = parts
    return string


def parts_of(text: str) -> tuple[Part, ...]:
    """The known parts of a string."""
    return text._parts if isinstance(text, Traced) else ()


def plain(text: str) -> str:
    """The string alone."""
    return "".join((text, ""))


def joined(pieces: Iterable[str]) -> str:
    """Strings laid end to end: `"".join` that keeps their parts."""
    pieces = list(pieces)
    text, position, parts = "".join(pieces), 0, []
    for piece in pieces:
        if type(piece) is Traced:
            for start, end, origin in piece._parts:
                parts.append((start + position, end + position, origin))
        position += len(piece)
    return made(text, tuple(parts)) if parts else text


def between(separator: str, pieces: list[str]) -> str:
    """`separator.join` that keeps the pieces' parts."""
    return joined(part for number, piece in enumerate(pieces) for part in ((separator, piece) if number else (piece,)))


def traced(value: object, owner: Hashable, path: str) -> object:
    """A JSON value with every string in it traced to an owner, each to its own path; keys stay as they are."""
    if isinstance(value, str):
        return made(value, ((0, len(value), (owner, path)),))
    if isinstance(value, dict):
        return {key: traced(part, owner, f"{path}.{key}") for key, part in value.items()}
    if isinstance(value, list):
        return [traced(part, owner, f"{path}.{place}") for place, part in enumerate(value)]
    return value


def origins(value: object) -> set[Origin]:
    """Where the strings of a JSON value come from."""
    if isinstance(value, str):
        return {origin for _, _, origin in parts_of(value)}
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set().union(*map(origins, inside))
