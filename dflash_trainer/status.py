"""Where a run is, from its files alone, also while it runs."""

import fcntl
import json
import time
from collections import deque
from pathlib import Path

from dflash_prep.errors import UserError
from dflash_prep.files import read_json
from dflash_trainer.checkpoint import newest_checkpoint

RECENT = 50  # steps whose time tells how long the rest will take


def status(run: Path) -> list[str]:
    """What there is to say of a run, a line each."""
    checkpoint = newest_checkpoint(run)
    rows = last_rows(run / "metrics.jsonl", RECENT)
    if checkpoint is None and not rows:
        raise UserError(f"{run}: no run here; name the directory that dflash-train wrote with -o")
    state = read_json(checkpoint / "trainer.json", "trainer's state") if checkpoint else {}
    total = state.get("total_steps")
    lines = [f"{run}: {'running' if is_locked(run / '.lock') else 'not running'}"]
    if rows:
        row = rows[-1]
        epochs = row["epoch"] + row["epoch_progress"]
        lines.append(f"step {row['step']:,}{f' of {total:,}' if total else ''}, epoch {epochs:.2f}")
        lines.append(
            f"loss {figure(row['loss'], '.3f')}, expected acceptance {figure(row['expected_acceptance'], '.2f')}, "
            f"gradient norm {figure(row['gradient_norm'], '.3g')}, learning rate {row['learning_rate']:.2e}"
        )
        seconds = sum(each["seconds"] for each in rows) / len(rows)
        tokens = sum(each["tokens"] for each in rows) / len(rows) / seconds
        waited = sum(each["seconds"] * each["data_wait_share"] for each in rows) / len(rows) / seconds
        padding = sum(each["padding_share"] for each in rows) / len(rows)
        left = f", {duration((total - row['step']) * seconds)} left" if total else ""
        speed = f"{tokens / 1000:,.2f} Ktok/s, {seconds:.2f} s a step"
        lines.append(f"{speed}, {padding:.1%} padding, {waited:.1%} waiting for data{left}")
    for row in last_rows(run / "validation.jsonl", 1):
        lines.append(
            f"hold-out at step {row['step']:,}: loss {row['loss']:.3f}, expected acceptance {row['expected_acceptance']:.3f}"
        )
    if checkpoint:
        age = duration(time.time() - checkpoint.stat().st_mtime)
        lines.append(f"newest checkpoint: {checkpoint}, {age} old")
    return lines


def figure(value: float | None, form: str) -> str:
    """A figure of a step, which had none if its numbers were not finite."""
    return "not finite" if value is None else format(value, form)


def last_rows(path: Path, count: int) -> list[dict]:
    """The last whole lines of a file that may be being written to; none where there is no such file."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        lines = deque(file, maxlen=count + 1)
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line) if line.endswith(b"\n") else None)
        except ValueError:
            continue
    return [row for row in rows if isinstance(row, dict)][-count:]


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


def duration(seconds: float) -> str:
    """A length of time in the units that it is thought of in."""
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
