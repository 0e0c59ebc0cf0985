"""Duplicates: equal keys exactly, near ones by what is said."""

import random

from hypothesis import given
from hypothesis import strategies as st

from dflash_prep.dedup import Seen
from dflash_prep.near_dedup import WORD, WORDS, NearSeen, sketch

# keys that agree in their first eight bytes, in their last eight, or in all
KEYS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=60)


@given(KEYS, st.sets(st.integers(0, 60)))
def test_seen_knows_the_first_of_equal_keys_whenever_it_is_packed(pairs, packed):
    seen, oracle = Seen(), {}
    for number, (high, low) in enumerate(pairs):
        key = bytes([high]) * 8 + bytes([low]) * 8
        assert seen.first(key) == oracle.get(key)
        if key not in oracle:
            oracle[key] = number
            seen.add(key, number)
        if number in packed:
            seen.pack()
    assert seen.first(bytes(15) + b"\xff") is None


def jaccard(one: str, other: str) -> float:
    """The share of common runs of words, counted."""
    first, second = (
        {tuple(words[at : at + WORDS]) for at in range(max(len(words) - WORDS + 1, 1))}
        for words in (WORD.findall(text.lower()) for text in (one, other))
    )
    return len(first & second) / len(first | second)


def test_near_duplicates_are_those_that_share_so_much():
    """MinHash of 128 numbers tells shares of a twelfth apart with hardly an error."""
    draw = random.Random(0)
    for _ in range(40):
        words = [str(draw.randrange(1000)) for _ in range(300)]
        other = list(words)
        for _ in range(draw.randrange(40)):
            other[draw.randrange(300)] = "changed"
        seen = NearSeen(0.7)
        seen.add(sketch([" ".join(words)]), 3)
        share = jaccard(" ".join(words), " ".join(other))
        found = seen.first(sketch([" ".join(other)]))
        if abs(share - 0.7) > 0.15:
            assert (found == 3) == (share > 0.7), share


def test_scripts_without_spaces_are_compared_letter_by_letter():
    seen = NearSeen(0.8)
    text = "".join(chr(0x4E00 + 7 * n) for n in range(200))
    seen.add(sketch([text]), 0)
    assert seen.first(sketch([text[:-1] + "x"])) == 0
    assert seen.first(sketch([text[100:] + text[:50]])) is None
