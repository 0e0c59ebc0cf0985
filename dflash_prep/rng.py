"""Random numbers spelled out, so that no library's stream can change a plan.

A stream is named by integers (seed, epoch, sample, …). Its i-th number is SplitMix64's output function applied to
key + i·γ (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), where the key folds the
names in with the same function. Only 64-bit additions, multiplications and shifts: equal on every machine.
"""

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


def mix(value: np.ndarray) -> np.ndarray:
    """SplitMix64's output function on an array of uint64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def stream(names: tuple[int, ...], count: int) -> np.ndarray:
    """The first `count` numbers (uint64) of the stream that the non-negative integers `names` name."""
    key = np.zeros(1, np.uint64)
    for name in names:
        key = mix(key + np.uint64((name * GOLDEN + 1) & MASK))
    return mix(key + np.uint64(GOLDEN) * np.arange(1, count + 1, dtype=np.uint64))


def permutation(names: tuple[int, ...], count: int) -> np.ndarray:
    """A permutation of range(count) as int64: the order of the stream's numbers, ties by position."""
    return np.argsort(stream(names, count), kind="stable")
