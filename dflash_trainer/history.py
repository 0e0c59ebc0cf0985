"""A run's checkpoints: where they lie, which is the newest whole one, and which give way to newer ones."""

import os
import re
import shutil
import sys
from pathlib import Path

from safetensors import SafetensorError, safe_open

from dflash_prep.errors import UserError
from dflash_prep.files import read_json, remove_leftovers, sync_file

NAME = re.compile(r"step-(\d{8})")


def checkpoint_path(run: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return run / "checkpoints" / f"step-{step:08d}"


def checkpoints(run: Path) -> list[Path]:
    """All checkpoints of a run, oldest first; those that were not finished, and what else lies there, have other names."""
    return sorted(path for path in run.glob("checkpoints/step-*") if NAME.fullmatch(path.name) and path.is_dir())


def newest_checkpoint(run: Path) -> Path | None:
    """The newest whole checkpoint of a run; where none is whole the newest, which says on loading what is wrong with it.

    Each that is passed over is a warning on standard error.
    """
    found = checkpoints(run)
    whole = next((path for path in reversed(found) if not damage(path)), None)
    if whole is None:
        return found[-1] if found else None
    for path in found[found.index(whole) + 1 :]:
        print(f"warning: {damage(path)}: it is damaged and passed over", file=sys.stderr, flush=True)
    return whole


def damage(path: Path) -> str | None:
    """What a checkpoint lacks, None if it is whole: a file that is missing, cut off or unreadable."""
    try:
        for name in ("trainer.json", "config.json"):
            read_json(path / name, "checkpoint")
        for name in ("model.safetensors", "optimizer.safetensors"):
            with safe_open(path / name, "pt"):  # maps the file and holds its size against its header
                pass
    except (UserError, OSError, SafetensorError) as fault:
        return f"{path}: {str(fault).removeprefix(f'{path}/')}"
    return None


def point_to(checkpoint: Path) -> None:
    """Write the checkpoint's name into the file `latest` beside it, at once."""
    latest = checkpoint.with_name("latest")
    draft = checkpoint.with_name(".latest.partial")
    draft.write_text(f"{checkpoint.name}\n")
    sync_file(draft)
    os.replace(draft, latest)
    sync_file(latest.parent)


def retire(newest: Path, keep: int) -> None:
    """Remove what is older than the `keep` newest whole checkpoints up to `newest`, and what killed processes left there."""
    folder = newest.parent
    for left in folder.glob(".step-*.partial"):
        remove_leftovers(folder / left.name.split(".")[1])
    whole = 0
    for path in reversed(checkpoints(folder.parent)):
        if path.name > newest.name:  # of steps that the run went back on: they are not its own any more
            continue
        if whole >= keep:
            remove(path)
        elif not damage(path):
            whole += 1


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, which first loses its name: if this is cut off, none is left that is not whole."""
    aside = checkpoint.with_name(f".{checkpoint.name}.{os.getpid()}.partial")
    try:
        checkpoint.rename(aside)
    except OSError as fault:  # no reason to end a run
        print(f"warning: {checkpoint}: cannot be removed ({fault.strerror})", file=sys.stderr, flush=True)
    shutil.rmtree(aside, ignore_errors=True)
