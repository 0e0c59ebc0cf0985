"""Calibration: an exact fit with no negative coefficient, of times that are really measured, written whole or refused."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dflash_trainer.calibrate import COEFFICIENTS, MOST_TOKENS, choose_shapes
from dflash_trainer.cli import train
from dflash_trainer.flex import TILE, round_up
from dflash_trainer.micro_batch import Sample, assemble
from dflash_trainer.nonnegative import fit
from dflash_trainer.shapes import fit as fit_tiles
from dflash_trainer.shapes import own_shapes
from dflash_trainer.step import Stepper

SHAPES = choose_shapes(1024, 8192)
TERMS = np.array([shape.terms() for shape in SHAPES], np.float64)


@given(st.lists(st.sampled_from([0.0, 0.3, 1.0, 3.0]), min_size=5, max_size=5).filter(any))
def test_planted_coefficients_are_recovered(shares):
    typical = np.array([0.1, 1e-3, 1e-6, 2e-2, 1e-5])  # of a laptop's CPU, in seconds
    found = fit(TERMS, TERMS @ (typical * shares))
    np.testing.assert_allclose(found / typical, shares, rtol=1e-9, atol=1e-9)
    assert (found >= 0).all()


@given(st.lists(st.floats(1e-3, 10), min_size=len(SHAPES), max_size=len(SHAPES)))
def test_no_fit_is_better(seconds):
    """The conditions that hold at the optimum of non-negative least squares and nowhere else."""
    relative = TERMS / np.array(seconds)[:, None]
    scale = np.linalg.norm(relative, axis=0)
    found = fit(TERMS, np.array(seconds)) * scale
    slope = (relative / scale).T @ (relative / scale @ found - 1)
    assert (found >= 0).all()
    assert (slope >= -1e-9).all()
    assert abs(slope @ found) <= 1e-9 * max(1.0, found.max())


@pytest.mark.parametrize("tokens", [256, 1024, 32_768])
@pytest.mark.parametrize("longest", [64, 2048, 131_072])
def test_shapes_fit_and_tell_the_terms_apart(tokens, longest):
    shapes = choose_shapes(tokens, longest)
    for rows, width, anchors in shapes:
        assert 0 < rows * width <= tokens
        assert 1 < width <= longest
        assert 0 < anchors <= rows * (width - 1)
    terms = np.array([shape.terms() for shape in shapes], np.float64)
    relative = terms / terms.sum(axis=1, keepdims=True)
    assert np.linalg.matrix_rank(relative / np.linalg.norm(relative, axis=0)) == 5


@pytest.fixture
def calibrate(target_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(MOST_TOKENS, "cpu", 512)
    (tmp_path / "draft.json").write_text('{"num_hidden_layers": 2, "block_size": 4}')
    common = ["--target", target_dir, "--draft-config", tmp_path / "draft.json"]
    return lambda *options: CliRunner().invoke(train, [str(word) for word in (*common, *options)])


def refusal(result) -> str:
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    (line,) = result.stderr.strip().splitlines()
    return line


def test_the_file_says_what_was_measured(calibrate, target_dir, tmp_path):
    path = tmp_path / "cost.json"
    path.write_text("old")
    done = calibrate("--calibrate", path, "--dtype", "float32", "--target-dtype", "bfloat16")
    assert done.exit_code == 0, done.output
    cost = json.loads(path.read_text())
    stated = ["target", "device", "dtype", "target_dtype", "block_size", "shapes", "worst_error"]
    assert list(cost) == [*COEFFICIENTS, *stated]
    assert [cost[name] for name in stated if name not in ("device", "shapes", "worst_error")] == [
        *(str(target_dir), "float32", "bfloat16", 4)
    ]
    assert all(cost[name] >= 0 for name in COEFFICIENTS)
    errors = []
    for shape in cost["shapes"]:
        rows, width, anchors = shape["rows"], shape["width"], shape["anchors"]
        terms = [1, rows * width, rows * width**2, anchors, anchors * width]
        assert shape["predicted"] == pytest.approx(np.dot([cost[name] for name in COEFFICIENTS], terms))
        assert min(shape["predicted"], shape["seconds"]) > 0
        errors.append(abs(shape["predicted"] / shape["seconds"] - 1))
    assert cost["worst_error"] == pytest.approx(max(errors))
    assert "measured" in done.stdout
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["cost.json", "draft.json"]


@pytest.mark.parametrize(("rows", "anchors"), [(1, 1), (3, 9), (5, 200)])
@pytest.mark.parametrize("size", [4, 10, 16])
def test_on_a_gpu_what_is_timed_has_whole_tiles(rows, anchors, size):
    """As it has in training: kernels by tiles take nothing else."""
    spans = np.array([0, 41])
    ids, places = np.zeros(41, np.uint32), np.sort(np.random.default_rng(0).permutation(40)[: anchors // rows])
    batch = assemble([Sample(ids, spans, places)] * rows, packed=False, width=41, block_size=size)
    fitted = fit_tiles(batch, own_shapes(batch, frozenset({None, 3})))
    assert len(fitted.real) == len(fitted.positions) == round_up(41 * rows)
    assert len(fitted.anchors) * size % TILE == 0 <= len(fitted.anchors) - len(batch.anchors)
    assert (fitted.tokens, fitted.blocks, set(fitted.draft_masks)) == (batch.tokens, batch.blocks, {None, 3})


def test_less_memory_means_smaller_shapes(calibrate, tmp_path, monkeypatch):
    compute, most = Stepper.accumulate, [300]

    def accumulate(stepper, batch):
        if batch.input_ids.numel() > most[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        compute(stepper, batch)

    monkeypatch.setattr(Stepper, "accumulate", accumulate)
    assert calibrate("--calibrate", tmp_path / "cost.json").exit_code == 0
    cost = json.loads((tmp_path / "cost.json").read_text())
    assert max(shape["rows"] * shape["width"] for shape in cost["shapes"]) == 256
    most[0] = 0
    assert "has no memory" in refusal(calibrate("--calibrate", tmp_path / "none.json"))
    assert not (tmp_path / "none.json").exists()


@pytest.mark.parametrize("place", ["missing/cost.json", ".", "/dev/null", "/proc/cost.json"])
def test_places_are_checked_first(place, calibrate, tmp_path):
    assert "--calibrate" in refusal(calibrate("--calibrate", tmp_path / place, "--target", tmp_path / "none"))


def test_options_of_a_run_are_wrong_usage(calibrate, tmp_path):
    done = calibrate("--calibrate", tmp_path / "cost.json", "--manifest-dir", tmp_path, "--lr", "1e-3")
    assert done.exit_code == 2
    assert "leave --manifest-dir, --lr out" in done.stderr
