"""`dflash-prep report`: a plan as one HTML page that needs nothing but itself, its charts drawn as SVG."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import BinaryIO

import jinja2
import numpy as np

from dflash_prep import charts
from dflash_prep.compare import compare
from dflash_prep.console import figure
from dflash_prep.cost import CostModel
from dflash_prep.diversity import MOST_EPOCHS, Company, company
from dflash_prep.errors import UserError
from dflash_prep.files import check_regular, resolved
from dflash_prep.manifest import BESIDE_SETTINGS, Plan, members
from dflash_prep.pool import Pool, from_lengths, from_stores
from dflash_prep.scheme import PlanOptions
from dflash_prep.shown import check_plan
from dflash_prep.verify import open_stores

GENERATOR = "dflash-prep report"  # what the page says it was made by: only such a page is ever replaced
MOST_LISTED = 24  # epochs or sources: longer lists end in how many more there are
OWN = "this plan"


@dataclass(frozen=True)
class Shapes:
    """What the epoch files hold, in the least that the charts need."""

    width: np.ndarray  # uint32 [micro-batches of all epochs]
    fill: np.ndarray  # float64, real tokens over the budget
    cost: np.ndarray  # float64, over the dearest micro-batch of the step
    drawn: np.ndarray  # uint32 [samples of an epoch]: the first epoch's samples
    company: list[Company]  # of the first few epochs


def write_report(plan_path: Path, data: tuple[Path, ...], output: Path) -> None:
    """Write the page `output` about a plan; `data` names its stores or its table of lengths, if they were moved.

    Raises UserError for a damaged plan, for data that is not the plan's, and for an output that cannot be written.
    """
    plan = Plan(plan_path)
    check_plan(plan)
    with new_page(check_output(output, plan_path)) as file:
        file.write(page(plan, *find_data(plan, data)).encode(errors="replace"))


def check_output(output: Path, plan_path: Path) -> Path:
    """Where the page goes; never into a plan, nor in the place of anything that is not a report."""
    place = resolved(output)
    if place.is_relative_to(resolved(plan_path)):
        raise UserError(f"{output}: lies in the plan, which never changes; choose another with -o")
    check_regular(place)
    if place.exists():
        with place.open("rb") as file:
            if GENERATOR.encode() not in file.read(400):
                raise UserError(f"{output}: is there already and is no report; remove it or choose another with -o")
    return place


@contextmanager
def new_page(output: Path) -> Iterator[BinaryIO]:
    """Yield a file beside `output` that becomes `output` when the block ends without an error, and is gone after one."""
    draft = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(output)
    except OSError as fault:
        raise UserError(f"{fault.filename or output}: {fault.strerror or fault}; check path and permissions") from None
    finally:
        with suppress(OSError):
            draft.unlink()


def find_data(plan: Plan, data: tuple[Path, ...]) -> tuple[Pool | None, str]:
    """What the plan was made from, or None and why it cannot be had. Data that the user named must be the plan's."""
    try:
        return read_data(plan, data), ""
    except (UserError, OSError) as fault:
        if data:
            raise
        return None, f"{fault} (what was moved can be named with --data)"


def read_data(plan: Plan, data: tuple[Path, ...]) -> Pool:
    """The samples of the plan's stores or table of lengths."""
    chance = plan["holdout"] > 0
    if not plan["lengths"]:
        return from_stores(open_stores(plan, data), chance)
    if len(data) > 1:
        raise UserError(f"{plan.path}: was made from one table of lengths, --data names {len(data)}; name that one")
    path = data[0] if data else Path(plan["lengths"]["path"])
    pool = from_lengths(path, chance)
    if pool.fingerprint != plan.data_fingerprint:
        raise UserError(f"{path}: not the lengths that {plan.path} was made from; plan again, or name them with --data")
    return pool


def read_shapes(plan: Plan) -> Shapes:
    """Read every epoch file once."""
    width, fill, cost, samples = [], [], [], []
    for epoch in range(len(plan["epochs"])):
        with plan.open_epoch(epoch) as file:
            table = file.read(["width", "tokens", "cost"] + ["samples"] * (epoch < MOST_EPOCHS))
        seconds = table["cost"].to_numpy().astype(np.float64).reshape(-1, plan["slots"])
        held = table["width"].to_numpy() > 0
        width.append(table["width"].to_numpy()[held])
        fill.append(table["tokens"].to_numpy()[held] / plan["token_budget"])
        cost.append((seconds / seconds.max(axis=1, keepdims=True)).reshape(-1)[held])
        if epoch < MOST_EPOCHS:
            samples.append(members(table))
    count = 1 + max(int(flat.max()) for flat, _ in samples)
    met = [company(flat, sizes, count) for flat, sizes in samples]
    return Shapes(np.concatenate(width), np.concatenate(fill), np.concatenate(cost), samples[0][0], met)


def page(plan: Plan, pool: Pool | None, missing: str) -> str:
    """The whole page; `missing` says why there is no pool."""
    shapes = read_shapes(plan)
    rows = side_by_side(plan, pool) if pool else []
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"count": "{:,}".format, "share": partial(figure, form=".2%"), "figure": figure}
    template = environment.from_string(files("dflash_prep").joinpath("report.html.jinja").read_text("utf-8"))
    return template.render(
        generator=GENERATOR,
        plan=plan.manifest,
        path=str(resolved(plan.path)),
        origins=plan.origins,
        certificate=plan["certificate"],
        strategy=strategy_name(plan),
        figures=figures(plan, shapes, pool, rows),
        strategies=[strategy_cells(row, rows, plan["calibrated"]) for row in rows],
        missing=missing,
        **words(plan),
    )


def figures(plan: Plan, shapes: Shapes, pool: Pool | None, rows: list[dict]) -> list[charts.Figure]:
    """Whatever can be drawn of the plan."""
    shown = [charts.lengths_figure(plan, pool.length[shapes.drawn]) if pool else charts.widths_figure(shapes.width)]
    if plan["curve"]:
        shown += [charts.buckets_figure(plan), charts.padding_figure(plan)]
    shown += [charts.fill_figure(shapes.fill), charts.cost_figure(shapes.cost)]
    shown.append(charts.overlap_figure(shapes.company, len(plan["epochs"])))
    if rows:
        shown.append(charts.strategies_figure({row["name"]: epoch_seconds(row) for row in rows}, OWN))
    return shown


def side_by_side(plan: Plan, pool: Pool) -> list[dict]:
    """The plan itself and then all strategies under its options, as `compare` states them."""
    own = {
        "name": OWN,
        "buckets": len(plan["boundaries"]) if plan["curve"] else None,
        "epochs": len(plan["epochs"]),
        "steps": plan["epochs"][0]["steps"],
        "certificate": plan["certificate"],
    }
    return [own, *compare(pool, planned_options(plan))]


def planned_options(plan: Plan) -> PlanOptions:
    """The plan's options but for its boundaries: it has a row of its own."""
    stated = {each.name: plan[each.name] for each in fields(PlanOptions) if each.name in plan.manifest}
    stated |= {"boundaries": None, "epochs": len(plan["epochs"])}
    return PlanOptions(**stated | {"weights": tuple(plan["weights"].items()), "cost": CostModel(**plan["cost"])})


def epoch_seconds(row: dict) -> float:
    """The mean time of an epoch."""
    return row["certificate"]["seconds"] / row["epochs"]


def strategy_cells(row: dict, rows: list[dict], timed: bool) -> dict[str, str]:
    """A row of the table of strategies."""
    certificate, seconds = row["certificate"], epoch_seconds(row)
    cells = {
        "strategy": row["name"],
        "buckets": str(row["buckets"] or "–"),
        "steps": f"{row['steps']:,}",
        "real tokens": f"{certificate['real_token_share']:.1%}",
        "stragglers": f"{certificate['straggler_share']:.2%}",
        "design effect": figure(certificate["design_effect"], ".2f"),
        "Jaccard": figure(certificate["jaccard"], ".2g"),
        "at random": figure(certificate["jaccard_random"], ".2g"),
        "time": f"{seconds / min(map(epoch_seconds, rows)):.3f}×",
    }
    return cells | ({"hours": f"{seconds / 3600:,.2f}"} if timed else {})


def words(plan: Plan) -> dict[str, object]:
    """What header, tiles and lists say."""
    certificate, first, parts = plan["certificate"], plan["epochs"][0], list(enumerate(plan["epochs"]))
    held = [("hold-out", plan["holdout_set"])] if plan["holdout_set"] else []
    least, most = certificate["fewest_copies"], certificate["most_copies"]
    return {
        "summary": f"{len(parts)} epoch{'s' * (len(parts) > 1)} of {first['steps']:,} steps; a step has {plan['slots']} "
        f"micro-batches of at most {plan['token_budget']:,} tokens, an epoch {first['samples']:,} samples of together "
        f"{first['tokens']:,} tokens.",
        "time": run_time(plan),
        "timed": plan["calibrated"],
        "copies": f"{least:,}" if least == most else f"{least:,} to {most:,}",
        "tiles": [
            (f"{plan.total_steps:,}", "optimizer steps"),
            (f"{certificate['real_token_share']:.1%}", "of computed tokens are real"),
            (f"{certificate['straggler_share']:.2%}", "of time waits for stragglers"),
            (figure(certificate["design_effect"], ".2f"), "design effect (full shuffle: 1)"),
            (figure(certificate["jaccard"], ".2g"), f"Jaccard (random: {figure(certificate['jaccard_random'], '.2g')})"),
            *([(run_time(plan), "expected for the run")] if plan["calibrated"] else []),
        ],
        "epochs": [epoch_cells(name, epoch) for name, epoch in parts[:MOST_LISTED] + held],
        "more_epochs": max(0, len(parts) - MOST_LISTED),
        "options": settings(plan) + listed_sources(plan),
    }


def run_time(plan: Plan) -> str:
    """How long the run takes, or how much work it is."""
    seconds = plan["certificate"]["seconds"]
    return f"{seconds / 3600:,.2f} hours" if plan["calibrated"] else f"{seconds:.4g} units"


def strategy_name(plan: Plan) -> str:
    """The strategy with its buckets."""
    if plan["strategy"] != "bucketed":
        return plan["strategy"]
    count = len(plan["boundaries"])
    return f"bucketed, {count} bucket{'s' * (count > 1)}" if plan["curve"] else "bucketed, each step cut anew"


def epoch_cells(name: int | str, epoch: dict) -> dict[str, str]:
    """A row of the table of epochs."""
    keys = "steps", "micro_batches", "samples", "tokens", "padded_tokens", "loss_tokens", "anchors"
    cells = {key.replace("_", " "): f"{epoch[key]:,}" for key in keys}
    return {"epoch": str(name)} | cells | {"real share": f"{epoch['tokens'] / epoch['padded_tokens']:.2%}"}


def settings(plan: Plan) -> list[tuple[str, str]]:
    """Every option as the plan states it."""
    return [(key.replace("_", " "), spell(value)) for key, value in plan.manifest.items() if key not in BESIDE_SETTINGS]


def listed_sources(plan: Plan) -> list[tuple[str, str]]:
    """The samples of each source, where there are several or one is weighted."""
    sources = list(plan["sources"].items()) if len(plan["sources"]) > 1 or plan["weights"] else []
    listed = []
    for name, each in sources[:MOST_LISTED]:
        counted = f"{each['samples']:,} samples × {each['weight']:g} = {each['per_epoch']:,} an epoch"
        listed.append((f"source {name or '(unnamed)'}", counted))
    if len(sources) > MOST_LISTED:
        listed.append(("more sources", f"{len(sources) - MOST_LISTED:,}, which plan.json lists"))
    return listed


def spell(value: object) -> str:
    """An option's value in words."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case dict():
            return ", ".join(f"{name} = {spell(part)}" for name, part in value.items()) or "none"
        case list():
            return ", ".join(map(spell, value)) or "none"
        case float():
            return f"{value:.6g}"
        case _:
            return str(value)
