"""What each rank tells of a step beside its gradient: how long it computed, how long it waited for data, what it holds."""

import resource
import sys
import time
from typing import NamedTuple

import torch


class Vitals(NamedTuple):
    """One rank's figures of a step: seconds of computing, seconds of waiting for data, bytes at most held so far."""

    computed: float
    waited: float
    memory: float


class Stopwatch:
    """Times the computing of one step after another on a device.

    A CPU's is known at once. A GPU is never waited for: its times are read a step later, so that each step tells the time
    of the one before it, and the first of them nan.
    """

    def __init__(self, device: torch.device):
        self._gpu = device.type == "cuda"
        self._began: float | torch.cuda.Event = 0.0
        self._before: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def start(self) -> None:
        """A step's computing begins."""
        self._began = self._now()

    def stop(self) -> float:
        """It ends; returns seconds."""
        ended = self._now()
        if not self._gpu:
            return ended - self._began
        before, self._before = self._before, (self._began, ended)
        if before is None or not before[1].query():  # never so in training, where each step's result is read
            return float("nan")
        return before[0].elapsed_time(before[1]) / 1000

    def _now(self) -> "float | torch.cuda.Event":
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held so far: of the GPU's memory in tensors, on a CPU of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
