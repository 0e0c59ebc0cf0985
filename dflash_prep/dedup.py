"""Equal samples: the keys of all samples so far, exactly and in little memory."""

import numpy as np

KEY = np.dtype([("high", "<u8"), ("low", "<u8")])  # a key's 16 bytes; only equality counts, so any order will do


class Seen:
    """The keys of all samples so far and each one's number: 20 bytes a sample once they are packed.

    Keys are 16 bytes. New ones are in a dict until `pack` merges them into sorted arrays.
    """

    def __init__(self):
        self._new: dict[bytes, int] = {}
        self._keys, self._numbers = np.empty(0, KEY), np.empty(0, np.uint32)
        self._high = np.empty(0, np.uint64)

    def first(self, key: bytes) -> int | None:
        """The number of the sample with this key; None if there is none."""
        if key in self._new:
            return self._new[key]
        (wanted,) = np.frombuffer(key, KEY)
        place = np.searchsorted(self._high, wanted["high"])
        while place < len(self._high) and self._high[place] == wanted["high"]:
            if self._keys[place] == wanted:
                return int(self._numbers[place])
            place += 1
        return None

    def add(self, key: bytes, number: int) -> None:
        """Note the first sample with a key."""
        self._new[key] = number

    def pack(self) -> None:
        """Merge what was added into the sorted arrays."""
        added = np.frombuffer(b"".join(self._new), KEY)
        keys = np.concatenate([self._keys, added])
        numbers = np.concatenate([self._numbers, np.fromiter(self._new.values(), np.uint32, len(self._new))])
        order = np.argsort(keys["high"], kind="stable")
        self._keys, self._numbers, self._new = keys[order], numbers[order], {}
        self._high = np.ascontiguousarray(self._keys["high"])
