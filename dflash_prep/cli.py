"""The command line of `dflash-prep`: options and printing; each command's work is in the module of its name.

Commands import what they need when they run, so that `--help` answers at once.
"""

import functools
import sys
from pathlib import Path

import click

from dflash_prep.errors import UserError

DEMO = "data/demo.jsonl.zst"


def one_line_errors(command):
    """Print a fault of the input as one line and exit with 1."""

    @functools.wraps(command)
    def wrapped(*args, **kwargs):
        try:
            return command(*args, **kwargs)
        except UserError as fault:
            message = str(fault)
        except OSError as fault:  # a path that may not be looked at, or cannot be one
            if not fault.filename:
                raise
            message = f"{fault.filename}: {fault.strerror}; check the path and its permissions"
        click.echo(f"error: {' '.join(message.split())}", err=True)
        sys.exit(1)

    return wrapped


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="dflash-prep")
def main() -> None:
    """Prepare the data of DFlash drafters: tokenize once, plan every batch of every epoch, prove the plan."""


@main.command()
@click.argument("inputs", nargs=-1, metavar="[INPUT]...")
@click.option("--tokenizer", metavar="DIR|ID", help="Hugging Face directory or hub id.  [default: SmolLM2-135M]")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("data/tokens"), help="The store.")
@click.option("--max-length", type=click.IntRange(min=2), default=8192, help="Longer samples are rejected (tokens).")
@click.option("--max-reject-share", type=click.FloatRange(0, 1), default=0.05, help="More rejects than this: exit 1.")
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
@click.option("--data", type=click.Path(path_type=Path), default=Path("data/tokens"), metavar="STORE")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("data/manifests"), metavar="PLAN")
@click.option("--epochs", type=click.IntRange(min=1), default=6)
@click.option("--strategy", type=click.Choice(["bucketed", "packed", "shuffled", "sorted"]), default="bucketed")
@click.option("--bucket-scope", type=click.Choice(["epoch", "step"]), default="epoch", help="Where bounds are cut.")
@click.option("--buckets", default="auto", metavar="auto|K", help="How many buckets an epoch has (scope epoch).")
@click.option("--boundaries", metavar="770,1216,...", help="Inclusive upper bounds.  [default: the optimal ones]")
@click.option("--token-budget", default="auto", metavar="auto|N", help="Most tokens a micro-batch computes.")
@click.option("--anchor-density", type=click.FloatRange(1e-6, 1), default=0.25, help="Share of eligible positions.")
@click.option("--max-anchors", type=click.IntRange(min=1), default=512, help="Most anchors a sample has.")
@click.option("--block-size", type=click.IntRange(min=2), default=16)
@click.option("--anchor-budget", type=click.IntRange(min=1), help="Most anchors a micro-batch has.  [default: none]")
@click.option("--slots", type=click.IntRange(min=1, max=65535), default=8, help="Micro-batches a step.")
@click.option("--seed", type=click.IntRange(min=0), default=0)
@one_line_errors
def plan_epochs(data: Path, output: Path, **options):
    """Write every batch of every epoch of a store as Parquet."""
    from dflash_prep import console
    from dflash_prep.plan import PlanOptions, write_plan
    from dflash_prep.store import Store

    manifest = write_plan(Store(data), output, PlanOptions.parse(**options))
    console.print_plan(output, manifest)


@main.command()
@click.argument("plan", type=click.Path(path_type=Path), default=Path("data/manifests"))
@click.option("--data", type=click.Path(path_type=Path), metavar="STORE", help="A moved store.  [default: as planned]")
@one_line_errors
def verify(plan: Path, data: Path | None):
    """Prove a plan against its store: each sample once an epoch, budgets, steps, totals and checksums."""
    from dflash_prep.verify import verify as run

    for line in run(plan, data):
        click.echo(line)
    click.echo(f"{plan} holds")
