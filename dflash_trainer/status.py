"""Where a run is, from its files alone, also while it runs."""

import fcntl
import json
import time
from collections import deque
from pathlib import Path

from dflash_prep.errors import UserError
from dflash_prep.files import read_json
from dflash_trainer.history import damage, newest_checkpoint
from dflash_trainer.pace import duration

RECENT = 50  # steps that tell the speed


def status(run: Path) -> list[str]:
    """What there is to say of a run, a line each; what an older version did not write is left out."""
    checkpoint, rows = newest_checkpoint(run), last_rows(run / "metrics.jsonl", RECENT)
    if checkpoint is None and not rows and not (run / ".lock").is_file():
        raise UserError(f"{run}: no run here; name the directory that dflash-train wrote with -o")
    torn = checkpoint is not None and damage(checkpoint) is not None
    state = read_json(checkpoint / "trainer.json", "trainer's state") if checkpoint and not torn else {}
    head = f"{run}: {'running' if is_locked(run / '.lock') else 'not running'}"
    if rows:
        moment = rows[-1].get("time") or (run / "metrics.jsonl").stat().st_mtime
        lines = [f"{head}, last step {age(moment)}", *progress(rows, state.get("total_steps")), *speed(rows)]
    else:
        lines = [f"{head}, no step yet"]
    for row in last_rows(run / "validation.jsonl", 1):
        found = f"loss {figure(row, 'loss', '.3f')}, expected acceptance {figure(row, 'expected_acceptance', '.3f')}"
        lines.append(f"hold-out at step {row['step']:,}: {found}")
    if checkpoint:
        lines.append(f"newest checkpoint: {checkpoint}, {'damaged' if torn else age(checkpoint.stat().st_mtime)}")
    return lines


def progress(rows: list[dict], total: int | None) -> list[str]:
    """How far the last of the rows is and what it came to; `total` are the plan's steps if no row says so."""
    row = rows[-1]
    total, last = row.get("total_steps", total), row.get("last_step", total)
    place = f"step {row['step']:,}{f' of {total:,}' if total else ''}"
    if {"epoch", "epoch_progress"} <= row.keys():
        place += f", epoch {row['epoch'] + row['epoch_progress']:.2f}"
    if last != total:
        place += f", to stop after step {last:,}"
    left = row.get("seconds_left")
    if left is None and last and (seconds := mean(rows, "seconds")):
        left = (last - row["step"]) * seconds
    lines = [place if left is None else f"{place}, {duration(left)} left"]
    lines.append(
        f"loss {figure(row, 'loss', '.3f')}, expected acceptance {figure(row, 'expected_acceptance', '.2f')}, "
        f"gradient norm {figure(row, 'gradient_norm', '.3g')}, learning rate {figure(row, 'learning_rate', '.2e')}"
    )
    return [*lines, f"bad steps {row['bad_steps']:,}"] if row.get("bad_steps") else lines


def speed(rows: list[dict]) -> list[str]:
    """How fast the last steps were, and what held them up."""
    seconds, tokens, memory = mean(rows, "seconds"), mean(rows, "tokens"), rows[-1].get("memory_bytes")
    parts = [f"{tokens / seconds / 1000:,.2f} Ktok/s, {seconds:.2f} s a step"] if seconds and tokens is not None else []
    for key, words in (
        ("padding_share", "padding"),
        ("data_wait_share", "waiting for data"),
        ("rank_spread", "spread over ranks"),
    ):
        if (share := mean(rows, key)) is not None:
            parts.append(f"{share:.1%} {words}")
    parts += [f"{memory / 2**30:,.1f} GiB"] if memory is not None else []
    return [f"the last {len(rows):,} steps: {', '.join(parts)}"] if parts else []


def mean(rows: list[dict], key: str) -> float | None:
    """The mean of a column over the rows that have it."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None


def figure(row: dict, key: str, form: str) -> str:
    """A figure of a row: null if it was not finite, missing in rows by other versions."""
    if key not in row:
        return "unknown"
    return "not finite" if row[key] is None else format(row[key], form)


def age(moment: float) -> str:
    """How long ago a moment in Unix time was."""
    return f"{duration(max(0.0, time.time() - moment))} ago"


def last_rows(path: Path, count: int) -> list[dict]:
    """The last whole lines that report a step, of a file that may be being written to; none where there is no such file."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        lines = deque(file, maxlen=count + 1)
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line) if line.endswith(b"\n") else None)
        except (ValueError, RecursionError):
            continue
    return [row for row in rows if isinstance(row, dict) and type(row.get("step")) is int][-count:]


def is_locked(path: Path) -> bool:
    """Whether a process holds a run."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
