"""How long the rest of a run will take."""

import time
from collections import deque

RECENT = 1000  # steps that tell the pace; a few validations and checkpoints are among them


class Pace:
    """Tells the seconds left from when the last steps were done, with whatever came between them."""

    def __init__(self):
        self._moments: deque[float] = deque(maxlen=RECENT)

    def left(self, steps: int, seconds: float) -> float:
        """A step is done, which took `seconds`; returns how long so many more will take."""
        self._moments.append(time.monotonic())
        if len(self._moments) > 1:
            seconds = (self._moments[-1] - self._moments[0]) / (len(self._moments) - 1)
        return steps * seconds


def duration(seconds: float) -> str:
    """A length of time in the units that it is thought of in."""
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
