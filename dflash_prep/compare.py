"""All strategies on one corpus, side by side."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from dflash_prep.certificate import certificate, measure
from dflash_prep.pool import Pool
from dflash_prep.scheme import PlanOptions, settle

EPOCHS = 2  # whose neighbours are compared
COUNTS = (4, 6, 8, 12, 16, 24, 32, 48, 64)


def compare(pool: Pool, options: PlanOptions) -> list[dict]:
    """A row a strategy: its name, number of buckets, steps of an epoch and certificate; from its first two epochs."""
    plain = replace(options, epochs=EPOCHS, buckets=None, boundaries=None, bucket_scope="epoch", fixed_shapes=False)
    chosen = {strategy: replace(plain, strategy=strategy) for strategy in ("sorted", "shuffled", "packed")}
    chosen["bucketed, by step"] = replace(plain, strategy="bucketed", bucket_scope="step")
    bucketed = replace(plain, strategy="bucketed", fixed_shapes=options.fixed_shapes)
    chosen["bucketed, auto"] = bucketed
    chosen |= {f"bucketed, {count}": replace(bucketed, buckets=count) for count in COUNTS}
    if options.boundaries:
        chosen["bucketed, given"] = replace(bucketed, boundaries=options.boundaries)
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        rows = list(workers.map(lambda name: row(pool, chosen[name], name), chosen))
    # a small corpus has fewer widths than buckets were asked for
    return [
        row
        for row, options in zip(rows, chosen.values(), strict=True)
        if row["buckets"] == (options.buckets or row["buckets"])
    ]


def row(pool: Pool, options: PlanOptions, name: str) -> dict:
    """One strategy's row."""
    scheme = settle(pool, options)
    measures = [measure(scheme.table(epoch), scheme, epoch) for epoch in range(options.epochs)]
    return {
        "name": name,
        "buckets": len(scheme.bounds) if scheme.curve else None,
        "epochs": options.epochs,
        "steps": measures[0].steps,
        "certificate": certificate(measures, scheme),
    }
