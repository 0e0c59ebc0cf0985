"""What a plan promises, in numbers: `plan.json` states them and `verify` derives them anew."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dflash_prep.diversity import MOST_EPOCHS, Company, company, design_effect, neighbour_correlation, overlap, step_means
from dflash_prep.manifest import members
from dflash_prep.scheme import Scheme

KNEE = 24_576  # straggler shares of all plans are judged alike: a row of L tokens costs L · (1 + L / 24,576)


@dataclass(frozen=True)
class Measures:
    """What one epoch comes to."""

    steps: int
    empty_slots: int
    tokens: int
    padded_tokens: int
    most_tokens: int  # of a micro-batch, padding included
    most_anchors: int
    fewest: int  # occurrences of a sample
    most: int
    seconds: float  # summed over steps, each as long as its dearest slot
    busy: float  # slot-seconds, without waiting
    floor: float  # slot-seconds if no token were padding and no slot less than full
    straggler_share: float
    design_effect: float | None
    step_correlation: float | None
    filled: int  # real tokens of all steps but the last
    company: Company | None  # of the first few epochs
    dearest: float  # the seconds of the fullest micro-batch
    places: dict[str, dict]  # where the longest and the fullest stand


def measure(table: pa.Table, scheme: Scheme, epoch: int) -> Measures:
    """Measure one epoch's table."""
    slots, length = scheme.options.slots, scheme.samples.length
    flat, sizes = members(table)
    column = {name: table[name].to_numpy().astype(np.int64) for name in ("tokens", "padded_tokens", "anchors", "width")}
    cost = table["cost"].to_numpy().astype(np.float64)
    log_length = np.log(length)
    means, counts = step_means(flat, sizes, slots, log_length)
    variance = log_length[flat].var()
    often = np.bincount(flat, minlength=len(length))[planned(scheme)]
    judged = reference_cost(flat, sizes, length, column["width"], scheme.options.strategy == "packed").reshape(-1, slots)
    return Measures(
        steps=len(sizes) // slots,
        empty_slots=int((sizes == 0).sum()),
        tokens=int(column["tokens"].sum()),
        padded_tokens=int(column["padded_tokens"].sum()),
        most_tokens=int(column["padded_tokens"].max()),
        most_anchors=int(column["anchors"].max()),
        fewest=int(often.min()),
        most=int(often.max()),
        seconds=float(cost.reshape(-1, slots).max(axis=1).sum()),
        busy=float(cost.sum()),
        floor=floor_seconds(flat, scheme),
        straggler_share=float(1 - judged.sum() / (slots * judged.max(axis=1).sum())),
        design_effect=design_effect(means, counts, variance),
        step_correlation=neighbour_correlation(means),
        filled=int(column["tokens"][:-slots].sum()),
        company=company(flat, sizes, len(length)) if epoch < MOST_EPOCHS else None,
        dearest=float(cost.max()),
        places={
            "longest": place(column, epoch, slots, int(np.argmax(column["width"]))),
            "fullest": place(column, epoch, slots, int(np.argmax(cost))),
        },
    )


def planned(scheme: Scheme) -> np.ndarray:
    """The samples that may occur: all that are not held out."""
    return np.concatenate([share.members for share in scheme.mixture.shares if share.weight])


def reference_cost(flat: np.ndarray, sizes: np.ndarray, length: np.ndarray, width: np.ndarray, packed: bool) -> np.ndarray:
    """The cost of each micro-batch by which all plans are judged, in tokens of linear work."""
    if not packed:
        return sizes * (width * (1 + width / KNEE))
    sums = np.concatenate([[0], np.cumsum(length[flat] * (KNEE + length[flat]))]) / KNEE
    ends = np.cumsum(sizes)
    return sums[ends] - sums[ends - sizes]


def floor_seconds(flat: np.ndarray, scheme: Scheme) -> float:
    """The slot-seconds of samples that need no padding, in as few micro-batches as their tokens fill."""
    length, price = scheme.samples.length[flat], scheme.price
    work = price.rows(1, length) + price.blocks(scheme.samples.anchors[flat], length)
    launches = -(-int(length.sum()) // scheme.limits.tokens)
    return float(price.seconds(int(work.sum()) + launches * price.fixed))


def place(column: dict[str, np.ndarray], epoch: int, slots: int, row: int) -> dict:
    """Where a micro-batch stands and how large it is."""
    sizes = {name: int(column[name][row]) for name in ("width", "padded_tokens", "anchors")}
    return {"epoch": epoch, "step": row // slots, "slot": row % slots, **sizes}


def mean(values: list[float | None]) -> float | None:
    """The mean of those that are defined."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def certificate(epochs: list[Measures], scheme: Scheme) -> dict:
    """The certificate of a plan's epochs."""
    slots = scheme.options.slots
    total = {name: sum(getattr(epoch, name) for epoch in epochs) for name in ("tokens", "padded_tokens", "steps", "filled")}
    seconds, floor = sum(epoch.seconds for epoch in epochs), sum(epoch.floor for epoch in epochs) / slots
    met = overlap([epoch.company for epoch in epochs if epoch.company])
    full_steps = (total["steps"] - len(epochs)) * slots * scheme.limits.tokens
    return {
        "fewest_copies": min(epoch.fewest for epoch in epochs),
        "most_copies": max(epoch.most for epoch in epochs),
        "most_tokens": max(epoch.most_tokens for epoch in epochs),
        "most_anchors": max(epoch.most_anchors for epoch in epochs),
        "slots_per_step": slots,
        "empty_slots": sum(epoch.empty_slots for epoch in epochs),
        "real_token_share": total["tokens"] / total["padded_tokens"],
        "padding_share": 1 - total["tokens"] / total["padded_tokens"],
        "fill": total["filled"] / full_steps if full_steps else None,
        "seconds": seconds,
        "gap_to_optimum": seconds / floor - 1,
        "straggler_share": mean([epoch.straggler_share for epoch in epochs]),
        "straggler_share_of_cost": 1 - sum(epoch.busy for epoch in epochs) / slots / seconds,
        "straggler_cost": f"L*(1+L/{KNEE})",
        "design_effect": mean([epoch.design_effect for epoch in epochs]),
        "step_correlation": mean([epoch.step_correlation for epoch in epochs]),
        "jaccard": met[0] if met else None,
        "jaccard_random": met[1] if met else None,
    }


def rehearsal(epochs: list[Measures]) -> dict:
    """The longest and the fullest micro-batch of the plan: what a trainer tries before its first step."""
    longest = max((epoch.places["longest"] for epoch in epochs), key=lambda at: at["width"])
    fullest = max(epochs, key=lambda epoch: epoch.dearest)
    return {"longest": longest, "fullest": fullest.places["fullest"]}
