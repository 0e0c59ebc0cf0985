"""What a micro-batch costs: seconds from five coefficients, and the integers by which planning decides.

seconds = c0 + a·tokens + b·Σ width² + d·anchors + e·Σ anchors·length

The first three terms are the frozen target's (a launch, its linear layers, its attention over rows of `width` computed
tokens), the last two the draft's (a block an anchor, and the block's attention over its sample's context).
`dflash-train --calibrate` measures the coefficients on the machine that will train.
"""

import math
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from dflash_prep.errors import UserError
from dflash_prep.files import read_json
from dflash_prep.rules import broken, number, optional, whole

MICRO_BATCH_BITS = 50  # the integer cost of the costliest micro-batch that fits the budgets stays below 2^50
SUM_BITS = 60  # and that of so many micro-batches as there are slots or samples below 2^60
MOST_SECONDS = 1e6  # of any coefficient; a little more once it is rounded
LEAST_TOKEN, LEAST_SQUARE = 1e-12, 1e-18  # seconds; a model below both has no price for tokens
STATED = dict.fromkeys(("c0", "a", "b", "d", "e"), number(0, 2 * MOST_SECONDS))


# The default target, SmolLM2-135M, and its default draft, from their configurations.
HIDDEN, INTERMEDIATE, KEYS, VOCABULARY = 576, 1536, 192, 49_152  # KEYS: width of the keys, and of the values
TARGET_LAYERS, DRAFT_LAYERS, BLOCK = 28, 5, 16  # of the target those that run: up to the last tap
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * INTERMEDIATE  # weights of a decoder layer of either
CONTEXT = DRAFT_LAYERS * (HIDDEN * HIDDEN + 2 * HIDDEN * KEYS)  # of the draft's fusion, keys and values of the context
RATE = 1e12  # operations a second: an efficient CPU's; only a calibrated cost knows real seconds


@dataclass(frozen=True)
class CostModel:
    """Coefficients in seconds, as `COST.json` and `plan.json` state them; see the module.

    The defaults count the operations of the default target and draft: two a weight and token, three times that where a
    backward pass follows, twice where it stops at the inputs (the frozen LM head). Causal attention sees half of width².
    """

    c0: float = 0.0
    a: float = (2 * TARGET_LAYERS * LAYER + 6 * CONTEXT) / RATE
    b: float = 2 * TARGET_LAYERS * HIDDEN / RATE
    d: float = (6 * DRAFT_LAYERS * BLOCK * LAYER + 4 * (BLOCK - 1) * VOCABULARY * HIDDEN) / RATE
    e: float = 12 * DRAFT_LAYERS * BLOCK * HIDDEN / RATE

    def as_dict(self) -> dict[str, float]:
        """The coefficients by name."""
        return asdict(self)


@dataclass(frozen=True)
class Price:
    """The cost model in integers: coefficients in units of 2^-`bits` seconds, rounded once.

    Costs are then exact sums of int64, so that no rounding can change a plan.
    """

    fixed: int
    token: int
    square: int
    anchor: int
    reach: int
    bits: int

    def rows(self, rows, width):
        """The target's cost of `rows` rows of `width` computed tokens."""
        return rows * (width * (self.token + self.square * width))

    def blocks(self, anchors, length):
        """The draft's cost of `anchors` blocks in a sample of `length` tokens."""
        return anchors * (self.anchor + self.reach * length)

    def seconds(self, cost) -> np.ndarray:
        """Integer costs as float64 seconds."""
        return np.ldexp(np.asarray(cost, np.float64), -self.bits)

    @property
    def model(self) -> CostModel:
        """The coefficients as they were rounded, exact in float64."""
        rounded = self.fixed, self.token, self.square, self.anchor, self.reach
        return CostModel(*(math.ldexp(value, -self.bits) for value in rounded))


def price(model: CostModel, tokens: int, longest: int, anchors: int, most_anchors: int, count: int) -> Price:
    """Round a cost model for micro-batches of at most `tokens` tokens and `anchors` anchors.

    longest: width of the longest row; most_anchors: of a sample; count: of samples or slots, whichever are more. Where
    tokens cost anything, they keep costing at least one unit.
    """
    largest = model.c0 + tokens * (model.a + model.b * longest + model.e * most_anchors) + anchors * model.d
    room = min(MICRO_BATCH_BITS, SUM_BITS - count.bit_length())
    bits = room - math.frexp(largest)[1]
    fixed, token, square, anchor, reach = (
        round(Fraction(value) * Fraction(2) ** bits) for value in model.as_dict().values()
    )
    return Price(fixed, max(token, 1) if model.a else 0, square if model.a else max(square, 1), anchor, reach, bits)


def read_cost(path: Path, block_size: int) -> CostModel:
    """Read a cost model that `dflash-train --calibrate` wrote, or one written by hand.

    What an anchor costs depends on the block: one that was measured with another `block_size` than the plan's is refused.
    """
    stated = read_json(path, "cost model")
    if key := broken(stated, STATED):
        raise UserError(f"{path}: the cost model states no valid {key}; write {', '.join(STATED)} as seconds, none below 0")
    if not optional(whole(2))(stated.get("block_size")):
        raise UserError(f"{path}: the cost model states no valid block_size; give a whole number or leave it out")
    if (stated.get("block_size") or block_size) != block_size:
        raise UserError(
            f"{path}: was measured with blocks of {stated['block_size']}, not of {block_size}; calibrate again with "
            "--draft-config or plan with that --block-size"
        )
    model = CostModel(**{key: float(stated[key]) for key in STATED})
    if model.a < LEAST_TOKEN and model.b < LEAST_SQUARE:
        raise UserError(
            f"{path}: in this cost model tokens cost nothing (a and b are about 0); nothing could be planned by it"
        )
    if max(model.as_dict().values()) > MOST_SECONDS:
        raise UserError(
            f"{path}: the cost model states more than {MOST_SECONDS:,.0f} seconds; state its coefficients in seconds"
        )
    return model
