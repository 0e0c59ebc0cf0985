"""Samples that say nearly the same: MinHash of what the messages say, looked up by locality-sensitive hashing.

Broder, "On the resemblance and containment of documents", 1997; the sketches and their index are rensa's. The index takes
some two kilobytes a sample, the one part of a store's making whose memory grows with the corpus.
"""

import re
from collections.abc import Iterable

from dflash_prep.errors import UserError

SKETCH = {"num_perm": 128, "seed": 42}
WORDS = 5  # that stand together make one element of a text's set
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]|\w+")  # scripts without spaces letter by letter
RECALL = 0.99  # at the threshold itself


def sketch(texts: Iterable[str]) -> bytes:
    """The MinHash of some texts: of the set of all runs of five words in any of them."""
    from rensa import RMinHash

    runs = set()
    for text in texts:
        words = WORD.findall(text.lower())
        runs.update(" ".join(words[at : at + WORDS]) for at in range(max(len(words) - WORDS + 1, 1)))
    minhash = RMinHash(**SKETCH)
    minhash.update(sorted(runs))
    return minhash.__reduce__()[2]


class NearSeen:
    """The sketches of all samples so far; `threshold` is the share of common elements (Jaccard) that makes two alike."""

    def __init__(self, threshold: float):
        check_installed()
        from rensa import RMinHashDeduplicator

        rows = max(rows for rows in (1, 2, 4, 8, 16) if recall(threshold, rows) >= RECALL or rows == 1)
        bands = SKETCH["num_perm"] // rows
        self._index = RMinHashDeduplicator(threshold, SKETCH["num_perm"], True, bands, SKETCH["seed"])

    def first(self, state: bytes) -> int | None:
        """The first sample that is like one of this sketch; None if there is none."""
        return min(map(int, self._index.get_duplicates(restored(state))), default=None)

    def add(self, state: bytes, number: int) -> None:
        """Note a sample that is like no earlier one."""
        self._index.add(str(number), restored(state))


def recall(similarity: float, rows: int) -> float:
    """The chance that two texts of a similarity share a band of so many rows."""
    return 1 - (1 - similarity**rows) ** (SKETCH["num_perm"] // rows)


def restored(state: bytes):
    """The MinHash that a sketch states."""
    from rensa import RMinHash

    minhash = RMinHash(**SKETCH)
    minhash.__setstate__(state)
    return minhash


def check_installed() -> None:
    """Refuse the option where the library is missing, before any work is done."""
    from importlib.util import find_spec

    if find_spec("rensa") is None:
        raise UserError("--near-dedup needs rensa: run 'pip install rensa', or leave the option out")
