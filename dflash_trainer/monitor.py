"""What a run shows: a progress bar or plain lines, `metrics.jsonl`, and TensorBoard events. Rank 0 only."""

import json
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dflash_prep.errors import UserError
from dflash_trainer.objective import expected_acceptance
from dflash_trainer.step import StepResult
from dflash_trainer.validation import Validation, note

LINES = 20  # about how many lines a run prints where there is no terminal


class Monitor:
    """Reports each step of a run, from a 0-based first step to a last one."""

    def __init__(self, run: Path, first_step: int, last_step: int):
        from torch.utils.tensorboard import SummaryWriter

        run.mkdir(parents=True, exist_ok=True)
        self._run, self._last = run, last_step
        self._every = max(1, (last_step - first_step) // LINES)
        threading.excepthook = quiet_about_files
        with self._writing():
            self._metrics = keep_lines(run / "metrics.jsonl", first_step).open("a", encoding="utf-8")
            keep_lines(run / "validation.jsonl", first_step)
            self._events = SummaryWriter(str(run), purge_step=first_step)
        columns = TextColumn("step {task.completed}/{task.total}"), BarColumn(20), TextColumn("{task.fields[line]}")
        self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
        self._task = self._bar.add_task("train", total=last_step, completed=first_step, line="")
        self._terminal = sys.stderr.isatty()
        if self._terminal:
            self._bar.start()

    def report(
        self, step: int, result: StepResult, *, seconds: float, waited: float, lr: float, epoch: int, progress: float
    ):
        """Report the step that was the `step`-th (1-based), which took `seconds`, `waited` of them for data."""
        accuracy = sum(result.slot_accuracy) / len(result.slot_accuracy)
        row = {
            "step": step,
            "epoch": epoch,
            "epoch_progress": progress,
            **result._asdict(),
            "accuracy": accuracy,
            "expected_acceptance": expected_acceptance(result.slot_accuracy),
            "padding_share": 1 - result.tokens / max(result.padded_tokens, 1),
            "learning_rate": lr,
            "seconds": seconds,
            "tokens_per_second": result.tokens / seconds,
            "data_wait_share": waited / seconds,
        }
        with self._writing():
            self._metrics.write(json.dumps({key: none_if_odd(value) for key, value in row.items()}, allow_nan=False) + "\n")
            self._metrics.flush()
            for key, value in row.items():
                if isinstance(value, int | float) and key != "step":
                    self._events.add_scalar(f"train/{key}", value, step)
            for slot, value in enumerate(result.slot_accuracy, start=1):
                self._events.add_scalar(f"slot_accuracy/{slot:02d}", value, step)
        self._show(step, row)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A full disk is an error in one line; the system names no file when a write fails."""
        try:
            yield
        except OSError as fault:
            raise UserError(
                f"{self._run}: cannot write the metrics: {fault.strerror or fault}; make room, then --resume auto"
            ) from None

    def validated(self, step: int, found: Validation) -> None:
        """Report what the hold-out came to after so many steps."""
        with self._writing():
            note(self._run, step, found)
            for key in ("loss", "expected_acceptance"):
                self._events.add_scalar(f"validation/{key}", getattr(found, key), step)
        line = f"step {step}: hold-out loss {found.loss:.3f}, accepts {found.expected_acceptance:.3f}"
        self._bar.console.print(f"{line} ({found.tokens:,} tokens in {found.seconds:.1f} s)", highlight=False)

    def _show(self, step: int, row: dict) -> None:
        line = (
            f"epoch {row['epoch'] + row['epoch_progress']:.2f}  loss {row['loss']:.3f}  "
            f"accepts {row['expected_acceptance']:.2f}  "
            f"{row['tokens_per_second'] / 1000:.2f} Ktok/s  wait {row['data_wait_share']:.1%}"
        ) + (f"  bad steps {row['bad_steps']}" if row["bad_steps"] else "")
        self._bar.update(self._task, completed=step, line=line)
        if not self._terminal and (step % self._every == 0 or step == self._last):
            left = self._bar.tasks[0].time_remaining
            print(
                f"step {step}/{self._last}  {line}" + (f"  {left:.0f} s left" if left else ""),
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """Finish the bar and the files."""
        if self._terminal:
            self._bar.stop()
        with self._writing():
            self._metrics.close()
            self._events.close()


def none_if_odd(value):
    """None for a number that JSON cannot hold: the loss of a step that was skipped."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def quiet_about_files(fault: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread hands a failed write on to us, who say it in one line; it need not print it too."""
    if not issubclass(fault.exc_type, OSError):
        threading.__excepthook__(fault)


def keep_lines(path: Path, steps: int) -> Path:
    """Keep what a run reported up to its checkpoint, so that each step stands once.

    What a run that was cut off reported beyond it goes, and so does what cannot be read (a crash leaves torn lines).
    """
    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith(b"\n") and 1 <= reported_step(line) <= steps]
        draft = path.with_name(f".{path.name}.partial")
        draft.write_bytes(b"".join(kept))
        draft.replace(path)
    return path


def reported_step(line: bytes) -> int:
    """The step that a line of `metrics.jsonl` reports, 0 if it cannot be read."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return 0
    step = row.get("step") if isinstance(row, dict) else None
    return step if type(step) is int else 0
