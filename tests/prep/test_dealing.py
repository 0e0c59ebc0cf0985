"""Dealing micro-batches to steps: each once, strata, and pulls that cancel."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_prep.dealing import LOG_BITS, deal_to_steps, design_effect, leaning, log_length, match, more_counts


def test_fixed_point_logarithms_are_right_to_their_last_bits():
    lengths = np.unique(np.concatenate([np.arange(1, 10_000), 2 ** np.arange(31), 2 ** np.arange(1, 31) - 1]))
    assert np.abs(log_length(lengths) / 2**LOG_BITS - np.log2(lengths)).max() < 2.0**-LOG_BITS


@given(st.lists(st.integers(-900, 900), min_size=1, max_size=60), st.integers(1, 9), st.integers(0, 5))
def test_every_micro_batch_is_dealt_once_and_only_the_last_step_has_empty_slots(pull, slots, name):
    order = deal_to_steps(np.array(pull), slots, (name,))
    assert len(order) % slots == 0
    assert sorted(order[order >= 0].tolist()) == list(range(len(pull)))
    assert (order[: len(order) - slots] >= 0).all()
    if len(pull) % slots == 0:  # one of each stratum in every step
        strata = order.reshape(-1, slots) // (len(pull) // slots)
        assert all(sorted(step) == list(range(slots)) for step in strata.tolist())


@pytest.mark.parametrize("slots", [2, 8])
def test_matched_pulls_cancel_far_better_than_random_ones(slots):
    generator = np.random.default_rng(0)
    pull = np.sort(generator.normal(0, 1_000, 400 * slots).astype(np.int64))
    sums = pull[match(pull, slots, (1,))].sum(axis=1)
    strata = pull.reshape(slots, -1)
    random = sum(generator.permutation(stratum) for stratum in strata)
    assert sums.std() < 0.5 * random.std()


def test_the_design_effect_is_that_of_its_definition():
    generator = np.random.default_rng(2)
    lengths = generator.lognormal(6, 0.6, 4_000).astype(np.int64) + 1
    cuts = np.append(np.sort(generator.choice(np.arange(1, 4_000), 399, replace=False)), 4_000)
    cuts = np.insert(cuts, 0, 0)
    lean = leaning(lengths)
    order = deal_to_steps(lean.pull(cuts), 8, (1,))
    log, sizes = np.log(lengths), np.diff(cuts)
    steps = order.reshape(-1, 8)
    counts = sizes[steps].sum(axis=1)
    means = np.array([sum(log[cuts[i] : cuts[i + 1]].sum() for i in step) for step in steps]) / counts
    expected = means.var() * counts.mean() / log.var()
    assert design_effect(order, lean.pull(cuts), sizes, 8, lean.variance) == pytest.approx(expected, rel=0.05, abs=0.05)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(-5_000, 5_000)), min_size=1, max_size=40), st.integers(1, 80))
def test_more_counts_only_ever_grow_and_end_with_mild_pulls(buckets, steps):
    counts, pull = (np.array(column) for column in zip(*buckets, strict=True))
    last = counts
    for more in more_counts(counts, pull, steps):
        assert (more >= last).all()
        last = more
    upward = max(1, int(pull[pull > 0].sum()) // steps)
    assert (abs(pull) <= last * upward).all()
