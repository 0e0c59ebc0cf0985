"""What each rank tells of a step: it shows, and changes nothing that is learnt."""

import math
import time

import pytest
import torch
import torch.distributed as dist
from conftest import reported, same_tensors

from dflash_trainer.step import GradientBuffer, Stepper
from dflash_trainer.vitals import Stopwatch, peak_memory


class Slow:
    """Makes one rank's micro-batches last longer."""

    def __init__(self, rank: int, seconds: float):
        self.rank, self.seconds = rank, seconds

    def __call__(self, rank: int, stepper: Stepper, batch) -> None:
        if rank == self.rank:
            time.sleep(self.seconds)


@pytest.fixture(scope="module")
def plan(make_plan):
    return make_plan(strategy="packed", token_budget=250)


@pytest.fixture(scope="module")
def slow_run(plan, run_ranks, tmp_path_factory):
    """A run of two ranks of which the second is slow, and what each printed."""
    run = tmp_path_factory.mktemp("slow") / "run"
    code, said = run_ranks(plan, run, "--max-steps", "3", fault=Slow(1, 0.1))
    assert code == 0, said
    return run, said


def test_the_slow_rank_shows(slow_run):
    """In its own place of the row, and in the printed line; only rank 0 prints."""
    run, said = slow_run
    for row in reported(run):
        first, second = row["rank_seconds"]
        assert first > 0
        assert second >= 0.2  # two micro-batches
        assert row["rank_spread"] == 1 - min(first, second) / max(first, second)
    lines = [line for line in said[0].splitlines() if line.startswith("step ")]
    assert len(lines) == 3
    assert all("spread " in line for line in lines)
    assert "step " not in said[1]


def test_the_gradient_is_that_without_vitals(slow_run, plan, run_ranks, tmp_path):
    """Bit for bit, reduced over two ranks with their cells and without."""
    run, untold = slow_run[0], tmp_path / "untold"
    assert run_ranks(plan, untold, "--max-steps", "3", fault=Untold())[0] == 0
    assert same_tensors(run, untold)
    rows = [[(row["loss"], row["gradient_norm"]) for row in reported(each)] for each in (run, untold)]
    assert rows[0] == rows[1]
    assert all(row["rank_seconds"][1] == 0 for row in reported(untold))  # it did without them


def test_vitals_that_are_unknown_spoil_nothing(plan, train_here, monkeypatch, tmp_path):
    assert train_here(plan, tmp_path / "told", "--max-steps", "3").exit_code == 0
    monkeypatch.setattr(Stopwatch, "stop", lambda watch: math.nan)
    assert train_here(plan, tmp_path / "odd", "--max-steps", "3").exit_code == 0
    assert same_tensors(tmp_path / "told", tmp_path / "odd")
    rows = [(row["bad_steps"], row["rank_seconds"], row["rank_spread"]) for row in reported(tmp_path / "odd")]
    assert rows == [(0, [None], None)] * 3


class Untold:
    """Reduces the buffer without the cells: the gradients and sums alone, as if there were none."""

    def __call__(self, rank: int, stepper: Stepper, batch) -> None:
        buffer = stepper._buffer
        short = buffer._flat[: buffer._flat.numel() - buffer._vitals.numel()]

        def reduce() -> None:
            if dist.is_initialized():
                dist.all_reduce(short)
            weight = buffer.totals[0]
            buffer.gradients /= torch.where(weight > 0, weight, 1)

        buffer.reduce = reduce


def test_a_step_reads_the_device_once(plan, train_here, monkeypatch, tmp_path):
    """Whatever is read makes the CPU wait for a GPU: from the reduction to the step's end that is done once, for all."""
    seen, reading = [], False
    reduce, read, step = GradientBuffer.reduce, GradientBuffer.read, Stepper.step

    def begin(buffer) -> None:
        nonlocal reading
        reduce(buffer)
        reading = True

    def read_all(buffer, norm):
        nonlocal reading
        reading = False
        found = read(buffer, norm)
        reading = True
        return seen.append("read") or found

    def to_the_end(*arguments):
        nonlocal reading
        result = step(*arguments)
        reading = False
        return result

    def noting(name: str):
        call = getattr(torch.Tensor, name)
        return lambda tensor: (seen.append(name) if reading else None) or call(tensor)

    for name in ("item", "tolist", "cpu", "__float__", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, noting(name))
    monkeypatch.setattr(GradientBuffer, "reduce", begin)
    monkeypatch.setattr(GradientBuffer, "read", read_all)
    monkeypatch.setattr(Stepper, "step", to_the_end)
    assert train_here(plan, tmp_path / "run", "--max-steps", "2").exit_code == 0
    assert seen == ["read", "read"]


def test_a_stopwatch_on_a_cpu_and_the_memory_held():
    watch = Stopwatch(torch.device("cpu"))
    for seconds in (0.05, 0.0):
        watch.start()
        time.sleep(seconds)
        assert watch.stop() >= seconds
    before = peak_memory(torch.device("cpu"))
    held = bytearray(b"x") * (before + 2**24)
    assert peak_memory(torch.device("cpu")) >= len(held) // 2


def test_a_stopwatch_on_a_gpu_waits_for_nothing(monkeypatch):
    """Each step's time is told a step later, of events that have passed by then; before that, and if they have not, nan."""
    moments = iter(range(100))

    class Event:
        done = True

        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            self.moment = next(moments) ** 2 * 1000.0  # milliseconds

        def query(self) -> bool:
            return Event.done

        def elapsed_time(self, other: "Event") -> float:
            return other.moment - self.moment

    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = Stopwatch(torch.device("cuda"))
    told = []
    for step in range(5):
        watch.start()
        Event.done = step != 3
        told.append(watch.stop())
    assert [None if math.isnan(each) else each for each in told] == [None, 1, 5, None, 13]
