"""One sample of a store, by its number, its key, where it came from, or by chance; and the tokenizer it was made with."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc

from dflash_prep.corpus import read_chunks, split_lines
from dflash_prep.embedded import NAME
from dflash_prep.errors import UserError
from dflash_prep.files import digest
from dflash_prep.rules import object_of, text, whole
from dflash_prep.store import Store, damaged

MOST_FOUND = 20
REJECT = object_of({"line": whole(0)} | dict.fromkeys(("source", "reason", "excerpt"), text(r"(?s).*")))


class Choice(NamedTuple):
    """Which samples are shown, and how; false where none are asked for."""

    numbers: tuple[int, ...] = ()
    key: str | None = None
    find: tuple[str, int] | None = None
    random: int | None = None
    seed: int = 0
    tokens: bool = False
    tokenizer: str | None = None

    def __bool__(self) -> bool:
        return bool(self.numbers or self.key is not None or self.find or self.random)


class Found(NamedTuple):
    """A sample as it is shown: its number over all stores, what the index says of it, ids [length] and spans, uint32."""

    number: int
    source: str
    line: int
    length: int
    loss_tokens: int
    eligible: int
    key: str
    ids: np.ndarray
    spans: np.ndarray


def chosen(stores: Sequence[Store], choice: Choice) -> list[int]:
    """The numbers of the samples that are asked for, each once, in the order of the options."""
    numbers = list(choice.numbers)
    if choice.key is not None:
        numbers += few(by_key(stores, choice.key), choice.key)
    if choice.find:
        numbers += few(by_place(stores, *choice.find), ":".join(map(str, choice.find)))
    if choice.random:
        numbers += drawn(stores, choice.random, choice.seed)
    return list(dict.fromkeys(numbers))


def few(numbers: list[int], what: str) -> list[int]:
    """What was found, unless it is too much to look at: a key's first digit, a book in pieces."""
    if len(numbers) > MOST_FOUND:
        raise UserError(
            f"{what}: {len(numbers):,} samples have it, of numbers {numbers[0]} to {numbers[-1]}; choose with --sample"
        )
    return numbers


def indexed(stores: Sequence[Store], number: int) -> tuple[Store, int, dict]:
    """The store that has a sample, the sample's number there, and its row of the index."""
    left = number
    for store in stores:
        if left < len(store):
            return store, left, store.index.slice(left, 1).to_pylist()[0]
        left -= len(store)
    last = sum(map(len, stores)) - 1
    raise UserError(f"{stores[0].path}: has no sample {number}; its samples are 0 to {last}")


def read_sample(stores: Sequence[Store], number: int) -> Found:
    """A sample, proven by its key: shards are too large to be proven whole for one."""
    store, own, row = indexed(stores, number)
    try:
        ids, spans = store.sample(own)
    except IndexError:
        raise damaged(store.path, f"sample {own} is not in its shard") from None
    if digest(ids.astype("<u4").tobytes(), spans.astype("<u4").tobytes()) != row["key"]:
        raise damaged(store.path, f"sample {own} is not what the index states, its key differs")
    stated = {name: row[name] for name in ("source", "line", "length", "loss_tokens", "eligible", "key")}
    return Found(number=number, ids=ids, spans=spans, **stated)


def by_key(stores: Sequence[Store], key: str) -> list[int]:
    """The samples whose key begins with `key`."""
    found = [pc.starts_with(store.index["key"], key.lower()).to_numpy() for store in stores]
    if not len(numbers := np.flatnonzero(np.concatenate(found))):
        raise UserError(f"{stores[0].path}: no sample's key begins with {key}; keys are the hexadecimal ones of the index")
    return numbers.tolist()


def by_place(stores: Sequence[Store], source: str, line: int) -> list[int]:
    """The samples made from a record: its file, by its stated name or the end of its path, and its number there."""
    numbers, first = [], 0
    for store in stores:
        here = np.flatnonzero(store.column("line") == line)
        names = store.index["source"].take(here).to_pylist()
        numbers += [first + row for row, name in zip(here.tolist(), names, strict=True) if names_file(name, source)]
        first += len(store)
    if not numbers:
        raise UserError(f"{stores[0].path}: no sample is from {source}:{line}; {why_not(stores, source, line)}")
    return numbers


def names_file(stated: str, source: str) -> bool:
    """Whether `source` is a stated name or its last parts."""
    return stated == source or stated.endswith(f"/{source}")


def why_not(stores: Sequence[Store], source: str, line: int) -> str:
    """What became of a record that gave no sample."""
    for store in stores:
        for entry in rejects(store, str(line).encode()):
            if entry["line"] == line and names_file(entry["source"], source):
                return f"that record was rejected: {entry['reason']}"
    return "name one of its sources, and a record of it, as the index has them"


def rejects(store: Store, having: bytes = b"") -> Iterator[dict]:
    """The records that were not kept, in order: source, line, reason, excerpt. Read as far as it is asked for.

    Those without `having` in their JSON are passed over: parsing a million takes seconds.
    """
    path = store.path / "rejects.jsonl.zst"
    if not sum(store.manifest["counts"]["rejected"].values()):
        return
    try:
        for data in split_lines(read_chunks(path)):
            if data and having in data:
                entry = json.loads(data)
                if not REJECT(entry):
                    raise ValueError
                yield entry
    except (UserError, ValueError, RecursionError):
        raise damaged(path, "cannot read the rejects") from None


def drawn(stores: Sequence[Store], count: int, seed: int) -> list[int]:
    """Samples drawn at random, in ascending order; all where there are no more."""
    total = sum(map(len, stores))
    return sorted(np.random.default_rng(seed).choice(total, min(count, total), replace=False).tolist())


def tokenizer_of(stores: Sequence[Store], name: str | None):
    """The ChatTokenizer that the stores state, or the one of that name, proven by its fingerprint."""
    from dflash_prep.tokenizer import load_tokenizer  # no overview waits for it

    stated, path = stores[0].manifest["tokenizer"], stores[0].path
    try:
        tokenizer = load_tokenizer(name or own_name(stated["name"]))
    except UserError as fault:
        if name is not None:
            raise
        raise UserError(
            f"{path}: its tokenizer {stated['name']} cannot be loaded ({fault}); name it with --tokenizer DIR|ID"
        ) from None
    if tokenizer.fingerprint != stated["fingerprint"]:
        raise UserError(
            f"{path}: was made with {stated['name']}, and {tokenizer.name} is another tokenizer (its fingerprint differs); "
            "name the right one with --tokenizer DIR|ID"
        )
    return tokenizer


def own_name(stated: str) -> str | None:
    """What a stated tokenizer is loaded by: None for the default target's, whose name is that of its unpacked copy."""
    return None if re.fullmatch(rf"{re.escape(NAME)}-\d+", stated) and not Path(stated).is_dir() else stated
