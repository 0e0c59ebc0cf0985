"""Probes: rows of random samples without an anchor, laid out as a run's own are, to try a target with."""

from dataclasses import replace

import numpy as np

from dflash_trainer.micro_batch import MicroBatch, Sample, assemble
from dflash_trainer.shapes import Shapes, fit


def random_samples(lengths: list[int], vocabulary: int) -> list[np.ndarray]:
    """Samples of random tokens, the same each time."""
    draw = np.random.default_rng(0)
    return [draw.integers(0, vocabulary, length).astype(np.uint32) for length in lengths]


def probe(samples: list[np.ndarray], *, packed: bool, shapes: Shapes | None = None) -> MicroBatch:
    """A row a sample or, packed, one row that attends by tiles where the run's `shapes` say so.

    Its features may have rows of padding behind those of the samples.
    """
    nothing = np.empty(0, np.int64)
    parts = [Sample(ids, nothing.astype(np.uint32), nothing) for ids in samples]
    tiled = packed and shapes is not None and bool(shapes.target_windows)
    longest = sum(map(len, samples)) if packed else max(map(len, samples))
    batch = assemble(parts, packed=packed, width=shapes.row if tiled else longest, block_size=2)
    return fit(batch, replace(shapes, blocks=(), draft_windows=frozenset())) if tiled else batch
