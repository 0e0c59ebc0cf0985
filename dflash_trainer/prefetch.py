"""Feeding: a thread maps the store, follows the plan and hands over micro-batches that are ready to compute.

Everything was decided off-line, so nothing is sorted, packed or shuffled here, and the length of each epoch is known
before the first batch exists.
"""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from dflash_prep.anchors import anchor_count, density_ppm, draw_anchors, eligible_count
from dflash_prep.manifest import Plan
from dflash_prep.store import Store
from dflash_trainer.blocks import make_blocks

AHEAD = 4  # micro-batches that are kept ready


@dataclass(frozen=True)
class MicroBatch:
    """One slot of one step: R rows of W tokens for the target, T real tokens and A blocks for the draft.

    input_ids, position_ids: int64 [R, W]; a packed row has R = 1 and positions that start anew with each sample.
    real: int64 [T], where the real tokens stand in the flattened rows; positions: int64 [T], within their samples.
    anchors, block_tokens: int64 [A]; labels: int64 [A, B−1]; weights: float64 [A, B−1] (see `blocks`).
    lengths and block_counts: a number a sample, in the order of the real tokens.
    """

    epoch: int
    step: int
    slot: int
    samples: tuple[int, ...]
    packed: bool
    lengths: tuple[int, ...]
    block_counts: tuple[int, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    real: torch.Tensor
    positions: torch.Tensor
    anchors: torch.Tensor
    block_tokens: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor

    def to(self, device: torch.device) -> "MicroBatch":
        """The same micro-batch with its tensors on a device."""
        if device.type == "cpu":
            return self
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.type is torch.Tensor}
        return replace(self, **{name: value.pin_memory().to(device, non_blocking=True) for name, value in tensors.items()})


def make_micro_batch(row: dict, epoch: int, plan: Plan, store: Store) -> MicroBatch:
    """Assemble the micro-batch of one row of the plan."""
    packed = plan["strategy"] == "packed"
    ids, spans = [], []
    for sample in row["samples"]:
        sample_ids, sample_spans = store.sample(sample)
        ids.append(sample_ids)
        spans.append(sample_spans)
    anchors = [
        draw_anchors(marks, planned_anchors(marks, plan), plan["seed"], epoch, sample)
        for sample, marks in zip(row["samples"], spans, strict=True)
    ]
    blocks = make_blocks(ids, spans, anchors, plan["block_size"])
    lengths = tuple(map(len, ids))
    positions = np.concatenate([*map(np.arange, lengths), np.empty(0, np.int64)])
    flat = np.concatenate([*ids, np.empty(0, np.uint32)]).astype(np.int64)
    if packed:
        real, shape = np.arange(len(flat)), (min(1, len(ids)), row["width"])
    else:
        starts = np.repeat(np.arange(len(ids)) * row["width"], lengths)
        real, shape = starts + positions, (len(ids), row["width"])
    input_ids, position_ids = np.zeros((2, shape[0] * shape[1]), np.int64)
    input_ids[real], position_ids[real] = flat, positions
    return MicroBatch(
        epoch=epoch,
        step=row["step"],
        slot=row["slot"],
        samples=tuple(row["samples"]),
        packed=packed,
        lengths=lengths,
        block_counts=blocks.counts,
        input_ids=torch.from_numpy(input_ids).view(shape),
        position_ids=torch.from_numpy(position_ids).view(shape),
        real=torch.from_numpy(real),
        positions=torch.from_numpy(positions),
        anchors=torch.from_numpy(blocks.anchors),
        block_tokens=torch.from_numpy(blocks.tokens),
        labels=torch.from_numpy(blocks.labels),
        weights=torch.from_numpy(blocks.weights),
    )


def planned_anchors(spans: np.ndarray, plan: Plan) -> int:
    """How many anchors the plan gives a sample."""
    eligible = np.int64(eligible_count(spans))
    return int(anchor_count(eligible, density_ppm(plan["anchor_density"]), plan["max_anchors"]))


class BatchPrefetcher:
    """Iterates over one rank's micro-batches from a global step to the end of the plan, read ahead on a thread.

    Rank r of W gets slots r, r+W, … of each step. `batches_per_epoch`, `batches_produced` and `epoch_progress` speak of
    the current epoch and of this rank, and hold from construction on.
    """

    def __init__(self, plan: Plan, store: Store, *, rank: int = 0, world_size: int = 1, first_step: int = 0):
        self._plan, self._store = plan, store
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
        if item.epoch != self._shown_epoch:
            self._shown_epoch, self.batches_produced = item.epoch, 0
        self.batches_produced += 1
        return item

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
                if not self._put(batch):
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
            for row in self._plan.rows(epoch, first):
                if row["slot"] % self._world_size == self._rank:
                    yield make_micro_batch(row, epoch, self._plan, self._store)
