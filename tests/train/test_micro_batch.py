"""Micro-batches wider than their samples: padding changes neither loss nor gradient."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from dflash_prep.anchors import draw_anchors, eligible_count
from dflash_trainer.config import derive_config
from dflash_trainer.draft import DraftModel
from dflash_trainer.micro_batch import Sample, assemble
from dflash_trainer.step import Recipe, Stepper
from dflash_trainer.target import FrozenTarget

BLOCK, TAPS = 4, (1, 3)


@pytest.fixture(scope="module")
def stepper(target_dir) -> Stepper:
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float64)
    config = derive_config(model.config, block_size=BLOCK, mask_token_id=259, overrides={"num_hidden_layers": 2}, taps=TAPS)
    return Stepper(DraftModel(config).initialise(3).double(), FrozenTarget(model, TAPS), Recipe(), 1)


def make_samples(lengths: list[int], seed: int) -> list[Sample]:
    """Random tokens, of which a random stretch carries loss and about half its positions are anchors."""
    random = np.random.default_rng(seed)
    samples = []
    for number, length in enumerate(lengths):
        spans = np.sort(random.choice(length + 1, 2, replace=False)).astype(np.uint32)
        anchors = draw_anchors(spans, -(-eligible_count(spans) // 2), seed, 0, number)
        samples.append(Sample(random.integers(264, size=length).astype(np.uint32), spans, anchors))
    return samples


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=5), extra=st.integers(1, 40), seed=st.integers(0, 99))
def test_padding_changes_neither_loss_nor_gradient(stepper, packed, lengths, extra, seed):
    samples = make_samples(lengths, seed)
    tight = sum(lengths) if packed else max(lengths)
    found = []
    for width in (tight, tight + extra):
        batch = assemble(samples, packed=packed, width=width, block_size=BLOCK)
        assert batch.input_ids.shape == (1 if packed else len(lengths), width)
        buffer = stepper.gradient([batch])
        assert buffer.totals[2:].tolist() == [sum(lengths), batch.input_ids.numel(), sum(batch.block_counts)]
        found.append((buffer.gradients.clone(), buffer.totals[:2].tolist()))
    (expected, totals), (gradient, wide_totals) = found
    assert wide_totals == pytest.approx(totals, rel=1e-12)
    assert (gradient - expected).norm() <= 1e-10 * expected.norm()


def test_layouts_agree(stepper):
    samples = make_samples([31, 2, 17, 40], seed=1)
    layouts = [{"packed": True, "width": 128}, {"packed": False, "width": 64}]
    one, two = (stepper.gradient([assemble(samples, block_size=BLOCK, **how)]).gradients.clone() for how in layouts)
    assert one.norm() > 0
    assert (one - two).norm() <= 1e-10 * one.norm()


def test_an_empty_slot(stepper):
    for packed in (False, True):
        batch = assemble([], packed=packed, width=0, block_size=BLOCK)
        assert batch.input_ids.numel() == 0
        assert not stepper.gradient([batch]).gradients.any()
