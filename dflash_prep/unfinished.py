"""A directory that is being written over many runs: one process at a time, kept when a run is killed, whole at the end."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_prep.errors import UserError
from dflash_prep.files import Appeared, place_directory, resolved, sync_directory

LOCK = ".lock"


class Taken(UserError):
    """Another process writes here."""


@contextmanager
def unfinished(path: Path, worth_keeping: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield `PATH.partial`, which becomes `path` when the block ends without an error.

    After an error it stays for the next run if there is something in it that is worth keeping. Raises Taken where another
    process has it, and Appeared where something came to be at `path` meanwhile.
    """
    path = resolved(path)
    draft = path.with_name(f"{path.name}.partial")
    if os.path.ismount(path):
        raise UserError(f"{path}: is a mount point, in whose place nothing can be put; name a directory inside it")
    with locked(draft):
        try:
            yield draft
            sync_directory(draft)
            place_directory(draft, path, replace=False)
            with suppress(OSError):
                (path / LOCK).unlink()
        except (OSError, KeyboardInterrupt, Appeared) as fault:
            kept = worth_keeping(draft)
            if not kept:
                remove(draft)
            hint = f"; what is finished is in {draft}, and the same command goes on from there" if kept else ""
            raise UserError(f"{reason_of(fault, path)}{hint}") from fault
        except BaseException:
            if not worth_keeping(draft):
                remove(draft)
            raise


def reason_of(fault: BaseException, path: Path) -> str:
    """Why a run ended: what the system says, which libraries wrap in words of their own."""
    if isinstance(fault, OSError):
        reason = os.strerror(fault.errno) if fault.errno else str(fault)
        return f"{fault.filename2 or path}: cannot write: {reason}"
    return f"{path}: interrupted" if isinstance(fault, KeyboardInterrupt) else str(fault)


def remove(draft: Path) -> None:
    """Remove a draft, its lock last: until then no other process begins."""
    for entry in draft.iterdir():
        if entry.name != LOCK:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shutil.rmtree(draft)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make a directory, and be the only process that has it; the lock goes when the process ends, however it ends."""
    while (handle := lock(directory)) is None:
        pass
    try:
        yield
    finally:
        os.close(handle)


def lock(directory: Path) -> int | None:
    """The open lock of a directory; None if its owner has just put it into its place, so that one has to ask again."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UserError(f"{directory}: cannot create this directory: {fault.strerror}") from None
    try:
        handle = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except FileNotFoundError:
        return None
    except OSError as fault:
        raise UserError(f"{directory}: cannot create this directory: {fault.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(directory / LOCK).st_ino == os.fstat(handle).st_ino:
            return handle
    except BlockingIOError:
        os.close(handle)
        raise Taken(f"{directory}: another process is writing here; wait for it, or choose another place") from None
    except FileNotFoundError:
        pass
    os.close(handle)
    return None
