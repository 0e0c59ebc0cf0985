"""Calibration: what a micro-batch costs here, fitted to a few that are really computed.

seconds = c0 + a·tokens + b·Σ width² + d·anchors + e·Σ anchors·length, with tokens = rows · width and sums over rows: target
and fusion are linear in tokens, attention in their squares, the draft in its anchors, and its attention in anchors times
context. Timed are the target's forward pass, the draft's forward and backward pass and the loss of one micro-batch, as
training computes them; the optimizer's update is left out, as it costs every plan the same for each step. What a sample
costs beyond its tokens, such as its own kernel launches in the draft's attention, has no term.
"""

import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from rich.table import Table

from dflash_prep.anchors import draw_anchors
from dflash_prep.console import output
from dflash_prep.embedded import NAME
from dflash_prep.errors import UserError
from dflash_trainer.config import DraftConfig, derive_config, read_overrides
from dflash_trainer.draft import DraftModel
from dflash_trainer.launch import join, under_torchrun
from dflash_trainer.micro_batch import MicroBatch, Sample, assemble
from dflash_trainer.nonnegative import fit as fit_nonnegative
from dflash_trainer.shapes import fit, own_shapes
from dflash_trainer.step import Recipe, Stepper
from dflash_trainer.target import FrozenTarget, load_target

COEFFICIENTS = ("c0", "a", "b", "d", "e")
BLOCK_SIZE = 16  # the planner's default
MOST_TOKENS = {"cpu": 1024, "cuda": 32_768}  # of a shape, where memory allows
LEAST_TOKENS = 256
WIDEST = 8192  # no sample is longer by default
RUNS = 3  # of each shape


class Shape(NamedTuple):
    """A padded micro-batch of full rows: how many, how wide, and its anchors, which the rows share evenly."""

    rows: int
    width: int
    anchors: int

    def terms(self) -> list[int]:
        """What each coefficient is multiplied with."""
        tokens = self.rows * self.width
        return [1, tokens, tokens * self.width, self.anchors, self.anchors * self.width]


def choose_shapes(tokens: int, longest: int) -> list[Shape]:
    """Shapes of at most `tokens` tokens in rows of at most `longest` that tell the terms apart, the costliest first."""
    wide = min(tokens, longest, WIDEST)
    middle, narrow = max(2, wide // 4), max(2, min(wide // 4, max(64, tokens // 128)))
    many, few = tokens // 8, tokens // 128
    shapes = [
        (tokens // wide, wide, many),
        (tokens // narrow, narrow, many),
        (tokens // middle, middle, many // 2),
        (tokens // wide, wide, few),
        (tokens // narrow, narrow, few),
        (1, middle, many // 4),
        (1, wide // 2, few),
        (1, narrow, 1),
    ]
    return [Shape(rows, width, min(anchors, rows * (width - 1))) for rows, width, anchors in shapes]


def make_batch(shape: Shape, config: DraftConfig, device: torch.device) -> MicroBatch:
    """A micro-batch of a shape, as a device computes it: random tokens that all carry loss."""
    random = np.random.default_rng(0)
    spans = np.array([0, shape.width])
    samples = []
    for row in range(shape.rows):
        count = (row + 1) * shape.anchors // shape.rows - row * shape.anchors // shape.rows
        ids = random.integers(config.vocab_size, size=shape.width)
        samples.append(Sample(ids, spans, draw_anchors(spans, count, 0, 0, row)))
    batch = assemble(samples, packed=False, width=shape.width, block_size=config.block_size)
    return fit(batch, own_shapes(batch, frozenset(config.windows))).to(device) if device.type == "cuda" else batch


def measure(
    stepper: Stepper, batches: list[MicroBatch], device: torch.device, progress: Callable[[int], None]
) -> list[float]:
    """Seconds of each micro-batch: the median of a few rounds over all, so that a slow moment meets each at most once."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    for batch in batches:  # the first round warms up
        stepper.gradient([batch])
        progress(1)
    rounds = []
    for _ in range(RUNS):
        seconds = []
        for batch in batches:
            began = now()
            stepper.accumulate(batch)
            seconds.append(now() - began)
            progress(1)
        rounds.append(seconds)
    return [median(each) for each in zip(*rounds, strict=True)]


def measure_shapes(
    stepper: Stepper, device: torch.device, longest: int, progress: Callable[[int], None]
) -> tuple[list[Shape], list[float]]:
    """Shapes and their seconds, of as many tokens as the device's memory holds."""
    config, tokens = stepper.draft.config, MOST_TOKENS[device.type]
    while tokens >= LEAST_TOKENS:
        shapes = choose_shapes(tokens, longest)
        batches = [make_batch(shape, config, device) for shape in shapes]
        try:
            return shapes, measure(stepper, batches, device, progress)
        except torch.OutOfMemoryError:
            tokens //= 2
        torch.cuda.empty_cache()  # here, where the error and all that it holds is gone
    raise UserError(f"{device}: has no memory for a micro-batch of {LEAST_TOKENS} tokens; use a smaller target or draft")


def calibrate(
    target: str | None,
    draft_config: Path | None,
    taps: tuple[int, ...] | None,
    dtype: torch.dtype,
    target_dtype: torch.dtype,
    progress: Callable[[int], None] = lambda done: None,
) -> dict:
    """Measure and fit; returns what the file of costs holds, times in seconds. The dtypes are as in training."""
    if under_torchrun():
        raise UserError("--calibrate measures one process on one device; start it without torchrun")
    overrides = read_overrides(draft_config)
    device = join().device
    model = load_target(target, target_dtype, device)
    description = model.config.get_text_config()
    config = derive_config(
        description,
        block_size=overrides.get("block_size", BLOCK_SIZE),
        mask_token_id=0,  # any token takes as long as any other
        overrides=overrides,
        taps=taps,
    )
    draft = DraftModel(config).initialise(0).to(device)
    stepper = Stepper(draft, FrozenTarget(model, config.target_layer_ids, dtype), Recipe(dtype=dtype), total_steps=1)
    shapes, measured = measure_shapes(stepper, device, description.max_position_embeddings, progress)
    terms, seconds = np.array([shape.terms() for shape in shapes], np.float64), np.array(measured)
    coefficients = fit_nonnegative(terms, seconds)
    predicted = terms @ coefficients
    return {
        **dict(zip(COEFFICIENTS, coefficients.tolist(), strict=True)),
        "target": target or NAME,
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "target_dtype": str(target_dtype).removeprefix("torch."),
        "block_size": config.block_size,
        "shapes": [
            {**shape._asdict(), "seconds": took, "predicted": said}
            for shape, took, said in zip(shapes, measured, predicted.tolist(), strict=True)
        ],
        "worst_error": float((np.abs(predicted - seconds) / seconds).max()),
    }


def device_name(device: torch.device) -> str:
    """What computed, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, threads: {torch.get_num_threads()}"


def print_cost(path: Path, cost: dict) -> None:
    """The shapes, measured and predicted, and the coefficients below."""
    table = Table()
    for heading in ("rows", "width", "anchors", "measured s", "predicted s", "error"):
        table.add_column(heading, justify="right")
    for shape in cost["shapes"]:
        error = shape["predicted"] / shape["seconds"] - 1
        times = (f"{shape[key]:.4f}" for key in ("seconds", "predicted"))
        table.add_row(*(f"{shape[key]:,}" for key in ("rows", "width", "anchors")), *times, f"{error:+.1%}")
    console = output()
    console.print(f"{cost['target']} on {cost['device']}, {cost['dtype']}", soft_wrap=True, highlight=False)
    console.print(table)
    words = ", ".join(f"{name} {cost[name]:.3g}" for name in COEFFICIENTS)
    console.print(f"{path}: {words} s; worst error {cost['worst_error']:.1%}", soft_wrap=True, highlight=False)
