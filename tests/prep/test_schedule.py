"""Steps of every strategy: each sample once, budgets kept, full and level steps, fresh neighbours each epoch."""

from functools import partial
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_prep import schedule
from dflash_prep.batching import FREE, Limits
from dflash_prep.cost import CostModel
from dflash_prep.rng import permutation
from tests.prep.support import assert_within, group_tokens, groups_of, planning_samples, price_for

STRATEGIES = ["sorted", "shuffled", "bucketed", "fixed", "step", "packed"]


def steps_of(strategy: str, samples, limits, slots, seed, epoch, bounds=None, model=None) -> list[list[list[int]]]:
    """One epoch's steps; `bounds` default to three quarters of the longest and the longest."""
    longest = int(limits.width(samples.length.max()))
    bounds = bounds or sorted({int(limits.width(max(1, longest * 3 // 4))), longest})
    make = {
        "sorted": schedule.sorted_steps,
        "shuffled": schedule.shuffled_steps,
        "bucketed": partial(schedule.bucketed_steps, bounds=bounds, fixed_shapes=False),
        "fixed": partial(schedule.bucketed_steps, bounds=bounds, fixed_shapes=True),
        "step": schedule.step_bucketed_steps,
        "packed": schedule.packed_steps,
    }[strategy]
    order = permutation((1, seed, epoch), len(samples))
    batches = make(order, samples, limits, price_for(samples, limits, model), slots, (seed, epoch))
    groups = groups_of(batches)
    assert len(groups) % slots == 0
    return [groups[start : start + slots] for start in range(0, len(groups), slots)]


LENGTHS = st.one_of(
    st.lists(st.integers(1, 200), min_size=1, max_size=120),
    st.lists(st.integers(1, 1), min_size=1, max_size=60),
    st.builds(lambda length, count: [length] * count, st.integers(1, 200), st.integers(1, 80)),
    st.builds(lambda many, few: [3] * many + [199] * few, st.integers(1, 80), st.integers(1, 12)),
)
MODELS = [
    CostModel(),
    CostModel(0, 1, 0, 0, 0),
    CostModel(9, 1, 0.01, 3, 0.1),
    CostModel(0, 0, 1, 0, 0),
    CostModel(1, 1e-9, 0, 1e3, 0),
]


@st.composite
def cases(draw):
    """Samples, limits, slots, seed and cost model; each sample is within the limits by itself."""
    samples = planning_samples(draw(LENGTHS), draw(st.sampled_from([512, 3])))
    align = draw(st.sampled_from([1, 1, 8]))
    longest, anchors = -(-int(samples.length.max()) // align) * align, int(samples.anchors.max())
    tokens = draw(st.one_of(st.just(longest), st.integers(longest, 3 * longest + 5), st.just(10_000)))
    most = draw(st.sampled_from([FREE, max(1, anchors), anchors + 7]))
    slots, seed = draw(st.integers(1, 9)), draw(st.integers(0, 2**40))
    return samples, Limits(tokens, most, align), slots, seed, draw(st.sampled_from(MODELS))


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=80)
@given(case=cases(), epoch=st.integers(0, 5))
def test_every_sample_once_in_full_steps_within_the_budgets(strategy, case, epoch):
    samples, limits, slots, seed, model = case
    steps = steps_of(strategy, samples, limits, slots, seed, epoch, model=model)
    flat = [sample for step in steps for group in step for sample in group]
    assert sorted(flat) == list(range(len(samples)))
    assert all(group for step in steps[:-1] for group in step)
    assert any(steps[-1])
    for step in steps:
        assert_within(filter(None, step), samples, limits, strategy == "packed")
    if not all(steps[-1]) and strategy != "packed":
        # a last step is short of slots only for want of samples
        assert all(len(group) <= 1 for group in steps[-1])


def neighbours(steps) -> set[frozenset[int]]:
    """The sets of samples that stand together in one micro-batch."""
    return {frozenset(group) for step in steps for group in step if len(group) > 1}


SPREAD = planning_samples(np.random.default_rng(8).lognormal(4.5, 0.6, 1_200).astype(int).clip(4, 400).tolist())
DECENT = Limits(1_200)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_epochs_and_seeds_differ_and_repeat(strategy):
    epochs = [steps_of(strategy, SPREAD, DECENT, 4, 5, epoch) for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != steps_of(strategy, SPREAD, DECENT, 4, 6, 0)
    assert epochs[2] == steps_of(strategy, SPREAD, DECENT, 4, 5, 2)
    shared = len(neighbours(epochs[0]) & neighbours(epochs[1])) / len(neighbours(epochs[0]))
    assert shared == 1 if strategy == "sorted" else shared < 0.05


BOUNDS = [60, 90, 130, 190, 400]
LEVEL = {"sorted": 0.1, "shuffled": 0.3, "bucketed": 0.25, "fixed": 0.3, "step": 0.2, "packed": 0.1}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("slots", [4, 8])
def test_steps_are_level(strategy, slots):
    """What a step computes stays near the mean, the last step included."""
    for epoch in range(2):
        steps = steps_of(strategy, SPREAD, DECENT, slots, 1, epoch, BOUNDS)
        assert len(steps) >= 10
        assert all(group for step in steps for group in step)
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


def design_effect(steps) -> float:
    """The variance of steps' mean log length over that of random samples."""
    log = np.log(SPREAD.length)
    members = [list(chain(*step)) for step in steps]
    means = np.array([log[member].mean() for member in members])
    return means.var(ddof=1) * np.mean([len(member) for member in members]) / log.var()


@pytest.mark.parametrize("strategy", ["step", "packed"])
def test_drawn_steps_are_as_mixed_as_a_full_shuffle(strategy):
    effects = [design_effect(steps_of(strategy, SPREAD, DECENT, 4, 2, epoch)) for epoch in range(4)]
    assert 0.4 < np.mean(effects) < 2


@pytest.mark.parametrize("strategy", ["bucketed", "fixed"])
@pytest.mark.parametrize("bounds", [[60, 120, 400], BOUNDS, list(range(20, 401, 20))])
def test_buckets_do_not_cluster_in_steps(strategy, bounds):
    effects = [design_effect(steps_of(strategy, SPREAD, DECENT, 8, 2, epoch, bounds)) for epoch in range(4)]
    assert np.mean(effects) < 2.5
    assert design_effect(steps_of("sorted", SPREAD, DECENT, 8, 2, 0)) > 10


def test_bucketed_steps_hold_their_share_of_every_bucket():
    bounds = [60, 120, 400]
    steps = steps_of("bucketed", SPREAD, DECENT, 8, 0, 0, bounds)
    buckets = np.array([[np.searchsorted(bounds, SPREAD.length[group].max()) for group in step] for step in steps])
    for bucket in range(3):
        held = (buckets == bucket).sum(axis=1)
        assert held.max() - held.min() <= 2
