"""Where a regenerated corpus goes: the output, the rejects beside it, and nothing of anybody else's lost on the way."""

import gzip
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import zstandard

from dflash_prep.answers import COUNTED
from dflash_prep.errors import UserError
from dflash_prep.files import sync_file
from dflash_prep.journal import Journal

DRAFT = "output"  # in the journal's directory; no name that a corpus' file could have
OURS = "has-rejects"  # there: an empty file that says that the list of rejects is this journal's
ENDINGS = ".jsonl", ".jsonl.gz", ".jsonl.zst"


def beside(output: Path, ending: str) -> Path:
    """A name of ours next to the output's."""
    return output.with_name(f"{output.name}.{ending}")


def check_place(output: Path) -> None:
    """Refuse an output that cannot be written, or that is there and not of a run that was killed at its very end."""
    if not output.name.lower().endswith(ENDINGS):
        raise UserError(f"{output}: is to hold JSONL; choose a name that ends in {', '.join(ENDINGS)} with -o")
    if os.path.lexists(output) and not is_finished(output):
        raise taken(output)
    check_rejects(output)


def check_rejects(output: Path) -> None:
    """Refuse a list of rejects that the run's journal has not written."""
    rejects = beside(output, "rejects.jsonl.zst")
    try:
        rejects.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as fault:
        raise UserError(f"{rejects}: is to list what fails, but: {fault.strerror}; choose another output with -o") from None
    if rejects.is_dir() or not (beside(output, "partial") / OURS).exists():
        raise UserError(f"{rejects}: is there already and not this run's; move it away or choose another output with -o")


def is_finished(output: Path) -> bool:
    """Whether the output is what the journal beside it came to: its run was killed before it removed the journal."""
    with suppress(OSError):
        return os.path.samefile(beside(output, "partial") / DRAFT, output)
    return False


def taken(output: Path) -> UserError:
    """What is there is finished, or not ours."""
    return UserError(f"{output}: is there already; remove it or choose another with -o")


def write(journal: Journal, total: int, output: Path, max_reject_share: float) -> dict[str, int]:
    """Write the rejects and, unless they are too many, the output; returns all counts."""
    counts, reasons = Counter(), Counter()
    rejects, failures = beside(output, "rejects.jsonl.zst"), journal.failures()
    too_many = failures == total or failures > max_reject_share * total
    draft, draft_rejects = journal.path / DRAFT, journal.path / "rejects"
    with packed(draft_rejects, ".zst") as bad, packed(draft, output.suffix.lower()) as good:
        for entry in journal.entries(total):
            if not entry.kept:
                reasons += entry.counts
                bad.write(entry.row + b"\n")
            elif not too_many:
                counts += entry.counts
                good.write(entry.row + b"\n")
    check_rejects(output)
    if failures:
        (journal.path / OURS).touch()
        os.replace(draft_rejects, rejects)
    else:
        rejects.unlink(missing_ok=True)  # of an earlier try
    if too_many:
        draft.unlink()
        named = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(3))
        allowed = "nothing was kept" if failures == total else f"more than --max-reject-share {max_reject_share:g} allows"
        raise UserError(
            f"{failures} of {total} records failed ({named}): {allowed}; see {rejects}, and run the same again to ask for "
            f"these alone: the others are kept in {journal.path}"
        )
    place(draft, output)
    kept = {"conversations": total - failures} | {name: counts[name] for name in COUNTED if counts[name]}
    return kept | {f"failed: {reason}": count for reason, count in reasons.most_common()}


@contextmanager
def packed(path: Path, suffix: str) -> Iterator[BinaryIO]:
    """A file to write to, compressed as `suffix` says, flushed to the disk at the end; same content, same bytes."""
    with path.open("wb") as file:
        if suffix == ".zst":
            with zstandard.ZstdCompressor(level=9).stream_writer(file, closefd=False) as stream:
                yield stream
        elif suffix == ".gz":
            with gzip.GzipFile("", "wb", 6, file, mtime=0) as stream:
                yield stream
        else:
            yield file
        file.flush()
        os.fsync(file.fileno())


def place(draft: Path, output: Path) -> None:
    """Make `draft` be `output`, which must not be there."""
    try:
        os.link(draft, output)
    except FileExistsError:
        raise UserError(f"{output}: appeared meanwhile; move it away and run the same again") from None
    except OSError:  # a file system without links
        if os.path.lexists(output):
            raise taken(output) from None
        os.rename(draft, output)
    sync_file(output.parent)
