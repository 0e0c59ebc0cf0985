"""Steps of every strategy: each sample once, budgets kept, full and level steps, fresh neighbours each epoch."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_prep import schedule
from dflash_prep.batching import Limits
from dflash_prep.cost import row_cost
from dflash_prep.manifest import epoch_table
from tests.prep.support import assert_within, group_tokens, planning_samples

STRATEGIES = ["sorted", "shuffled", "bucketed", "step", "packed"]
FREE = 2**62


def steps_of(strategy: str, samples, limits, slots, seed, epoch, bounds=None):
    """One epoch's steps; `bounds` default to three quarters of the longest and the longest."""
    longest = int(samples.length.max())
    bounds = bounds or sorted({max(1, longest * 3 // 4), longest})
    make = {
        "sorted": schedule.sorted_steps,
        "shuffled": schedule.shuffled_steps,
        "bucketed": partial(schedule.bucketed_steps, bounds=bounds),
        "step": schedule.step_bucketed_steps,
        "packed": schedule.packed_steps,
    }[strategy]
    return make(samples, limits, slots, seed, epoch)


LENGTHS = st.one_of(
    st.lists(st.integers(1, 200), min_size=1, max_size=120),
    st.lists(st.integers(1, 1), min_size=1, max_size=60),
    st.builds(lambda length, count: [length] * count, st.integers(1, 200), st.integers(1, 80)),
    st.builds(lambda many, few: [3] * many + [199] * few, st.integers(1, 80), st.integers(1, 12)),
)


@st.composite
def cases(draw):
    """Samples, limits, slots and seed; each sample is within the limits by itself."""
    samples = planning_samples(draw(LENGTHS), draw(st.sampled_from([512, 3])))
    longest, anchors = int(samples.length.max()), int(samples.anchors.max())
    tokens = draw(st.one_of(st.just(longest), st.integers(longest, 3 * longest + 5), st.just(10_000)))
    most = draw(st.sampled_from([FREE, max(1, anchors), anchors + 7]))
    return samples, Limits(tokens, most), draw(st.integers(1, 9)), draw(st.integers(0, 2**40))


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=60)
@given(case=cases(), epoch=st.integers(0, 5))
def test_every_sample_once_in_full_steps_within_the_budgets(strategy, case, epoch):
    samples, limits, slots, seed = case
    steps = steps_of(strategy, samples, limits, slots, seed, epoch)
    assert_laws(steps, samples, limits, slots, strategy == "packed")


def assert_laws(steps, samples, limits, slots, packed):
    """The laws of an epoch that no strategy may break."""
    flat = [int(sample) for step in steps for group in step for sample in group]
    assert sorted(flat) == list(range(len(samples)))
    assert all(len(step) == slots for step in steps[:-1])
    assert 1 <= len(steps[-1]) <= slots
    for step in steps:
        assert_within(step, samples, limits, packed)
    if len(steps[-1]) < slots and not packed:
        # a last step is short of slots only for want of samples
        assert all(len(group) == 1 for group in steps[-1])


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=20)
@given(case=cases())
def test_the_table_says_what_the_steps_are(strategy, case):
    samples, limits, slots, seed = case
    packed = strategy == "packed"
    longest = int(samples.length.max())
    bounds = sorted({max(1, longest * 3 // 4), longest})
    steps = steps_of(strategy, samples, limits, slots, seed, 0, bounds)
    rows = epoch_table(steps, samples, slots, packed, bounds if strategy == "bucketed" else []).to_pylist()
    assert [(row["step"], row["slot"]) for row in rows] == [(n, slot) for n in range(len(steps)) for slot in range(slots)]
    for row in rows:
        step = steps[row["step"]]
        group = step[row["slot"]].tolist() if row["slot"] < len(step) else []
        assert row["samples"] == group
        if not group:
            assert not any(row[name] for name in row if name not in ("step", "slot", "samples"))
            continue
        lengths = [int(samples.length[sample]) for sample in group]
        assert row["tokens"] == sum(lengths)
        assert row["width"] == (sum(lengths) if packed else max(lengths))
        assert row["padded_tokens"] == group_tokens(group, samples, packed)
        assert row["loss_tokens"] == sum(int(samples.loss_tokens[sample]) for sample in group)
        assert row["anchors"] == sum(int(samples.anchors[sample]) for sample in group)
        costs = [row_cost(length) for length in (lengths if packed else [max(lengths)] * len(lengths))]
        assert row["cost"] == pytest.approx(sum(costs) / 24_576, rel=1e-6)
        if strategy == "bucketed":
            assert all((0, *bounds)[row["bucket"]] < length <= bounds[row["bucket"]] for length in lengths)
        else:
            assert row["bucket"] == 0


def plain(steps) -> list[list[list[int]]]:
    """Steps as lists."""
    return [[group.tolist() for group in step] for step in steps]


def neighbours(steps) -> set[frozenset[int]]:
    """The sets of samples that stand in one micro-batch."""
    return {frozenset(group.tolist()) for step in steps for group in step}


SPREAD = planning_samples(np.random.default_rng(8).lognormal(4.5, 0.6, 1_200).astype(int).clip(4, 400).tolist())
DECENT = Limits(1_200, FREE)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_epochs_and_seeds_differ_and_repeat(strategy):
    epochs = [steps_of(strategy, SPREAD, DECENT, 4, 5, epoch) for epoch in range(3)]
    assert plain(epochs[0]) != plain(epochs[1]) != plain(epochs[2]) != plain(epochs[0])
    assert plain(epochs[0]) != plain(steps_of(strategy, SPREAD, DECENT, 4, 6, 0))
    assert plain(epochs[2]) == plain(steps_of(strategy, SPREAD, DECENT, 4, 5, 2))
    shared = len(neighbours(epochs[0]) & neighbours(epochs[1])) / len(neighbours(epochs[0]))
    assert shared == 1 if strategy == "sorted" else shared < 0.05


BOUNDS = [60, 90, 130, 190, 400]
LEVEL = {"sorted": 0.1, "shuffled": 0.3, "bucketed": 0.3, "step": 0.15, "packed": 0.1}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("slots", [4, 8])
def test_steps_are_level(strategy, slots):
    """What a step computes stays near the mean, the last step included."""
    for epoch in range(2):
        steps = steps_of(strategy, SPREAD, DECENT, slots, 1, epoch, BOUNDS)
        assert len(steps) >= 10
        assert all(len(step) == slots for step in steps)
        computed = np.array([sum(group_tokens(group, SPREAD, strategy == "packed") for group in step) for step in steps])
        assert computed.min() > (1 - LEVEL[strategy]) * computed.mean()
        assert computed.max() < (1 + LEVEL[strategy]) * computed.mean()


@pytest.mark.parametrize("strategy", ["step", "packed"])
@pytest.mark.parametrize("slots", [1, 4])
def test_drawn_steps_do_not_grow_towards_the_end(strategy, slots):
    """What one step falls short by must not pile up on the last ones, which would need more steps for the same samples."""
    steps = steps_of(strategy, SPREAD, DECENT, slots, 1, 0)
    real = np.array([sum(int(SPREAD.length[group].sum()) for group in step) for step in steps])
    third = len(real) // 3
    assert real[-third:].mean() == pytest.approx(real[:third].mean(), rel=0.05)
    if strategy == "packed":
        assert len(steps) <= 1.1 * real.sum() / (slots * DECENT.tokens) + 1


@pytest.mark.parametrize("strategy", ["step", "packed"])
def test_drawn_steps_are_as_mixed_as_a_full_shuffle(strategy):
    """The mean log length of a step varies as that of random samples does: a design effect of about 1."""
    effects = []
    for epoch in range(4):
        steps = steps_of(strategy, SPREAD, DECENT, 4, 2, epoch)
        log_length = np.log(SPREAD.length)
        members = [np.concatenate(step) for step in steps]
        means = np.array([log_length[member].mean() for member in members])
        effects.append(means.var(ddof=1) * np.mean([len(member) for member in members]) / log_length.var())
    assert 0.4 < np.mean(effects) < 2


def test_bucketed_steps_hold_their_share_of_every_bucket():
    bounds = [60, 120, 400]
    steps = steps_of("bucketed", SPREAD, DECENT, 8, 0, 0, bounds)
    buckets = np.array([[np.searchsorted(bounds, SPREAD.length[group].max()) for group in step] for step in steps])
    for bucket in range(3):
        held = (buckets == bucket).sum(axis=1)
        assert held.max() - held.min() <= 2


def test_packed_slots_are_nearly_full():
    lengths = np.random.default_rng(11).lognormal(6.9, 0.55, 6_000).astype(int).clip(4, 8192)
    samples = planning_samples(lengths.tolist())
    steps = steps_of("packed", samples, Limits(32_768, FREE), 8, 0, 0)
    assert samples.length.sum() / (len(steps) * 8 * 32_768) > 0.93
