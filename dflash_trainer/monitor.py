"""What a run reports of its steps: on the screen, in `metrics.jsonl`, as TensorBoard events, to W&B. Rank 0 only."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_prep.errors import UserError
from dflash_trainer.metrics import StepRow, measured
from dflash_trainer.pace import Pace
from dflash_trainer.prefetch import BatchPrefetcher
from dflash_trainer.step import StepResult
from dflash_trainer.step_display import StepDisplay
from dflash_trainer.validation import Validation, note
from dflash_trainer.wandb_log import WandbLog


class Monitor:
    """Reports each step of a run of `total_steps` by its plan, from a 0-based first step to a last one."""

    def __init__(self, run: Path, first_step: int, last_step: int, total_steps: int, wandb: WandbLog | None = None):
        from torch.utils.tensorboard import SummaryWriter

        run.mkdir(parents=True, exist_ok=True)
        self._run, self._last, self._total, self._wandb = run, last_step, total_steps, wandb
        self._pace = Pace()
        threading.excepthook = quiet_about_files
        with self._writing():
            self._metrics = keep_lines(run / "metrics.jsonl", first_step).open("a", encoding="utf-8")
            keep_lines(run / "validation.jsonl", first_step)
            self._events = SummaryWriter(str(run), purge_step=first_step)
        self._display = StepDisplay()

    def report(self, step: int, result: StepResult, batches: BatchPrefetcher, *, seconds: float, lr: float) -> None:
        """Report the step that was the `step`-th (1-based), which took `seconds`."""
        row = StepRow(
            time=time.time(),
            step=step,
            last_step=self._last,
            total_steps=self._total,
            epoch=batches.epoch,
            epoch_progress=batches.epoch_progress,
            batches_produced=batches.batches_produced,
            batches_per_epoch=batches.batches_per_epoch,
            learning_rate=lr,
            seconds_left=self._pace.left(self._last - step, seconds),
            **measured(result, seconds),
        )
        with self._writing():
            self._metrics.write(row.to_json())
            self._metrics.flush()
        self._draw(step, row.scalars())
        self._display.show(row)

    def validated(self, step: int, found: Validation) -> None:
        """Report what the hold-out came to after so many steps."""
        with self._writing():
            note(self._run, step, found)
        self._draw(step, {f"validation/{key}": getattr(found, key) for key in ("loss", "expected_acceptance")})
        line = f"step {step}: hold-out loss {found.loss:.3f}, accepts {found.expected_acceptance:.3f}"
        self._display.say(f"{line} ({found.tokens:,} tokens in {found.seconds:.1f} s)")

    def _draw(self, step: int, values: dict[str, float]) -> None:
        """Add a point to each curve."""
        with self._writing():
            for name, value in values.items():
                self._events.add_scalar(name, value, step)
        if self._wandb:
            self._wandb.log(step, values)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A full disk is an error in one line; the system names no file when a write fails."""
        try:
            yield
        except OSError as fault:
            raise UserError(
                f"{self._run}: cannot write the metrics: {fault.strerror or fault}; make room, then --resume auto"
            ) from None

    def close(self) -> None:
        """Finish the screen and the files."""
        self._display.close()
        if self._wandb:
            self._wandb.close()
        with self._writing():
            self._metrics.close()
            self._events.close()


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
