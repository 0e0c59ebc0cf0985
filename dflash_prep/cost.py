"""What a row costs a GPU: linear work plus attention, which grows with the square of the row.

cost(L) = L · (1 + L / 24,576), in tokens of linear work: the form under which this project judges straggler waste. Kept as
the integer 24,576 · cost, so that no rounding can change a plan.
"""

import numpy as np

KNEE = 24_576  # the row length at which attention costs as much as all the linear layers


def row_cost(length: np.ndarray | int):
    """24,576 times the cost of a row of `length` tokens, exact."""
    return length * (KNEE + length)


def to_tokens(cost: np.ndarray) -> np.ndarray:
    """Integer costs as float32 tokens of linear work, the unit of the plan's `cost` column."""
    return (np.asarray(cost, np.float64) / KNEE).astype(np.float32)
