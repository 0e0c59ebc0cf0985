"""Which files the inputs name: files as they are, directories, glob patterns, and `-` for standard input."""

import glob
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from dflash_prep.corpus import CHUNK, check_input
from dflash_prep.errors import UserError
from dflash_prep.files import check_utf8, resolved
from dflash_prep.records import CorpusFile

ENDINGS = (*(kind + packed for kind in (".jsonl", ".json") for packed in ("", ".gz", ".zst")), ".parquet")
STDIN = "-"
MAGIC = {b"\x1f\x8b": ".json.gz", b"\x28\xb5\x2f\xfd": ".json.zst", b"PAR1": ".parquet"}


class Corpus(NamedTuple):
    """The files of a corpus in the order in which they are read, and how many others lay in its directories."""

    files: list[CorpusFile]
    others: int


@contextmanager
def open_corpus(inputs: tuple[str, ...]) -> Iterator[Corpus]:
    """All files that the inputs name. Standard input is kept in a temporary file meanwhile: a corpus is read repeatedly."""
    if inputs.count(STDIN) > 1:
        raise UserError("-: standard input can be read once only; name it once")
    files, others = [], 0
    with ExitStack() as stack:
        for name in inputs:
            if name == STDIN:
                files.append(CorpusFile(name, stack.enter_context(kept_stdin())))
                continue
            found, passed = find_files(name)
            files += [CorpusFile(str(path), path) for path in found]
            others += passed
        check_once(files)
        yield Corpus(files, others)


def check_once(files: list[CorpusFile]) -> None:
    """Refuse a file that is named twice, whatever by: its records would count twice."""
    names: dict[Path, str] = {}
    for file in files:
        place = resolved(file.path)
        if place in names:
            raise UserError(f"{file.name}: is read twice, first as {names[place]}; name it once")
        names[place] = file.name


def find_files(name: str) -> tuple[list[Path], int]:
    """The corpus files that one input names, sorted, and the number of other files in its directories."""
    path = Path(name)
    if not name:
        raise UserError("'': names nothing; name a corpus file, a directory of them, a pattern, or - for standard input")
    if glob.has_magic(name) and not path.exists():
        matches = sorted(glob.glob(name, recursive=True))
        if not matches:
            raise UserError(f"{name}: no file matches this pattern")
        parts = [find_files(match) for match in matches]
        return [file for part, _ in parts for file in part], sum(passed for _, passed in parts)
    if not path.is_dir():
        check_input(path)
        return [path], 0
    inside = sorted(files_below(path))
    found = [
        entry for entry in inside if entry.name.lower().endswith(ENDINGS) and entry.is_file() and not is_ours(path, entry)
    ]
    for entry in found:
        check_utf8(str(entry))
    if not found:
        raise UserError(f"{name}: is a directory with no corpus among its {len(inside)} files ({', '.join(ENDINGS)})")
    return found, len(inside) - len(found)


def files_below(folder: Path) -> Iterator[Path]:
    """Everything in a folder that is no directory; links to directories are followed, but into none twice."""
    seen = set()
    for root, directories, names in os.walk(folder, followlinks=True):
        place = os.path.realpath(root)
        if place in seen:
            directories.clear()
            continue
        seen.add(place)
        yield from (Path(root, name) for name in names)


def is_ours(folder: Path, file: Path) -> bool:
    """Whether a file in a folder is what our own commands wrote beside or into a store or a plan: no part of a corpus."""
    unfinished = any(part.endswith(".partial") for part in file.relative_to(folder).parts[:-1])
    inside = any((file.parent / manifest).exists() for manifest in ("store.json", "plan.json"))
    return unfinished or inside or file.name.endswith(".rejects.jsonl.zst")


@contextmanager
def kept_stdin() -> Iterator[Path]:
    """A temporary file of what standard input holds, named by what its first bytes say it is."""
    if sys.stdin is None:
        raise UserError("-: standard input is closed; pipe the records into it, or name a file")
    stream = sys.stdin.buffer
    with ExitStack() as stack:
        try:
            start = stream.read(CHUNK)
            ending = next((ending for magic, ending in MAGIC.items() if start.startswith(magic)), ".json")
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="dflash-prep-", suffix=ending))
            file.write(start)
            shutil.copyfileobj(stream, file, CHUNK)
            file.flush()
        except OSError as fault:
            raise UserError(
                f"-: cannot keep standard input in {tempfile.gettempdir()}: {fault.strerror or fault}; make room there, set "
                "TMPDIR to another directory, or name a file"
            ) from None
        yield Path(file.name)
