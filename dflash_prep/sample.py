"""A sample as it goes into a store, and what became of a record."""

from typing import NamedTuple

import numpy as np

from dflash_prep.errors import Reject
from dflash_prep.files import digest


class Sample(NamedTuple):
    """Ids and loss spans [start, end, …] as little-endian uint32, and the sample's key: BLAKE2b-128 of both."""

    ids: bytes
    spans: bytes
    key: bytes

    @classmethod
    def of(cls, ids: np.ndarray, spans: np.ndarray) -> "Sample":
        """From arrays of numbers below 2^32."""
        parts = ids.astype("<u4").tobytes(), spans.astype("<u4").tobytes()
        return cls(*parts, bytes.fromhex(digest(*parts)))


class Outcome(NamedTuple):
    """What became of a record: its sample, or several of a text that was split; a reason in the place of one not kept."""

    source: str
    line: int
    samples: tuple[Sample | Reject, ...]
    excerpt: str = ""  # of a record of which something is not kept
    spelled: bool = False  # its text spells a special token
    truncated: bool = False
    sketch: bytes = b""  # of what the record says (near_dedup), where it is asked for
    lost: bool = False  # the rest of its file could not be read
