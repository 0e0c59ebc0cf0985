"""From a scheme to a plan on disk: every epoch is made by itself, several at a time, and written at once or not at all."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from dflash_prep.certificate import Measures, certificate, measure, rehearsal
from dflash_prep.errors import UserError
from dflash_prep.files import is_taken, new_directory, resolved, write_json
from dflash_prep.manifest import FORMAT, VERSION, Plan, epoch_summary, plan_fingerprint, write_epoch
from dflash_prep.scheme import Scheme

HOLDOUT_FILE = "holdout.parquet"


def write_plan(scheme: Scheme, output: Path) -> dict:
    """Plan every epoch and write the plan `output`, in the place of an older plan; returns its manifest."""
    check_place(output)
    with new_directory(output) as directory:
        summaries, measures = [], []
        for summary, measured in made_epochs(scheme, directory):
            summaries.append(summary)
            measures.append(measured)
        held = write_table(scheme.holdout_table(), scheme, directory / HOLDOUT_FILE) if len(scheme.mixture.held) else None
        manifest = state(scheme, summaries, held, measures)
        write_json(directory / "plan.json", manifest)
    return manifest


def dry_run(scheme: Scheme) -> dict:
    """The manifest of a plan that is not written: its epochs state no file."""
    made = list(made_epochs(scheme, None))
    return state(scheme, [summary for summary, _ in made], None, [measured for _, measured in made])


def check_place(output: Path) -> None:
    """Only a plan is ever replaced, and none is put into a plan, with which it would be replaced."""
    for parent in resolved(output).parents:
        if (parent / "plan.json").is_file():
            raise UserError(f"{output}: lies inside {parent}, which is a plan; choose another with -o")
    if is_taken(output):
        if not (output / "plan.json").is_file():
            raise UserError(f"{output}: is there already and is no plan; remove it or choose another with -o")
        Plan(output)


def made_epochs(scheme: Scheme, directory: Path | None) -> Iterator[tuple[dict, Measures]]:
    """Each epoch's summary and measures in order; the epochs are made on all cores, and written if there is a directory."""

    def make(epoch: int) -> tuple[dict, Measures]:
        table = scheme.table(epoch)
        path = directory and directory / f"epoch-{epoch:03d}.parquet"
        return write_table(table, scheme, path), measure(table, scheme, epoch)

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        yield from workers.map(make, range(scheme.options.epochs))


def write_table(table: pa.Table, scheme: Scheme, path: Path | None) -> dict:
    """Write a table, if there is a place for it; returns what `plan.json` says of it."""
    if path:
        write_epoch(table, path, scheme.options.slots)
    return epoch_summary(table, path)


def state(scheme: Scheme, summaries: list[dict], held: dict | None, measures: list[Measures]) -> dict:
    """The plan's manifest."""
    settings = scheme.settings()
    tables = [*summaries, held] if held else summaries
    return {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": plan_fingerprint(settings, scheme.pool.fingerprint, tables),
        **scheme.pool.origin,
        **settings,
        "sources": {
            share.source: {"samples": len(share.members), "weight": float(share.weight), "per_epoch": share.per_epoch}
            for share in scheme.mixture.shares
        },
        "calibrated": scheme.options.calibrated,
        "curve": scheme.curve.as_dict() if scheme.curve else None,
        "certificate": certificate(measures, scheme),
        "rehearse": rehearsal(measures),
        "epochs": summaries,
        "holdout_set": held,
    }
