"""The command line of `dflash-prep`: options and printing; each command's work is in the module of its name.

Commands import what they need when they run, so that `--help` answers at once.
"""

import functools
import math
import sys
from itertools import pairwise
from pathlib import Path

import click

from dflash_prep.errors import UserError

DEMO = "data/demo.jsonl.zst"
STORE = Path("data/tokens")
MOST = 2**31  # tokens or anchors: their sums then fit a plan's uint32 columns


def one_line_errors(command):
    """Print a fault of the input as one line and exit with 1."""

    @functools.wraps(command)
    def wrapped(*args, **kwargs):
        try:
            check_names(kwargs)
            return command(*args, **kwargs)
        except UserError as fault:
            message = str(fault)
        except BrokenPipeError:  # whoever read the output has enough of it: click ends quietly
            raise
        except OSError as fault:  # a path that may not be looked at, or cannot be one; a full disk
            reason = fault.strerror or str(fault)
            message = f"{fault.filename}: {reason}; check the path and its permissions" if fault.filename else reason
        click.echo(f"error: {' '.join(message.split())}", err=True)
        sys.exit(1)

    return wrapped


def check_names(arguments: dict[str, object]) -> None:
    """Refuse names that are not UTF-8 before any work is done: they could be neither stored nor printed."""
    from dflash_prep.files import check_utf8

    for value in arguments.values():
        for name in value if isinstance(value, tuple) else (value,):
            if isinstance(name, str | Path):
                check_utf8(str(name))


class FiniteRange(click.FloatRange):
    """A range of numbers without nan and infinity, which no limit of FloatRange keeps out."""

    def convert(self, value, param, ctx):
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class AutoRange(click.IntRange):
    """A range of whole numbers, or `auto`, which becomes None."""

    def convert(self, value, param, ctx):
        return None if value == "auto" else super().convert(value, param, ctx)


class Bounds(click.ParamType):
    """Rising upper bounds, separated by commas."""

    name = "bounds"

    def convert(self, value, param, ctx):
        bounds = tuple(click.IntRange(1, MOST).convert(part, param, ctx) for part in value.split(","))
        if any(high <= low for low, high in pairwise(bounds)):
            self.fail(f"{value} is not ascending; give rising upper bounds.", param, ctx)
        return bounds


def single(stores: tuple[Path, ...]) -> Path | None:
    """The one store that is named, if any."""
    if len(stores) > 1:
        raise UserError("several stores are not supported yet; give --data once")
    return stores[0] if stores else None


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="dflash-prep")
def main() -> None:
    """Prepare the data of DFlash drafters: tokenize once, plan every batch of every epoch, prove the plan."""


@main.command()
@click.argument("inputs", nargs=-1, metavar="[INPUT]...")
@click.option("--tokenizer", metavar="DIR|ID", help="Hugging Face directory or hub id.  [default: SmolLM2-135M]")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=STORE, help="The store.")
@click.option("--max-length", type=click.IntRange(min=2), default=8192, help="Longer samples are rejected (tokens).")
@click.option("--max-reject-share", type=FiniteRange(0, 1), default=0.05, help="More rejects than this: exit 1.")
@one_line_errors
def tokenize(inputs: tuple[str, ...], tokenizer: str | None, output: Path, max_length: int, max_reject_share: float):
    """Tokenize chat JSONL (INPUT: .jsonl, .jsonl.gz, .jsonl.zst; the shipped sample by default) into a token store."""
    from dflash_prep import console
    from dflash_prep.tokenize import Options
    from dflash_prep.tokenize import tokenize as run
    from dflash_prep.tokenizer import load_tokenizer

    options = Options(max_length, max_reject_share)
    loaded = load_tokenizer(tokenizer)
    with console.counter("records") as progress:
        manifest, existed = run(inputs or (DEMO,), loaded, output, options, progress)
    if existed:
        click.echo(f"{output} already holds this store")
    console.print_store(output, manifest)


@main.command("plan-epochs")
@click.option(
    "--data", type=click.Path(path_type=Path), multiple=True, default=[STORE], metavar="STORE", help="The store to plan."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("data/manifests"),
    metavar="PLAN",
    help="The plan.",
)
@click.option("--epochs", type=click.IntRange(min=1), default=6, help="How many epochs, each in an order of its own.")
@click.option(
    "--strategy",
    type=click.Choice(["bucketed", "packed", "shuffled", "sorted"]),
    default="bucketed",
    help="How samples share micro-batches: of like length, end to end, as drawn, or by length throughout.",
)
@click.option("--bucket-scope", type=click.Choice(["epoch", "step"]), default="epoch", help="Where bounds are cut.")
@click.option(
    "--buckets",
    type=AutoRange(1, MOST),
    default="auto",
    metavar="auto|K",
    help="How many buckets an epoch has (scope epoch); auto: as many as still save padding.",
)
@click.option(
    "--boundaries", type=Bounds(), metavar="770,1216,...", help="Inclusive upper bounds.  [default: the optimal ones]"
)
@click.option(
    "--token-budget",
    type=AutoRange(1, MOST),
    default="auto",
    metavar="auto|N",
    help="Most tokens a micro-batch computes, padding included; auto: 32,768, or less so that an epoch has at least 64 "
    "steps where the longest sample allows.",
)
@click.option("--anchor-density", type=FiniteRange(1e-6, 1), default=0.25, help="Share of eligible positions.")
@click.option("--max-anchors", type=click.IntRange(1, MOST), default=512, help="Most anchors a sample has.")
@click.option("--block-size", type=click.IntRange(2, 1024), default=16, help="Positions of a training block.")
@click.option("--anchor-budget", type=click.IntRange(1, MOST), help="Most anchors a micro-batch has.  [default: none]")
@click.option("--slots", type=click.IntRange(min=1, max=65535), default=8, help="Micro-batches a step.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Of every order and every anchor.")
@one_line_errors
def plan_epochs(data: tuple[Path, ...], output: Path, **options):
    """Write every batch of every epoch of a store as Parquet."""
    from dflash_prep import console
    from dflash_prep.plan import PlanOptions, write_plan
    from dflash_prep.store import Store

    manifest = write_plan(Store(single(data)), output, PlanOptions(**options))
    console.print_plan(output, manifest)


@main.command()
@click.argument("plan", type=click.Path(path_type=Path), default=Path("data/manifests"))
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="STORE",
    help="A moved store.  [default: as planned]",
)
@one_line_errors
def verify(plan: Path, data: tuple[Path, ...]):
    """Prove a plan against its store: each sample once an epoch, budgets, steps, totals and checksums.

    PLAN is data/manifests by default.
    """
    from dflash_prep.verify import verify as run

    for line in run(plan, single(data)):
        click.echo(line)
    click.echo(f"{plan} holds")
