"""How full, how even and how mixed an epoch is."""

import numpy as np
import pyarrow as pa

from dflash_prep.cost import KNEE


def certificate(table: pa.Table, lengths: np.ndarray, slots: int) -> dict:
    """The measures of one epoch: `real_token_share`, `straggler_share` and `design_effect`.

    The straggler share is what ranks, one a slot, spend waiting for their step's costliest slot. The design effect is the
    variance over steps of the step's mean log length, times the mean number of samples in a step, over the variance of log
    length: 1 is what a full shuffle gives (None where it is undefined: one step, or one length).
    """
    computed = table["padded_tokens"].to_numpy().astype(np.int64).sum()
    cost = table["cost"].to_numpy().astype(np.float64).reshape(-1, slots)
    return {
        "real_token_share": float(table["tokens"].to_numpy().astype(np.int64).sum() / computed),
        "straggler_share": float(1 - cost.sum() / (slots * cost.max(axis=1)).sum()),
        "design_effect": design_effect(table, lengths),
        "straggler_cost": f"L*(1+L/{KNEE})",
    }


def design_effect(table: pa.Table, lengths: np.ndarray) -> float | None:
    """See `certificate`."""
    samples = table["samples"].combine_chunks()
    step = np.repeat(table["step"].to_numpy(), samples.value_lengths().to_numpy())
    log_length = np.log(lengths[samples.flatten().to_numpy()])
    sizes = np.bincount(step)
    means = np.bincount(step, log_length) / sizes
    variance = log_length.var()
    if len(means) < 2 or variance == 0:
        return None
    return float(means.var(ddof=1) * sizes.mean() / variance)
