"""What a run shows while it runs: its rows, its screen, and how its ranks share a step's time."""

import contextlib
import io
import json
import math
import os
import pty
import random
import threading
import time

import pytest
from conftest import reported
from rich.console import Console
from rich.text import Text
from workers import Poison, watch_batches

from dflash_trainer.history import checkpoint_path
from dflash_trainer.metrics import StepRow, measured
from dflash_trainer.objective import expected_acceptance
from dflash_trainer.pace import duration
from dflash_trainer.step import Stepper, StepResult
from dflash_trainer.step_display import StepDisplay, bar, plain
from dflash_trainer.vitals import Vitals

SCHEMA = [
    ("time", float),
    ("step", int),
    ("last_step", int),
    ("total_steps", int),
    ("epoch", int),
    ("epoch_progress", float),
    ("batches_produced", int),
    ("batches_per_epoch", int),
    ("loss", float),
    ("accuracy", float),
    ("slot_accuracy", list),
    ("expected_acceptance", float),
    ("gradient_norm", float),
    ("learning_rate", float),
    ("bad_steps", int),
    ("tokens", int),
    ("padded_tokens", int),
    ("padding_share", float),
    ("anchors", int),
    ("seconds", float),
    ("tokens_per_second", float),
    ("data_wait_share", float),
    ("rank_seconds", list),
    ("rank_spread", float),
    ("memory_bytes", int),
    ("seconds_left", float),
]
ITEMS = ("step 27999/28000", "epoch 5.97", "Ktok/s", "left", "loss 11.237", "accepts 15.12", "norm 1.2e+03", "lr 6.0e-04")
ITEMS += ("pad 18.0%", "wait 0.1%", "spread 12.5%", "139.0 GiB", "bad steps 12")


@pytest.fixture(scope="module")
def plan(make_plan):
    return make_plan(strategy="packed", token_budget=250)


def example(**changes) -> StepRow:
    """The row of a long run's step, its figures as wide as they get."""
    values = {
        "time": 1.8e9,
        "step": 27_999,
        "last_step": 28_000,
        "total_steps": 28_000,
        "epoch": 5,
        "epoch_progress": 0.97,
        "batches_produced": 9,
        "batches_per_epoch": 10,
        "loss": 11.237,
        "accuracy": 0.9,
        "slot_accuracy": [0.9] * 15,
        "expected_acceptance": 15.12,
        "gradient_norm": 1234.5,
        "learning_rate": 6e-4,
        "bad_steps": 12,
        "tokens": 250_000,
        "padded_tokens": 300_000,
        "padding_share": 0.18,
        "anchors": 90_000,
        "seconds": 10.5,
        "tokens_per_second": 251_234.0,
        "data_wait_share": 0.001,
        "rank_seconds": [7.0, 8.0],
        "rank_spread": 0.125,
        "memory_bytes": 139 * 2**30,
        "seconds_left": 6.5 * 86_400,
    }
    return StepRow(**values | changes)


def test_the_schema(plan, train_here, tmp_path):
    """Other people's scripts read these keys: this list is changed only on purpose."""
    assert train_here(plan, tmp_path / "run", "--max-steps", "3").exit_code == 0
    rows = reported(tmp_path / "run")
    for row in rows:
        assert [(key, type(value)) for key, value in row.items()] == SCHEMA


def test_the_figures_of_each_row_agree_with_the_plan_and_with_each_other(plan, train_here, tmp_path):
    began = time.time()
    first = plan["epochs"][0]["steps"]
    steps = first + 2  # into the second epoch, and once resumed within it
    assert train_here(plan, tmp_path / "run", "--max-steps", str(first + 1)).exit_code == 0
    assert train_here(plan, tmp_path / "run", "--max-steps", str(steps), "--resume", "auto").exit_code == 0
    rows = reported(tmp_path / "run")
    for number, row in enumerate(rows, start=1):
        epoch, inside = plan.locate(number - 1)
        assert (row["step"], row["epoch"]) == (number, epoch)
        assert (row["total_steps"], row["last_step"]) == (plan.total_steps, steps if number == steps else first + 1)
        assert (row["batches_produced"], row["batches_per_epoch"]) == ((inside + 1) * 4, plan["epochs"][epoch]["steps"] * 4)
        assert row["epoch_progress"] == row["batches_produced"] / row["batches_per_epoch"]
        assert row["padding_share"] == 1 - row["tokens"] / row["padded_tokens"]
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["accuracy"] == pytest.approx(sum(row["slot_accuracy"]) / 3)
        assert row["expected_acceptance"] == expected_acceptance(row["slot_accuracy"])
        assert 0 < row["rank_seconds"][0] <= row["seconds"] * (1 - row["data_wait_share"]) + 1e-3
        assert row["rank_spread"] == 0
        assert 2**20 < row["memory_bytes"] < 2**40
        assert began <= row["time"] <= time.time()
        assert (row["seconds_left"] == 0) == (row["step"] == row["last_step"])


def test_a_row_is_strict_json_whatever_its_figures():
    odd = example(loss=math.nan, gradient_norm=math.inf, rank_seconds=[math.nan, 1.0], rank_spread=math.nan)
    row = json.loads(odd.to_json(), parse_constant=lambda name: pytest.fail(name))
    assert (row["loss"], row["gradient_norm"], row["rank_seconds"], row["rank_spread"]) == (None, None, [None, 1.0], None)
    assert list(row) == list(StepRow._fields)
    curves = odd.scalars()
    assert not {"train/loss", "train/gradient_norm", "train/rank_spread", "train/rank_seconds", "train/step"} & set(curves)
    assert curves["slot_accuracy/15"] == 0.9
    assert all(math.isfinite(value) for value in curves.values())
    assert plain(odd).startswith("step ")


def test_vitals_over_ranks():
    """The rank that waited longest and the one that holds most count, and the quickest against the slowest."""
    draws = random.Random(3)
    for size in (1, 2, 8):
        vitals = [Vitals(draws.uniform(1, 2), draws.uniform(0, 1), draws.randrange(2**36)) for _ in range(size)]
        result = StepResult(1.0, [0.5, 0.5], 1.0, 90, 100, 3, 0, vitals)
        row = measured(result, seconds=4.0)
        assert row["rank_seconds"] == [each[0] for each in vitals]
        assert row["rank_spread"] == pytest.approx(
            (max(row["rank_seconds"]) - min(row["rank_seconds"])) / max(row["rank_seconds"])
        )
        assert row["data_wait_share"] == sorted(each[1] for each in vitals)[-1] / 4
        assert row["memory_bytes"] == sorted(each[2] for each in vitals)[-1]
    unknown = StepResult(1.0, [0.5], 1.0, 90, 100, 3, 0, [Vitals(math.nan, 0, 1), Vitals(1.0, 0, 1)])
    assert math.isnan(measured(unknown, seconds=4.0)["rank_spread"])  # as on GPUs in the first step


@pytest.mark.parametrize("width", [100, 120, 200])
def test_the_bar_has_every_item_and_is_not_wrapped(width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, record=True)
    console.print(bar(example()))
    lines = console.export_text().splitlines()
    assert len(lines) == 2
    assert all(len(line) <= width for line in lines)
    assert "…" not in "".join(lines)
    assert [item for item in ITEMS if item not in "\n".join(lines)] == []
    assert [item for item in ITEMS if item not in plain(example())] == []
    assert plain(example()).endswith("bad steps 12")


@pytest.mark.parametrize("width", [1, 20, 40, 80])
def test_a_narrow_terminal_cuts_the_bar(width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, record=True)
    console.print(bar(example()))
    assert len(console.export_text().splitlines()) == 2


def test_in_a_terminal_steps_replace_each_other(monkeypatch):
    """In a pseudo-terminal of 100 columns: no line is longer, each item is there, and what was said stays."""
    leader, follower = pty.openpty()
    shown = bytearray()
    reader = threading.Thread(target=read_all, args=(leader, shown))
    reader.start()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        display = StepDisplay()
        for step in range(1, 4):
            display.show(example(step=step))
        display.say("step 3: hold-out loss 2.000, accepts 2.000")
        display.show(example())
        display.close()
    reader.join()
    os.close(leader)
    lines = [Text.from_ansi(line).plain for line in shown.decode().replace("\r", "").split("\n")]
    assert max(map(len, lines)) <= 100
    assert [item for item in ITEMS if item not in "\n".join(lines[-4:])] == []
    assert sum("hold-out loss" in line for line in lines) == 1


def read_all(descriptor: int, into: bytearray) -> None:
    """Read what is written to a pseudo-terminal until nobody writes any more."""
    with contextlib.suppress(OSError):
        while chunk := os.read(descriptor, 65_536):
            into += chunk


def test_a_skipped_step_is_shown_and_reported(plan, train_here, tmp_path):
    poison = Poison((1, 0), loss=True)
    before = watch_batches(lambda stepper, batch: poison(0, stepper, batch))
    try:
        done = train_here(plan, tmp_path / "run", "--max-steps", "2")
    finally:
        Stepper.accumulate = before
    assert done.exit_code == 0, done.output
    assert [row["loss"] is None for row in reported(tmp_path / "run")] == [False, True]
    assert "loss nan" in done.stderr.splitlines()[-1]
    assert list(reported(tmp_path / "run")[1]) == [key for key, _ in SCHEMA]
    assert checkpoint_path(tmp_path / "run", 2).is_dir()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 seconds"), (119.4, "119 seconds"), (120, "2.0 minutes"), (7200, "2.0 hours"), (172_800, "2.0 days")],
)
def test_durations(seconds, words):
    assert duration(seconds) == words
