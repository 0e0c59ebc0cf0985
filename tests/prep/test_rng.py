"""Random streams: the published generator, and permutations of it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_prep.rng import mix, permutation, stream

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
GOLDEN_STREAM = [16642066080392306636, 17212532273722633427, 13660249899121858616]
GOLDEN_PERMUTATION = [1, 0, 6, 2, 8, 7, 3, 4, 9, 5]
NAMES = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4).map(tuple)


def plain_mix(value: int) -> int:
    """SplitMix64's output function on Python's integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def plain_stream(names: tuple[int, ...], count: int) -> list[int]:
    """A named stream on Python's integers."""
    key = 0
    for name in names:
        key = plain_mix((key + name * GAMMA + 1) & MASK)
    return [plain_mix((key + GAMMA * i) & MASK) for i in range(1, count + 1)]


def test_mix_gives_the_published_vector():
    states = np.array([(1234567 + GAMMA * i) & MASK for i in range(1, 6)], np.uint64)
    assert mix(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(NAMES, st.integers(0, 50))
def test_stream_equals_plain_integers(names, count):
    numbers = stream(names, count)
    assert numbers.dtype == np.uint64
    assert numbers.tolist() == plain_stream(names, count)


def test_streams_stay_as_they_are():
    """Another stream would silently change every plan that was ever made."""
    assert stream((1, 0, 0), 3).tolist() == GOLDEN_STREAM
    assert plain_stream((1, 0, 0), 3) == GOLDEN_STREAM
    assert permutation((1, 7, 2), 10).tolist() == GOLDEN_PERMUTATION


@given(NAMES, st.integers(0, 300))
def test_permutation_is_one_by_the_order_of_the_stream(names, count):
    order = permutation(names, count).tolist()
    numbers = plain_stream(names, count)
    assert sorted(order) == list(range(count))
    assert order == sorted(range(count), key=lambda i: (numbers[i], i))


@given(NAMES, st.integers(0, 3), st.integers(1, 2**32))
def test_each_name_counts(names, place, change):
    place %= len(names)
    other = (*names[:place], (names[place] + change) % 2**64, *names[place + 1 :])
    assert stream(names, 4).tolist() != stream(other, 4).tolist()


def test_every_position_is_equally_likely_to_come_first():
    firsts = np.bincount([permutation((1, 0, epoch), 8)[0] for epoch in range(2_000)], minlength=8)
    assert ((firsts - 250) ** 2 / 250).sum() < 24.3  # chi-square, 7 degrees of freedom, one in a thousand
