"""Anchors: which positions are eligible, how many a sample has, and that draws depend on the sample alone."""

from fractions import Fraction
from math import ceil

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_prep.anchors import anchor_count, density_ppm, draw_anchors, eligible_count, eligible_positions

# spans as tokenizing makes them: non-empty, ascending, never touching
SPANS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 12)), max_size=6).map(
    lambda steps: np.cumsum([part for step in steps for part in step], dtype=np.int64).astype(np.uint32)
)
NAMES = st.integers(0, 2**32)


def positions_by_loop(spans: np.ndarray) -> list[int]:
    """Each a such that a and a+1 are loss tokens, looked at one by one."""
    loss = {at for start, end in spans.reshape(-1, 2).tolist() for at in range(start, end)}
    return [at for at in range(max(loss, default=0) + 1) if at in loss and at + 1 in loss]


@given(SPANS)
def test_eligible_positions_equal_a_loop(spans):
    expected = positions_by_loop(spans)
    assert eligible_positions(spans).tolist() == expected
    assert eligible_count(spans) == len(expected)


@given(
    st.lists(st.integers(0, 2**20), min_size=1, max_size=20),
    st.integers(1, 10**6).map(lambda ppm: ppm / 10**6),
    st.integers(1, 600),
)
def test_count_is_the_stated_formula(eligible, density, most):
    counts = anchor_count(np.array(eligible, np.uint32), density_ppm(density), most)
    share = Fraction(round(density * 10**6), 10**6)
    assert counts.tolist() == [min(most, ceil(share * number)) for number in eligible]


def test_the_paper_s_setting_takes_512_of_a_long_sample_and_all_of_a_short_one():
    assert anchor_count(np.array([0, 1, 511, 512, 8000]), density_ppm(1.0), 512).tolist() == [0, 1, 511, 512, 512]


@given(SPANS, st.integers(0, 80), NAMES, NAMES, NAMES)
def test_drawn_anchors_are_ascending_distinct_and_eligible(spans, count, seed, epoch, sample):
    eligible = positions_by_loop(spans)
    anchors = draw_anchors(spans, count, seed, epoch, sample).tolist()
    assert len(anchors) == min(count, len(eligible))
    assert anchors == sorted(set(anchors))
    assert set(anchors) <= set(eligible)


@given(NAMES, NAMES, NAMES, st.integers(0, 3))
def test_a_draw_depends_on_each_of_its_names_and_on_nothing_else(seed, epoch, sample, copy):
    spans = np.array([5, 500], np.uint32)
    anchors = draw_anchors(spans, 100, seed, epoch, sample, copy).tolist()
    for other in ((seed + 1, epoch, sample), (seed, epoch + 1, sample), (seed, epoch, sample + 1)):
        assert draw_anchors(spans, 100, *other, copy).tolist() != anchors
    assert draw_anchors(spans, 100, seed, epoch, sample, copy + 1).tolist() != anchors
    np.random.default_rng().random()
    assert draw_anchors(spans, 100, seed, epoch, sample, copy).tolist() == anchors


def test_fewer_anchors_are_part_of_more():
    spans = np.array([5, 200], np.uint32)
    drawn = [set(draw_anchors(spans, count, 3, 1, 4).tolist()) for count in (10, 50, 194)]
    assert drawn[0] < drawn[1] < drawn[2]


def test_every_position_is_drawn_equally_often():
    spans = np.array([2, 11], np.uint32)
    drawn = np.concatenate([draw_anchors(spans, 2, 0, epoch, 0) for epoch in range(2_000)])
    counts = np.bincount(drawn - 2, minlength=8)
    assert len(counts) == 8
    assert ((counts - 500) ** 2 / 500).sum() < 24.3  # chi-square, 7 degrees of freedom, one in a thousand


def test_no_anchor_where_no_two_loss_tokens_touch():
    spans = np.array([3, 4, 9, 10], np.uint32)
    assert eligible_count(spans) == 0
    assert draw_anchors(spans, 5, 0, 0, 0).tolist() == []
    assert eligible_positions(np.empty(0, np.uint32)).tolist() == []
