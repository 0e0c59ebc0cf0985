"""Stopping: SIGTERM and SIGINT ask a run to finish its step and save; a second one ends the process at once."""

import os
import signal
import threading
import time

SIGNALS = signal.SIGTERM, signal.SIGINT
ONE_EVENT = 1.0  # seconds; a terminal, `timeout`, a cluster and a launcher each pass the same event on


class StopRequest:
    """Whether this process was asked to stop while the request was open. Open it in the main thread.

    A thread of its own waits for the signals: Python's handlers run only between two instructions of the main thread, which
    may spend a minute in one backward.
    """

    def __init__(self):
        self._first: float | None = None

    def asked(self) -> bool:
        """Whether a signal has come."""
        return self._first is not None

    def __enter__(self) -> "StopRequest":
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        self._thread = threading.Thread(target=self._wait, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)

    def _wait(self) -> None:
        while number := os.read(self._reader, 1):  # nothing more comes once the writer is closed
            if number[0] in SIGNALS:
                self._note(number[0])

    def _note(self, number: int) -> None:
        if self._first is None:
            self._first = time.monotonic()
        elif time.monotonic() - self._first > ONE_EVENT:
            os._exit(128 + number)
