"""What a run shows: a progress bar or plain lines, `metrics.jsonl`, and TensorBoard events. Rank 0 only."""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dflash_trainer.step import StepResult

LINES = 20  # about how many lines a run prints where there is no terminal


class Monitor:
    """Reports each step of a run, from a 0-based first step to a last one."""

    def __init__(self, run: Path, first_step: int, last_step: int):
        from torch.utils.tensorboard import SummaryWriter

        run.mkdir(parents=True, exist_ok=True)
        self._last = last_step
        self._every = max(1, (last_step - first_step) // LINES)
        self._metrics = keep_lines(run / "metrics.jsonl", first_step).open("a", encoding="utf-8")
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
            "learning_rate": lr,
            "seconds": seconds,
            "tokens_per_second": result.tokens / seconds,
            "data_wait_share": waited / seconds,
        }
        self._metrics.write(json.dumps(row) + "\n")
        self._metrics.flush()
        for key, value in row.items():
            if isinstance(value, int | float) and key != "step":
                self._events.add_scalar(f"train/{key}", value, step)
        for slot, value in enumerate(result.slot_accuracy, start=1):
            self._events.add_scalar(f"slot_accuracy/{slot:02d}", value, step)
        self._show(step, row)

    def _show(self, step: int, row: dict) -> None:
        line = (
            f"epoch {row['epoch'] + row['epoch_progress']:.2f}  loss {row['loss']:.3f}  "
            f"slots {' '.join(f'{value:.2f}' for value in row['slot_accuracy'][:3])}  "
            f"{row['tokens_per_second'] / 1000:.2f} Ktok/s  wait {row['data_wait_share']:.1%}"
        )
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
        self._metrics.close()
        self._events.close()


def keep_lines(path: Path, steps: int) -> Path:
    """Drop what a run that was cut off had reported beyond its last checkpoint, so that each step stands once."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= steps]
        draft = path.with_name(f".{path.name}.partial")
        draft.write_text("".join(kept), encoding="utf-8")
        draft.replace(path)
    return path
