"""Which samples an epoch draws: laws over sources, weights, hold-outs, seeds and epochs."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dflash_prep.errors import UserError
from dflash_prep.mixture import Mixture, exact, mix, resolve
from dflash_prep.pool import Pool
from dflash_prep.rng import stream

WEIGHTS = [0.0, 0.1, 0.3, 0.5, 0.999, 1.0, 1.5, 2.0, 2.25, 3.0]
NAMES = ["data/code.jsonl", "data/chat.jsonl.zst", "maths", ""]


def make_pool(sizes: list[int], names: list[str] | None = None) -> Pool:
    """A pool with so many samples of each source, in turn."""
    number = np.repeat(np.arange(len(sizes)), sizes)
    source = number[np.argsort(stream((9,), len(number)), kind="stable")]
    ones = np.ones(len(source), np.int64)
    chance = (stream((10,), len(source)) >> np.uint64(32)).astype(np.uint32)
    return Pool({}, "", ones * 9, ones, ones, source, names or NAMES[: len(sizes)], chance)


@st.composite
def mixtures(draw) -> tuple[Pool, dict[str, float], float, Mixture]:
    """A pool, the weight of each source, the share held out, and what is mixed from them."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    weights = {name: draw(st.sampled_from(WEIGHTS)) for name in NAMES[: len(sizes)]}
    holdout = draw(st.sampled_from([0.0, 0.1, 0.5]))
    pool = make_pool(sizes)
    try:
        return pool, weights, holdout, mix(pool, tuple(weights.items()), holdout)
    except UserError:
        assume(False)


def drawn(mixture: Mixture, seed: int, epoch: int) -> Counter:
    """How often an epoch has each sample."""
    return Counter(mixture.order(seed, epoch).tolist())


def members(pool: Pool, mixture: Mixture, name: str) -> list[int]:
    """The samples of a source that are not held out."""
    own = np.flatnonzero(pool.source == pool.sources.index(name)).tolist()
    return sorted(set(own) - set(mixture.held.tolist()))


@given(mixed=mixtures(), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 40))
def test_each_sample_occurs_as_often_as_its_source_weighs(mixed, seed, epoch):
    """⌊w⌋ times, and so many once more that the source's total is w times its samples, to the nearest whole number."""
    pool, weights, _, mixture = mixed
    counts = drawn(mixture, seed, epoch)
    for name, weight in weights.items():
        own = members(pool, mixture, name)
        assert {counts[sample] - int(weight) for sample in own} <= {0, 1}
        assert abs(sum(counts[sample] for sample in own) - exact(weight) * len(own)) <= Fraction(1, 2)


@given(mixed=mixtures(), seed=st.integers(0, 2**63 - 1))
def test_what_is_held_out_is_in_no_epoch(mixed, seed):
    pool, _, holdout, mixture = mixed
    held = set(mixture.held.tolist())
    assert held == set(np.flatnonzero(pool.chance < round(holdout * 2**32)).tolist())
    assert not any(held & drawn(mixture, seed, epoch).keys() for epoch in range(5))
    assert sorted(mixture.held_order(seed).tolist()) == sorted(held)


@given(mixed=mixtures(), seed=st.integers(0, 2**63 - 1))
def test_extra_copies_go_round_before_any_comes_again(mixed, seed):
    """After any number of epochs two samples of a source differ by one copy at most, however the weight divides."""
    pool, weights, _, mixture = mixed
    total: Counter = Counter()
    for epoch in range(12):
        total += drawn(mixture, seed, epoch)
        for name in weights:
            counts = [total[sample] for sample in members(pool, mixture, name)]
            assert not counts or max(counts) - min(counts) <= 1


@given(mixed=mixtures(), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000))
def test_an_epoch_is_of_seed_and_number_alone(mixed, seed, epoch):
    pool, weights, holdout, mixture = mixed
    alone = mix(pool, tuple(reversed(weights.items())), holdout)  # none before it was drawn; weights in another order
    before = [mixture.order(seed, other) for other in range(3)]
    assert np.array_equal(mixture.order(seed, epoch), alone.order(seed, epoch))
    assert all(np.array_equal(mixture.order(seed, other), order) for other, order in enumerate(before))


def test_epochs_and_seeds_differ():
    mixture = mix(make_pool([200, 300]), (), 0.1)
    orders = [tuple(mixture.order(seed, epoch).tolist()) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9 and len({tuple(sorted(order)) for order in orders}) == 1
    held = [tuple(mixture.held_order(seed).tolist()) for seed in range(3)]
    assert len(set(held)) == 3


def test_sources_of_one_size_are_thinned_apart():
    """Each by a permutation of its own."""
    pool = make_pool([50, 50])
    mixture = mix(pool, tuple((name, 0.5) for name in pool.sources), 0.0)
    places = [np.searchsorted(share.members, share.draw(0, 0, number)) for number, share in enumerate(mixture.shares)]
    assert len(places[0]) == 25 and set(places[0].tolist()) != set(places[1].tolist())


def test_a_larger_hold_out_holds_the_smaller():
    pool = make_pool([50_000])
    held = [set(mix(pool, (), share).held.tolist()) for share in (0.01, 0.05, 0.3)]
    assert held[0] < held[1] < held[2]
    assert [len(part) / 50_000 for part in held] == pytest.approx([0.01, 0.05, 0.3], rel=0.1)


def test_no_weights_are_every_sample_once():
    pool = make_pool([7, 11])
    mixture = mix(pool, (), 0.0)
    assert sorted(mixture.order(5, 2).tolist()) == list(range(18))
    assert [share.per_epoch for share in mixture.shares] == [7, 11]


@pytest.mark.parametrize(
    ("weight", "size", "copies"),
    [(0.3, 10, 3), (0.1, 30, 3), (2.5, 5, 12), (0.5, 3, 2), (1.5, 1, 1), (0.001, 100, 0), (0.999, 10, 10), (3.0, 4, 12)],
)
def test_counts_are_those_of_the_weight_as_it_is_written(weight, size, copies):
    """0.3 is three tenths, not the nearest binary fraction; halves go to the even number."""
    pool = make_pool([size, 1])
    share = mix(pool, ((NAMES[0], weight),), 0.0).shares[0]
    assert share.per_epoch == copies == len(share.draw(0, 0, 0))


# Names


def names(pool: Pool, *given: str) -> list[str]:
    """The full names of sources that are named somehow."""
    return [source for source, _ in resolve(pool, tuple((name, 2.0) for name in given))]


def test_a_source_is_named_by_path_file_or_stem():
    pool = make_pool([1, 1, 1, 1])
    assert names(pool, "data/code.jsonl", "chat.jsonl.zst", "maths", "") == NAMES
    assert names(pool, "code", "chat") == NAMES[:2]
    assert names(pool, "code.jsonl") == NAMES[:1]


def test_a_full_name_comes_before_a_stem():
    pool = make_pool([1, 1], ["code", "data/code.jsonl"])
    assert names(pool, "code") == ["code"]
    assert names(pool, "code.jsonl") == ["data/code.jsonl"]


@pytest.mark.parametrize("name", ["other", "data", "jsonl", "code.json", "CODE", "chat.jsonl"])
def test_a_name_that_no_source_has(name):
    with pytest.raises(UserError, match=f"--weight {name}=2: names no source; there are data/code.jsonl, "):
        names(make_pool([1, 1, 1]), name)


def test_a_name_that_several_sources_have():
    pool = make_pool([1, 1, 1], ["a/code.jsonl", "b/code.jsonl.gz", "b/code.jsonl"])
    for name in ("code", "code.jsonl"):
        with pytest.raises(UserError, match=f"--weight {name}=2: names several sources; there are a/code.jsonl, "):
            names(pool, name)
    assert names(pool, "b/code.jsonl", "code.jsonl.gz") == ["b/code.jsonl", "b/code.jsonl.gz"]


def test_a_source_weighed_twice():
    with pytest.raises(UserError, match=r"the weight of data/code\.jsonl is given twice"):
        names(make_pool([1, 1]), "code", "data/code.jsonl")


# What cannot be


def test_a_hold_out_that_holds_nothing():
    with pytest.raises(UserError, match=r"--holdout 1e-09 of 20 samples holds none of them out; raise it or leave it out"):
        mix(make_pool([20]), (), 1e-9)


def test_nothing_left_to_train_on():
    pool = make_pool([20, 20])
    for weights in (((NAMES[0], 0.0), (NAMES[1], 0.0)), ((NAMES[0], 0.001), (NAMES[1], 0.0))):
        with pytest.raises(UserError, match=r"no sample is left to train on; raise --weight or lower --holdout"):
            mix(pool, weights, 0.0)
    with pytest.raises(UserError, match="no sample is left"):
        mix(Pool(**vars(make_pool([3])) | {"chance": np.zeros(3, np.uint32)}), (), 0.5)
