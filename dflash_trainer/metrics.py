"""A line of `metrics.jsonl`: what a run says of a step. Its keys are the same in every line and stand in this order."""

import json
import math
from typing import NamedTuple

from dflash_trainer.objective import expected_acceptance
from dflash_trainer.step import StepResult

MARKS = "time", "step", "last_step", "total_steps"  # where a row stands rather than what it measured


class StepRow(NamedTuple):
    """One step, over all ranks. JSON has null for what was not a finite number, such as the loss of a skipped step.

    time: Unix time in seconds. step: steps taken so far; last_step: those after which this process ends; total_steps: the
    plan's. epoch: 0-based; epoch_progress: share of its batches_per_epoch, a rank's micro-batches, that were produced.

    loss: cross-entropy in nats a token, weighted. slot_accuracy: share of right tokens in slots 1 … B−1 of the blocks;
    accuracy: their mean; expected_acceptance: tokens, see `objective`. gradient_norm: before clipping. bad_steps: updates
    skipped since the run began.

    tokens: real ones; padded_tokens: as computed; padding_share: of those, the share that is not real. seconds: from asking
    for data to the step's result; tokens_per_second: real ones. data_wait_share: of the seconds, what the rank that waited
    longest for data waited. rank_seconds: what each rank computed before the reduction, in the order of the ranks (on GPUs
    of the step before, so that none is waited for); rank_spread: by what share the quickest took less than the slowest.
    memory_bytes: the most that any rank has held so far, of a GPU's memory or of the machine's. seconds_left: until
    last_step at the present pace, validations and checkpoints included.
    """

    time: float
    step: int
    last_step: int
    total_steps: int
    epoch: int
    epoch_progress: float
    batches_produced: int
    batches_per_epoch: int
    loss: float
    accuracy: float
    slot_accuracy: list[float]
    expected_acceptance: float
    gradient_norm: float
    learning_rate: float
    bad_steps: int
    tokens: int
    padded_tokens: int
    padding_share: float
    anchors: int
    seconds: float
    tokens_per_second: float
    data_wait_share: float
    rank_seconds: list[float]
    rank_spread: float
    memory_bytes: int
    seconds_left: float

    def to_json(self) -> str:
        """One line of strict JSON."""
        return json.dumps({key: finite(value) for key, value in self._asdict().items()}, allow_nan=False) + "\n"

    def scalars(self) -> dict[str, float]:
        """What is drawn as curves, by name; slots have one each, and what is not finite has none."""
        values = {f"train/{key}": value for key, value in self._asdict().items() if key not in MARKS}
        slots = {f"slot_accuracy/{slot:02d}": value for slot, value in enumerate(self.slot_accuracy, start=1)}
        numbers = {key: value for key, value in (values | slots).items() if not isinstance(value, list)}
        return {key: value for key, value in numbers.items() if math.isfinite(value)}


def measured(result: StepResult, seconds: float) -> dict:
    """The columns of a row that a step's result and its time give."""
    computed = [vitals.computed for vitals in result.vitals]
    return {
        **{key: value for key, value in result._asdict().items() if key != "vitals"},
        "accuracy": sum(result.slot_accuracy) / len(result.slot_accuracy),
        "expected_acceptance": expected_acceptance(result.slot_accuracy),
        "padding_share": 1 - result.tokens / max(result.padded_tokens, 1),
        "seconds": seconds,
        "tokens_per_second": result.tokens / seconds,
        "data_wait_share": max(vitals.waited for vitals in result.vitals) / seconds,
        "rank_seconds": computed,
        "rank_spread": 1 - min(computed) / max(computed) if all(each > 0 for each in computed) else math.nan,
        "memory_bytes": int(max(vitals.memory for vitals in result.vitals)),
    }


def finite(value):
    """A value that JSON can hold: None for a number that is not finite, alone or in a list."""
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
