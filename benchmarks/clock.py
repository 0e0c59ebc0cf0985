"""Where a step's time goes: named stretches of it, measured from outside by wrapping functions."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch


class Clock:
    """Seconds by name, each without those of the names that ran inside of it.

    A GPU is waited for at both ends of a name, so a clocked step takes longer than one that is not.
    """

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._inner: list[float] = []

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Count what runs inside as `name`."""
        began = now()
        self._inner.append(0.0)
        try:
            yield
        finally:
            took = now() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + took - self._inner.pop()
            if self._inner:
                self._inner[-1] += took

    @contextmanager
    def wrapping(self, parts: list[tuple[object, str, str]]) -> Iterator[None]:
        """Count every call of these (owner, attribute) under a name."""
        with ExitStack() as patches:
            for owner, attribute, name in parts:
                patches.enter_context(mock.patch.object(owner, attribute, self._timed(getattr(owner, attribute), name)))
            yield

    def _timed(self, function, name: str):
        def timed(*arguments, **options):
            with self.time(name):
                return function(*arguments, **options)

        return timed


def now() -> float:
    """The time at which everything asked of the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
