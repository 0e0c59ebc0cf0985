"""One or several token stores as one: sample numbers run on from store to store."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from dflash_prep.errors import UserError
from dflash_prep.files import resolved
from dflash_prep.manifest import joint_fingerprint
from dflash_prep.store import Store


def made_with(store: Store) -> list[object]:
    """The fingerprints of a store's tokenizer and chat template, as far as it states them."""
    return [store.manifest.get(key, {}).get("fingerprint") for key in ("tokenizer", "chat_template")]


class Stores:
    """Stores of one tokenizer and one chat template, in the order in which they were named."""

    def __init__(self, paths: Sequence[Path]):
        self.parts = tuple(map(Store, paths))
        first = self.parts[0]
        for part in self.parts[1:]:
            if made_with(part) != made_with(first):
                raise UserError(
                    f"{part.path}: was tokenized otherwise than {first.path}; tokenize both with one --tokenizer"
                )
        sizes = [len(part) for part in self.parts]
        self._starts = np.concatenate([[0], np.cumsum(sizes)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def path(self) -> Path:
        """Where the first lies: what messages name."""
        return self.parts[0].path

    @property
    def fingerprint(self) -> str:
        """Of the content of all: a single store's own."""
        return joint_fingerprint([part.fingerprint for part in self.parts])

    @cached_property
    def manifest(self) -> dict:
        """The first store's, with the special tokens that any of them uses."""
        special = [token for part in self.parts for token in part.manifest["special_tokens"]]
        return self.parts[0].manifest | {"special_tokens": special}

    def origin(self) -> dict:
        """How a plan states what it was made from."""
        stated = [{"path": str(resolved(part.path)), "fingerprint": part.fingerprint} for part in self.parts]
        return {"store": stated[0]} if len(stated) == 1 else {"stores": stated}

    def column(self, name: str) -> np.ndarray:
        """A numeric column of the indexes as int64, shape [samples]."""
        return np.concatenate([part.column(name) for part in self.parts])

    def texts(self, name: str) -> list[str]:
        """A text column of the indexes."""
        return [text for part in self.parts for text in part.index[name].to_pylist()]

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """A sample's ids [length] and loss spans [start, end, …], uint32, without a copy."""
        part = int(np.searchsorted(self._starts, index, "right")) - 1
        return self.parts[part].sample(index - int(self._starts[part]))
