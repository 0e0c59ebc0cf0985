"""Files that are whole or absent: written under a temporary name, flushed, then renamed."""

import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from dflash_prep.errors import UserError

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux's renameat2


class Appeared(UserError):
    """Something came to be where a new directory was to go."""


def digest(*parts: bytes) -> str:
    """BLAKE2b-128 in hex over the parts, each framed by its length so that no two splits collide."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


def file_digest(path: Path) -> str:
    """BLAKE2b-128 in hex of a file's bytes."""
    with path.open("rb") as file:
        return stream_digest(file)


def stream_digest(file: BinaryIO) -> str:
    """BLAKE2b-128 in hex of what an opened file holds from here on."""
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def canonical_json(value: object) -> bytes:
    """The one spelling of a JSON value that fingerprints are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")


def check_utf8(name: str) -> None:
    """Refuse a name that no file of ours could state, before any work is done for it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UserError(f"{name!r}: this name is not UTF-8; rename it") from None


def read_json(path: Path, what: str) -> dict:
    """Read a JSON object of ours; `what` names it in the error."""
    check_regular(path)
    try:
        value = json.loads(path.read_bytes())
    except OSError as fault:
        raise UserError(f"{path}: cannot read the {what}: {fault.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: the {what} is not valid JSON; it is damaged, remove it and write it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: the {what} is not a JSON object; it is damaged, remove it and write it again")
    return value


def check_regular(path: Path) -> None:
    """Refuse what is there but is no file: a directory cannot be read, and a FIFO would be waited for."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: is {'a directory' if path.is_dir() else 'not a regular file'}; name a file")


def write_json(path: Path, value: object) -> None:
    """Write indented JSON and flush it to the disk; what is there gives way only to the whole."""
    draft = path.with_name(f"{path.name}.new")
    with draft.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    sync_file(path.parent)


def sync_directory(path: Path) -> None:
    """Flush each file in a directory, and then the directory's own entries."""
    for entry in [*(child for child in path.iterdir() if child.is_file()), path]:
        sync_file(entry)


def sync_file(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_taken(path: Path) -> bool:
    """Whether anything is at `path` that is more than an empty directory."""
    return path.exists() and not (path.is_dir() and next(path.iterdir(), None) is None)


def resolved(path: Path) -> Path:
    """The absolute path of what `path` names: its name can be varied, and a link stays one."""
    return Path(os.path.realpath(path))


@contextmanager
def new_directory(path: Path, replace: bool = True) -> Iterator[Path]:
    """Yield an empty directory beside `path` that becomes `path` when the block ends without an error.

    An older `path` gives way only once the new one is complete, and never without `replace`: what is there by then raises
    Appeared. After an error nothing of the new one is left.
    """
    path = resolved(path)
    if os.path.ismount(path):
        raise UserError(f"{path}: is a mount point, in whose place nothing can be put; name a directory inside it")
    remove_leftovers(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
    except OSError as fault:
        raise UserError(f"{path}: cannot create this directory: {fault.strerror}") from None
    try:
        yield draft
        sync_directory(draft)
        place_directory(draft, path, replace)
    except OSError as fault:
        raise UserError(f"{fault.filename2 or path}: cannot write: {fault.strerror or fault}") from fault
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def remove_leftovers(path: Path) -> None:
    """Remove what killed processes left beside `path`; an older directory moved aside stays while `path` is missing."""
    pattern = re.compile(re.escape(f".{path.name}.") + r"(\d{1,9})\.(partial|old)")
    with suppress(OSError):
        for entry in list(path.parent.iterdir()):
            found = pattern.fullmatch(entry.name)
            if found and not is_alive(int(found[1])) and (found[2] == "partial" or path.exists()):
                shutil.rmtree(entry, ignore_errors=True)


def is_alive(process: int) -> bool:
    """Whether a process of this number runs."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def place_directory(new: Path, path: Path, replace: bool) -> None:
    """Make the directory `new` be `path`; a directory that was there, if it may be replaced, is then `new` or gone."""
    try:
        new.rename(path)  # onto nothing or an empty directory
    except OSError as fault:
        if fault.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        if not replace or not path.is_dir():
            raise Appeared(f"{path}: appeared meanwhile, so it was left as it is; run again") from None
        if not exchange(new, path):
            old = path.with_name(f".{path.name}.{os.getpid()}.old")
            path.rename(old)
            new.rename(path)
            shutil.rmtree(old, ignore_errors=True)


def exchange(one: Path, other: Path) -> bool:
    """Swap two directories at once, so that at no moment either is missing; False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0
