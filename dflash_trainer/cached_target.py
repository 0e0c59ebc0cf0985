"""A target whose features are read from a cache where it has them, and are written to it where it lacks them.

All features pass through bfloat16, the computed ones too, so that a run's numbers do not depend on what was in the cache. A
sample's are those of its first copy in the first micro-batch that computed it. What one rank writes, all ranks read from the
next epoch on, and none before: a run is the same on any number of ranks, and goes on the same after a kill.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from dflash_prep.errors import UserError
from dflash_prep.files import canonical_json, digest, write_json
from dflash_prep.manifest import Plan
from dflash_prep.stores import Stores
from dflash_trainer.hidden_cache import MANIFEST, STORED, Claim, HiddenCache, check_room, planned_samples, stated
from dflash_trainer.launch import Ranks, decide_together, refuse_together
from dflash_trainer.micro_batch import MicroBatch
from dflash_trainer.target import FrozenTarget

UNTOLD = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")  # what changes no feature


def cache_key(model: nn.Module, taps: tuple[int, ...], dtype: torch.dtype, store: Stores) -> dict:
    """What features depend on: the store, the taps, every weight and setting of the target up to its last tap, its dtype."""
    settings = {name: str(value) for name, value in model.config.get_text_config().to_dict().items() if name not in UNTOLD}
    layers = model.get_decoder().layers[: max(taps) + 1]
    return {
        "store_fingerprint": store.fingerprint,
        "taps": list(taps),
        "target_dtype": str(dtype).removeprefix("torch."),
        "target": digest(canonical_json(settings), *map(weights_digest, (model.get_input_embeddings(), layers))),
    }


def weights_digest(module: nn.Module) -> bytes:
    """Of all weights and buffers of a module, by name."""
    parts = []
    for name, value in sorted(module.state_dict().items()):
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        parts += [name.encode(), digest(memoryview(raw)).encode()]
    return digest(*parts).encode()


class CachedTarget:
    """Stands in for a `FrozenTarget` before the draft and its objective; `planned` are the samples that the plan asks for.

    A sharded target is run by all ranks or by none: by none once the cache has all that is planned.
    """

    def __init__(self, target: FrozenTarget, cache: HiddenCache, planned: np.ndarray, ranks: Ranks, dtype: torch.dtype):
        self.head, self.embed, self.cap, self.sharded = target.head, target.embed, target.cap, target.sharded
        self._target, self._cache, self._planned = target, cache, planned
        self._ranks, self._dtype = ranks, dtype
        self._settle()

    def _settle(self) -> None:
        """Decide whether the ranks have to run the target together until the next epoch."""
        complete = decide_together(lambda: bool(self._cache.holds(self._planned).all()), self._ranks)
        self._together = self.sharded and not complete

    def attach(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch with its features if all of them can be read; called ahead of need, on a thread."""
        if not batch.blocks or not self._cache.holds(batch.samples).all():
            return batch
        parts = [self._cache.read(sample) for sample in batch.samples]
        rows = torch.zeros(len(batch.real), parts[0].shape[1], dtype=STORED)  # those of padding stay 0
        torch.cat(parts, out=rows[: batch.tokens])
        return replace(batch, features=rows)

    def features(self, batch: MicroBatch) -> torch.Tensor:
        """The tapped outputs of a micro-batch's real tokens [T, K·H], read or computed."""
        if not len(batch.features):
            batch = self.attach(batch)
        if len(batch.features) and not self._together:
            return batch.features.to(batch.real.device, self._dtype)
        rows = self._target.features(batch).to(STORED)
        held = self._cache.holds(batch.samples)
        parts = rows[: batch.tokens].split(batch.lengths)
        for sample, copy, known, part in zip(batch.samples, batch.copies, held, parts, strict=True):
            if known:
                part.copy_(self._cache.read(sample))
            elif copy == 0:
                self._cache.add(sample, part)
        if self._cache.is_full:
            self._write()
        return rows.to(self._dtype)

    def stand_by(self) -> None:
        """What a rank does that needs no features while others may compute some."""
        if self._together:
            self._target.stand_by()

    def keep(self) -> None:
        """Write what was computed so far, on all ranks before any goes on: a checkpoint's features are there to resume."""
        fault = None
        try:
            self._write()
        except UserError as error:
            fault = str(error)
        refuse_together(fault, self._ranks)

    def _write(self) -> None:
        try:
            self._cache.flush()
        except OSError as fault:
            raise UserError(
                f"{self._cache.path}: cannot write the cache ({fault.strerror}); make room and go on with --resume auto"
            ) from None

    def turn(self) -> None:
        """At the end of an epoch: from now on all ranks read what any of them wrote."""
        self.keep()
        self._cache.refresh()
        self._settle()


@contextmanager
def cached(
    target: FrozenTarget, path: Path, key: dict, plan: Plan, store: Stores, width: int, ranks: Ranks, dtype: torch.dtype
) -> Iterator[CachedTarget]:
    """The target behind a cache, which is opened or begun, and whose size is told; the directory is held meanwhile.

    `key`: see `cache_key`, rank 0's counts; `width`: K·H; `dtype`: what features are handed over in.
    """
    lengths, planned = store.column("length"), planned_samples(plan, len(store))
    with ExitStack() as held:

        def begin() -> str:
            claim = held.enter_context(Claim(path, key))
            cache = HiddenCache(path, lengths, width)
            complete = cache.holds(planned).all()
            if not complete and not claim.alone:
                raise UserError(f"{path}: lacks samples of this plan while another run uses it; wait for that run to end")
            said = check_room(cache, planned)
            if claim.alone:
                write_json(path / MANIFEST, stated(key))
            if complete:
                claim.share()
            return said

        said = decide_together(begin, ranks)
        if ranks.leads:
            print(said, flush=True)
        yield CachedTarget(target, HiddenCache(path, lengths, width, ranks.rank), planned, ranks, dtype)
