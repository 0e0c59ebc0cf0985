"""Files that are whole or absent: written under a temporary name, flushed, then renamed."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_prep.errors import UserError


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
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def canonical_json(value: object) -> bytes:
    """The one spelling of a JSON value that fingerprints are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def read_json(path: Path, what: str) -> dict:
    """Read a JSON object of ours; `what` names it in the error."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as fault:
        raise UserError(f"{path}: cannot read the {what}: {fault.strerror}") from None
    except ValueError:
        raise UserError(f"{path}: the {what} is not valid JSON; it is damaged, write it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: the {what} is not a JSON object; it is damaged, write it again")
    return value


def write_json(path: Path, value: object) -> None:
    """Write indented JSON and flush it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flush each file in a directory, and then the directory's own entries."""
    for entry in [*(child for child in path.iterdir() if child.is_file()), path]:
        handle = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def is_taken(path: Path) -> bool:
    """Whether anything is at `path` that is more than an empty directory."""
    return path.exists() and not (path.is_dir() and next(path.iterdir(), None) is None)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory beside `path` that becomes `path` when the block ends without an error.

    An older `path` is moved aside only once the new one is complete; after an error nothing of the new one is left.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
    except OSError as fault:
        raise UserError(f"{path}: cannot create this directory: {fault.strerror}") from None
    try:
        yield draft
        sync_directory(draft)
        replace_directory(draft, path)
    except OSError as fault:
        raise UserError(f"{path}: cannot write: {fault.strerror or fault}") from fault
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def replace_directory(new: Path, path: Path) -> None:
    """Put the directory `new` in the place of `path`."""
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    if path.exists():
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)
