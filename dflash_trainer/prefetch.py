"""Feeding: a thread maps the store, follows the plan and hands over micro-batches that are ready to compute.

Everything was decided off-line, so nothing is sorted, packed or shuffled here, and the length of each epoch is known
before the first batch exists.
"""

import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch

from dflash_prep.anchors import anchor_count, density_ppm, draw_anchors, eligible_count
from dflash_prep.manifest import Plan
from dflash_prep.stores import Stores
from dflash_trainer.copies import numbered_rows
from dflash_trainer.micro_batch import MicroBatch, Sample, assemble
from dflash_trainer.shapes import Shapes, fit
from dflash_trainer.staging import Staging

AHEAD = 4  # micro-batches that are kept ready


def make_micro_batch(
    row: dict, epoch: int, plan: Plan, store: Stores, copies: list[int] | None = None, shapes: Shapes | None = None
) -> MicroBatch:
    """Assemble the micro-batch of one row of the plan; `copies` are its samples' copy numbers, None: all 0."""
    samples, packed = [], plan["strategy"] == "packed"
    copies = copies or [0] * len(row["samples"])
    for sample, copy in zip(row["samples"], copies, strict=True):
        ids, spans = store.sample(sample)
        anchors = draw_anchors(spans, planned_anchors(spans, plan), plan["seed"], epoch, sample, copy)
        samples.append(Sample(ids, spans, anchors))
    batch = assemble(
        samples,
        packed=packed,
        width=shapes.row if shapes and packed else row["width"],
        block_size=plan["block_size"],
        epoch=epoch,
        step=row["step"],
        slot=row["slot"],
        numbers=tuple(row["samples"]),
        copies=tuple(copies),
    )
    return fit(batch, shapes) if shapes else batch


def planned_anchors(spans: np.ndarray, plan: Plan) -> int:
    """How many anchors the plan gives a sample."""
    eligible = np.int64(eligible_count(spans))
    return int(anchor_count(eligible, density_ppm(plan["anchor_density"]), plan["max_anchors"]))


class BatchPrefetcher:
    """Iterates over one rank's micro-batches from a global step to the end of the plan, read ahead on a thread.

    Rank r of W gets slots r, r+W, … of each step, padded to `shapes`, through `finish` and on `device`. `batches_per_epoch`,
    `batches_produced` and `epoch_progress` speak of the current epoch and of this rank, and hold from construction on.
    """

    def __init__(
        self,
        plan: Plan,
        store: Stores,
        *,
        rank: int = 0,
        world_size: int = 1,
        first_step: int = 0,
        device: torch.device | None = None,
        shapes: Shapes | None = None,
        finish: Callable[[MicroBatch], MicroBatch] = lambda batch: batch,
    ):
        self._plan, self._store, self._shapes, self._finish = plan, store, shapes, finish
        self._staging = Staging(device) if device and device.type == "cuda" else None
        self._rank, self._world_size = rank, world_size
        self._per_step = plan["slots"] // world_size
        self._epoch, self._epoch_step = plan.locate(first_step)
        self.batches_produced = self._epoch_step * self._per_step
        if self._epoch == len(plan["epochs"]):  # nothing is left: the last epoch is complete
            self.batches_produced = plan["epochs"][-1]["steps"] * self._per_step
        self._shown_epoch = min(self._epoch, len(plan["epochs"]) - 1)
        self._queue: queue.Queue = queue.Queue(AHEAD)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        """The current epoch, 0-based."""
        return self._shown_epoch

    @property
    def batches_per_epoch(self) -> int:
        """This rank's micro-batches in the current epoch."""
        return self._plan["epochs"][self._shown_epoch]["steps"] * self._per_step

    @property
    def epoch_progress(self) -> float:
        """The share of the current epoch that was handed over, 0 … 1."""
        return self.batches_produced / self.batches_per_epoch

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._queue.put(item)  # whoever asks again gets the same answer
            raise item
        batch = self._staging.receive(item) if self._staging else item
        if batch.epoch != self._shown_epoch:
            self._shown_epoch, self.batches_produced = batch.epoch, 0
        self.batches_produced += 1
        return batch

    def close(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.01)
            except queue.Empty:
                continue

    def _run(self) -> None:
        try:
            for batch in self._batches():
                if not self._put(self._staging.send(batch) if self._staging else batch):
                    return
            self._put(StopIteration())
        except BaseException as fault:  # whatever it was belongs to the consumer
            self._put(fault)

    def _put(self, item) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def _batches(self) -> Iterator[MicroBatch]:
        for epoch in range(self._epoch, len(self._plan["epochs"])):
            first = self._epoch_step if epoch == self._epoch else 0
            for row, copies in numbered_rows(self._plan, len(self._store), epoch, first):
                if row["slot"] % self._world_size == self._rank:
                    yield self._finish(make_micro_batch(row, epoch, self._plan, self._store, copies, self._shapes))
