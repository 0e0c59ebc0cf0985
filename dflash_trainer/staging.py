"""Staging: how micro-batches reach a GPU while it computes.

All tensors of one are copied into pinned host memory, which is used in turn, and from there to the device in one piece, on
a stream of its own; the tensors are views of that piece.
"""

from itertools import cycle
from typing import NamedTuple

import torch

from dflash_trainer.micro_batch import MicroBatch

BUFFERS = 2  # one is filled while the other is sent
ALIGNED = 16  # bytes


class Sent(NamedTuple):
    """A micro-batch under way: its tensors lie in `memory`, which is whole once `arrived` has passed."""

    batch: MicroBatch
    memory: torch.Tensor
    arrived: torch.cuda.Event


class Buffer:
    """Pinned memory that grows with what it is given, and the last transfer from it."""

    def __init__(self):
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.sent: torch.cuda.Event | None = None

    def fill(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Copy tensors into the memory once nothing is sent from it any more; returns the part that is filled."""
        if self.sent is not None:
            self.sent.synchronize()
        size = places(tensors)[-1]
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        for view, tensor in zip(views(self._memory, tensors), tensors, strict=True):
            view.copy_(tensor)
        return self._memory[:size]


class Staging:
    """Sends micro-batches to a GPU on a stream of its own. `send` is called on one thread, `receive` on another."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffers = cycle([Buffer() for _ in range(BUFFERS)])

    def send(self, batch: MicroBatch) -> Sent:
        """Start a micro-batch's transfer."""
        buffer, tensors = next(self._buffers), batch.tensors()
        filled = buffer.fill(tensors)
        with torch.cuda.stream(self._stream):
            memory = filled.to(self._device, non_blocking=True)
            buffer.sent = torch.cuda.Event()
            buffer.sent.record(self._stream)
        return Sent(batch.with_tensors(views(memory, tensors)), memory, buffer.sent)

    def receive(self, sent: Sent) -> MicroBatch:
        """The micro-batch, for work on the current stream, which waits for it where need be; the CPU does not."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(sent.arrived)
        sent.memory.record_stream(current)
        return sent.batch


def places(tensors: list[torch.Tensor]) -> list[int]:
    """Where each tensor begins in one piece of memory, in bytes, and how long that is."""
    found = [0]
    for tensor in tensors:
        found.append(found[-1] + -(-tensor.nbytes // ALIGNED) * ALIGNED)
    return found


def views(memory: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of the same types and shapes as `tensors`, side by side in uint8 memory."""
    return [
        memory[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for place, tensor in zip(places(tensors), tensors, strict=False)
    ]
