"""Weights & Biases, if the user has its package: the rows of `metrics.jsonl` under one of its runs.

It is a convenience: whatever it raises is said once, and training goes on without it. Its environment variables hold, such
as WANDB_MODE=offline and WANDB_PROJECT.
"""

import importlib.util
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

from dflash_prep.errors import UserError

ID = "wandb-id"  # the file in a run's directory that names its W&B run
PROJECT = "dflash"


def check_wandb() -> None:
    """Refuse --wandb where its package is missing; a folder `wandb`, as it leaves them, is no package."""
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:
        raise UserError("--wandb: the package wandb is not installed; pip install wandb, or leave --wandb out")


class WandbLog:
    """Logs a run from a 0-based first step on; one that is resumed goes on under the id that it had."""

    def __init__(self, run: Path, first_step: int, config: dict):
        self._run = None
        self._run = self._attempt(lambda: start(run, first_step, config))

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log values of the step that was the `step`-th; W&B keeps what it has of steps taken once more after a crash."""
        if self._run is not None:
            self._attempt(lambda: self._run.log(values, step=step) if step >= self._run.step else None)

    def close(self) -> None:
        """Send what is left."""
        if self._run is not None:
            self._attempt(lambda: self._run.finish())

    def _attempt(self, action: Callable):
        try:
            return action()
        except Exception as fault:  # the network, the account, the disk: none is worth the run
            self._run = None
            reason = " ".join(str(fault).split()) or type(fault).__name__
            print(f"warning: wandb: {reason}; the run goes on without it", file=sys.stderr, flush=True)
            return None


def start(run: Path, first_step: int, config: dict):
    """Open the W&B run that belongs to a run's directory."""
    import wandb

    file = run / ID
    if not (first_step and file.is_file()):
        file.write_text(f"{uuid.uuid4().hex[:8]}\n")
    return wandb.init(
        id=file.read_text().strip(),
        resume="allow",
        dir=str(run),
        project=os.environ.get("WANDB_PROJECT") or PROJECT,
        name=os.environ.get("WANDB_NAME") or run.name,
        config=config,
    )
