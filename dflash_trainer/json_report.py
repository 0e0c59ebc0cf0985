"""JSON reports that the user names a place for: the place is tried before the work, the report is whole or absent."""

import os
from collections.abc import Callable
from pathlib import Path

from dflash_prep.errors import UserError
from dflash_prep.files import write_json


def check_place(path: Path, option: str) -> None:
    """Refuse a place where no report can be written, before the work whose outcome it is to hold; `option` named it."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: not a regular file; name another place for the report with {option}")
    _write(path, option, lambda draft: draft.touch())


def write_report(path: Path, option: str, report: dict) -> None:
    """Write the report, whole or not at all."""

    def write(draft: Path) -> None:
        write_json(draft, report)
        draft.replace(path)

    _write(path, option, write)


def _write(path: Path, option: str, write: Callable[[Path], None]) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        try:
            write(draft)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as fault:
        raise UserError(
            f"{path}: cannot write the report: {fault.strerror or fault}; name another place with {option}"
        ) from None
