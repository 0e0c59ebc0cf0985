"""The hidden-state cache: tapped features of samples on disk, for corpora that are small enough for it.

A cache belongs to one token store, one target and its taps: `cache.json` says to which. Its shards are safetensors files of
`samples`, int64 [n], and `features`, bfloat16 [Σ length, K·H]: the samples' rows one behind another. A shard is whole or
absent, and is mapped, never read whole; what it lacks is written later, by whoever computes it.
"""

import fcntl
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dflash_prep.errors import UserError
from dflash_prep.files import read_json, sync_file
from dflash_prep.manifest import Plan
from dflash_trainer.checkpoint import write_tensors

FORMAT, VERSION = "dflash-hidden-cache", 1
MANIFEST, SHARDS, LOCK, PARTIAL = "cache.json", "shard-*.safetensors", ".lock", ".partial"
STORED = torch.bfloat16
HELD = 256 << 20  # bytes that a rank gathers for a shard
SPARED = 0.05  # of the free space, which checkpoints and others want


class HiddenCache:
    """What is in a cache directory, to read and to add to; `lengths` are those of the store's samples, in tokens.

    One thread may read while another writes. What was added is read after `refresh`, which finds what other ranks wrote too.
    """

    def __init__(self, path: Path, lengths: np.ndarray, width: int, rank: int = 0):
        self.path, self._lengths, self._width, self._rank = path, lengths, width, rank
        self._shards: list[torch.Tensor] = []
        self._files: set[str] = set()
        self._shard, self._row = np.full(len(lengths), -1, np.int32), np.zeros(len(lengths), np.int64)
        self._taken: set[int] = set()  # samples that were added since the last refresh
        self._held: list[tuple[int, torch.Tensor]] = []
        self._bytes = 0
        self.refresh()

    def holds(self, samples) -> np.ndarray:
        """Which of the samples can be read, bool."""
        return self._shard[np.asarray(samples, np.int64)] >= 0

    def size(self, samples: np.ndarray) -> int:
        """Bytes of the features of samples."""
        return int(self._lengths[samples].sum()) * self._width * STORED.itemsize

    def read(self, sample: int) -> torch.Tensor:
        """The features of a sample that is held, bfloat16 [length, K·H], mapped."""
        row = int(self._row[sample])
        return self._shards[self._shard[sample]][row : row + int(self._lengths[sample])]

    def add(self, sample: int, features: torch.Tensor) -> None:
        """Take up a sample's features, [length, K·H] on any device, unless they are here already."""
        if self._shard[sample] >= 0 or sample in self._taken:
            return
        self._taken.add(sample)
        self._held.append((sample, features.to("cpu", STORED, copy=True)))
        self._bytes += self._held[-1][1].nbytes

    @property
    def is_full(self) -> bool:
        """Whether enough was added for a shard."""
        return self._bytes >= HELD

    def flush(self) -> None:
        """Write what was added as a shard; a full disk is an OSError."""
        if not self._held:
            return
        own = self.path.glob(f"shard-{self._rank:04d}-*.safetensors")
        number = 1 + max((int(file.stem.rsplit("-", 1)[1]) for file in own), default=-1)
        file = self.path / f"shard-{self._rank:04d}-{number:06d}.safetensors"
        draft = file.with_name(f"{file.name}.{os.getpid()}{PARTIAL}")
        samples = torch.tensor([sample for sample, _ in self._held])
        write_tensors({"samples": samples, "features": torch.cat([rows for _, rows in self._held])}, draft)
        sync_file(draft)
        os.replace(draft, file)
        sync_file(self.path)
        self._held, self._bytes = [], 0

    def refresh(self) -> None:
        """Find the shards that were written meanwhile, by this rank or another."""
        for file in sorted(self.path.glob(SHARDS)):
            if file.name not in self._files:
                self._open(file)
        self._taken = {sample for sample, _ in self._held}

    def _open(self, file: Path) -> None:
        try:
            shard = load_file(file)  # mapped
            samples, features = shard["samples"].numpy(), shard["features"]
            lengths = self._lengths[samples]
        except (SafetensorError, OSError, KeyError, IndexError) as fault:
            raise damaged(file, str(fault)) from None
        if features.dtype != STORED or features.shape != (lengths.sum(), self._width):
            raise damaged(file, "its features are not those of its samples")
        self._files.add(file.name)
        self._shards.append(features)
        self._row[samples] = lengths.cumsum() - lengths
        self._shard[samples] = len(self._shards) - 1  # last: another thread may be reading


def damaged(file: Path, reason: str) -> UserError:
    """The error of a shard that cannot be used; what it held is computed again once it is gone."""
    return UserError(f"{file}: damaged ({' '.join(reason.split())}); remove this file and go on")


class Claim:
    """A run's hold on a cache's directory: `alone`, and then it may write, or beside others that read it as well.

    `key` says whose features the cache has to hold; one of others is refused. The system lets go however the process ends.
    """

    def __init__(self, path: Path, key: dict):
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._file = (path / LOCK).open("a")
        except OSError as fault:
            raise UserError(f"{path}: cannot keep a cache here ({fault.strerror}); name a directory") from None
        self.alone = self._lock(fcntl.LOCK_EX)
        if not self.alone and not self._lock(fcntl.LOCK_SH):
            raise UserError(f"{path}: another run writes this cache; wait for it, or name another with --hidden-cache")
        check_key(path, key)
        if self.alone:
            for rest in path.glob(f"shard-*{PARTIAL}"):
                rest.unlink()

    def _lock(self, kind: int) -> bool:
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def share(self) -> None:
        """Let others read too: this run writes nothing more."""
        self._lock(fcntl.LOCK_SH)
        self.alone = False

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *_) -> None:
        self._file.close()


def stated(key: dict) -> dict:
    """What `cache.json` holds."""
    return {"format": FORMAT, "version": VERSION, **key}


def check_key(path: Path, key: dict) -> None:
    """A cache holds features of what `key` names, or nothing yet."""
    if not (path / MANIFEST).exists():
        foreign = [entry.name for entry in path.iterdir() if entry.name != LOCK]
        if foreign:
            raise UserError(f"{path}: no cache, and not empty ({min(foreign)}); name another with --hidden-cache")
        return
    found = read_json(path / MANIFEST, "cache's manifest")
    for name, value in stated(key).items():
        if found.get(name) != value:
            raise UserError(
                f"{path}: holds features of another {name.replace('_', ' ')}; name another with --hidden-cache, or remove it"
            )


def planned_samples(plan: Plan, samples: int) -> np.ndarray:
    """The samples of a store of so many whose features a plan asks for, ascending: those in slots with an anchor."""
    wanted = np.zeros(samples, bool)
    for epoch in [*range(len(plan["epochs"])), *([None] if plan["holdout_set"] else [])]:
        with plan.open_epoch(epoch) as file:
            for part in file.iter_batches(columns=["anchors", "samples"]):
                part = part.filter(pc.greater(part["anchors"], 0))
                wanted[part["samples"].flatten().to_numpy()] = True
    return wanted.nonzero()[0]


def check_room(cache: HiddenCache, planned: np.ndarray) -> str:
    """Refuse a cache that the disk has no room for; returns how large it is, to be said before anything is written."""
    whole, missing = cache.size(planned), cache.size(planned[~cache.holds(planned)])
    free = shutil.disk_usage(cache.path).free
    said = (
        f"{cache.path}: features of {len(planned):,} samples take {readable(whole)}, of which {readable(missing)} "
        f"are still to be written; {readable(free)} are free"
    )
    if missing > (1 - SPARED) * free:
        raise UserError(f"{said}: it does not fit; name a larger disk with --hidden-cache, or leave it out")
    return said


def readable(size: int) -> str:
    """Bytes in decimal units, as disks are sold."""
    amount, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.3g} {unit}" if amount < 1000 else f"{amount:,.0f} {unit}"
