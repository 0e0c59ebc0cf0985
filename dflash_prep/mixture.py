"""Which samples an epoch draws: all of them once, sources repeated or thinned by a factor, a part held out."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import PurePath

import numpy as np

from dflash_prep.errors import UserError
from dflash_prep.pool import Pool
from dflash_prep.rng import permutation

ORDER_STREAM, THIN_STREAM, HELD_STREAM = 1, 4, 6
CHANCES = 2**32


@dataclass(frozen=True)
class Share:
    """One source's part of every epoch."""

    source: str
    members: np.ndarray  # int64, its samples that are not held out
    weight: Fraction

    @property
    def whole(self) -> int:
        """How often each of its samples occurs in every epoch."""
        return int(self.weight)

    @property
    def more(self) -> int:
        """How many of them, others each epoch, occur once more."""
        return round((self.weight - self.whole) * len(self.members))

    @property
    def per_epoch(self) -> int:
        """How many samples of it an epoch has, copies counted."""
        return self.whole * len(self.members) + self.more

    def draw(self, seed: int, epoch: int, stream: int) -> np.ndarray:
        """Its samples of one epoch: the extra ones go round one permutation, so that all are met before any again."""
        often = np.repeat(self.members, self.whole)
        if not self.more:
            return often
        places = (epoch * self.more + np.arange(self.more)) % len(self.members)
        return np.concatenate([often, self.members[permutation((THIN_STREAM, seed, stream), len(self.members))[places]]])


@dataclass(frozen=True)
class Mixture:
    """What each epoch draws, and what none does."""

    shares: tuple[Share, ...]
    held: np.ndarray  # int64, the samples of the hold-out

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """The permutation of its samples that an epoch is made from: of (seed, epoch) alone."""
        drawn = self.drawn(seed, epoch)
        return drawn[permutation((ORDER_STREAM, seed, epoch), len(drawn))]

    def drawn(self, seed: int, epoch: int) -> np.ndarray:
        """The samples of an epoch in the order of the stores, copies included."""
        drawn = np.concatenate([share.draw(seed, epoch, number) for number, share in enumerate(self.shares)])
        drawn.sort()
        return drawn

    def held_order(self, seed: int) -> np.ndarray:
        """The order that the hold-out is planned in."""
        return self.held[permutation((HELD_STREAM, seed), len(self.held))]


def mix(pool: Pool, weights: tuple[tuple[str, float], ...], holdout: float) -> Mixture:
    """The mixture of a pool; UserError for a source that it does not have or where nothing would be left."""
    held = pool.chance < round(holdout * CHANCES) if holdout else np.zeros(len(pool), bool)
    if holdout and not held.any():
        raise UserError(f"--holdout {holdout:g} of {len(pool)} samples holds none of them out; raise it or leave it out")
    named = dict(resolve(pool, weights))
    kept = np.flatnonzero(~held)
    kept = kept[np.argsort(pool.source[kept], kind="stable")]
    members = np.split(kept, np.searchsorted(pool.source[kept], np.arange(1, len(pool.sources))))
    shares = [Share(source, own, named.get(source, Fraction(1))) for source, own in zip(pool.sources, members, strict=True)]
    if not sum(share.per_epoch for share in shares):
        raise UserError("no sample is left to train on; raise --weight or lower --holdout")
    return Mixture(tuple(shares), np.flatnonzero(held))


def resolve(pool: Pool, weights: tuple[tuple[str, float], ...]) -> Iterator[tuple[str, Fraction]]:
    """Each weight with the full name of its source: the user may give its file's name, with or without suffixes."""
    seen: set[str] = set()
    for name, weight in weights:
        found = [source for source in pool.sources if source == name]
        found = found or [source for source in pool.sources if name in (PurePath(source).name, stem(source))]
        if len(found) != 1:
            reason = "names several sources" if found else "names no source"
            raise UserError(f"--weight {name}={weight:g}: {reason}; there are {', '.join(pool.sources)}")
        if found[0] in seen:
            raise UserError(f"--weight {name}={weight:g}: the weight of {found[0]} is given twice; give it once")
        seen.add(found[0])
        yield found[0], exact(weight)


def exact(weight: float) -> Fraction:
    """A weight as it is written: 0.3 is three tenths."""
    return Fraction(repr(weight))


def stem(source: str) -> str:
    """A file's name up to its first dot."""
    return PurePath(source).name.partition(".")[0]
