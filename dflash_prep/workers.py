"""Work on all cores with results in order: as many processes as asked for, or none but this one."""

import gc
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import TypeVar

from dflash_prep.errors import UserError

Item, Result = TypeVar("Item"), TypeVar("Result")
WAITING = 48 << 20  # bytes of items on their way: more would not make anything faster

_work: Callable | None = None  # of a worker process


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(
    make: Callable[[], Callable[[Item], Result]], items: Iterable[Item], size: Callable[[Item], int], workers: int
) -> Iterator[Result]:
    """What a function makes of each item, in the items' order.

    `make` gives the function; each of the processes calls it once. `size` is an item's in bytes. Items are taken as they
    are needed, so that memory stays bounded.
    """
    if workers == 1:
        yield from map(make(), items)
        return
    context = get_context("forkserver")
    context.set_forkserver_preload(["dflash_prep.sample_maker"])
    with ProcessPoolExecutor(workers, context, begin, (make,)) as pool:
        waiting: deque[tuple[Future, int]] = deque()
        held = 0
        try:
            for item in items:
                waiting.append((pool.submit(work, item), size(item)))
                held += waiting[-1][1]
                while len(waiting) > 2 * workers + 2 or (held > WAITING and len(waiting) > 1):
                    future, freed = waiting.popleft()
                    held -= freed
                    yield future.result()
            while waiting:
                yield waiting.popleft()[0].result()
        except BrokenProcessPool:
            raise UserError(
                "a worker process was ended from outside, perhaps for want of memory; run the same command again to go on, "
                "with fewer --workers"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def begin(make: Callable[[], Callable]) -> None:
    """Set up a worker: one thread, no interest in Ctrl-C, and no life beyond its parent's."""
    global _work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=follow_parent, daemon=True).start()
    _work = make()
    gc.freeze()  # what the work is done with stays: only what it makes is to be looked through
    gc.set_threshold(20_000)


def follow_parent() -> None:
    """End this process when its parent ends, however that was."""
    parent_process().join()
    os._exit(1)


def work(item: object) -> object:
    """What this worker's function makes of an item."""
    return _work(item)
