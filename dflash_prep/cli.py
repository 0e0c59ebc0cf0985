"""The command line of `dflash-prep`: options and printing; each command's work is in the module of its name.

Commands import what they need when they run, so that `--help` answers at once.
"""

from pathlib import Path

import click

from dflash_prep.command_line import (
    MOST,
    Arguments,
    AutoRange,
    Bounds,
    Columns,
    Filled,
    FiniteRange,
    Place,
    Weight,
    one_line_errors,
)
from dflash_prep.errors import UserError
from dflash_prep.harmless import in_line

DEMO = "data/demo.jsonl.zst"
STORE, PLAN = Path("data/tokens"), Path("data/manifests")
ANSWERED = Path("data/regenerated.jsonl.zst")
PATH = click.Path(path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="dflash-prep")
def main() -> None:
    """Prepare the data of DFlash drafters: tokenize once, plan every batch of every epoch, prove the plan."""


@main.command()
@click.argument("inputs", nargs=-1, metavar="[INPUT]...")
@click.option(
    "--tokenizer", type=Filled(), metavar="DIR|ID", help="Hugging Face directory or hub id.  [default: SmolLM2-135M]"
)
@click.option("-o", "--output", type=PATH, default=STORE, help="The store.")
@click.option(
    "--chat-template", metavar="FILE|NAME", help="A template's file, or one of several by name.  [default: the tokenizer's]"
)
@click.option(
    "--template-kwargs",
    type=Arguments(),
    default={},
    metavar="JSON",
    help="The template's arguments, such as '{\"enable_thinking\": false}'.  [default: none]",
)
@click.option(
    "--format",
    type=click.Choice(["messages", "sharegpt", "instruction", "prompt", "text", "tokens"]),
    help="What every file holds.  [default: detected file by file]",
)
@click.option(
    "--columns",
    type=Columns(),
    default={},
    metavar="OURS=THEIRS,...",
    help="Such as messages=dialog.  [default: ours]",
)
@click.option(
    "--loss",
    type=click.Choice(["assistant", "last-assistant", "all"]),
    default="assistant",
    help="Which tokens of a conversation carry loss.",
)
@click.option("--max-length", type=click.IntRange(min=2), default=8192, help="Longer samples are rejected (tokens).")
@click.option("--min-loss-tokens", type=click.IntRange(min=1), default=1, help="Samples with fewer are rejected.")
@click.option(
    "--too-long",
    type=click.Choice(["drop", "truncate", "split"]),
    default="drop",
    help="Samples beyond --max-length are rejected, or cut on the right; split: plain text becomes several samples.",
)
@click.option(
    "--special-text",
    type=click.Choice(["keep", "plain", "reject"]),
    default="keep",
    help="Text that spells a special token becomes it, as at serving; or stays text; or its record is rejected.",
)
@click.option("--keep-duplicates", is_flag=True, help="Keep samples that equal an earlier one.  [default: no]")
@click.option(
    "--near-dedup",
    type=FiniteRange(0.1, 1),
    is_flag=False,
    flag_value=0.8,
    metavar="SHARE",
    help="Of samples that share so much of what they say keep the first; 0.8 where no share is given.  [default: off]",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Read the first N records only.  [default: all]")
@click.option(
    "--shuffle-input",
    type=click.IntRange(0, 2**63 - 1),
    is_flag=False,
    flag_value=0,
    metavar="SEED",
    help="Take the records in random order, so that --limit takes any; seed 0 where none is given.  [default: off]",
)
@click.option("--max-reject-share", type=FiniteRange(0, 1), default=0.05, help="More rejects than this: exit 1.")
@click.option("--workers", type=click.IntRange(1, 1024), metavar="N", help="Processes.  [default: one a core]")
@one_line_errors
def tokenize(inputs, tokenizer: str | None, output: Path, chat_template: str | None, workers: int | None, **options):
    """Tokenize a corpus into a token store.

    INPUT is a file (.jsonl or .json, also .gz or .zst; .parquet), a directory, a pattern or - for standard input; the
    shipped sample by default. A run that was stopped goes on after its last finished shard when it is started again.
    """
    from dflash_prep import console
    from dflash_prep.sample_maker import Options
    from dflash_prep.tokenize import tokenize as run
    from dflash_prep.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer, chat_template)
    with console.tokenizing() as progress:
        made = run(inputs or (DEMO,), loaded, output, Options(**options), progress, workers)
    if made.existed:
        click.echo(f"{in_line(output)} already holds this store")
    if made.resumed:
        click.echo(f"went on from record {made.resumed:,}, where an earlier run had stopped")
    console.print_store(output, made.manifest)


@main.command()
@click.argument("inputs", nargs=-1, metavar="[INPUT]...")
@click.option("--endpoint", default="http://127.0.0.1:8000/v1", metavar="URL", help="An OpenAI-compatible server.")
@click.option("--model", metavar="NAME", help="The target, as the server names it.  [default: the only one it serves]")
@click.option("-o", "--output", type=PATH, default=ANSWERED, help="The new corpus: .jsonl, .jsonl.gz or .jsonl.zst.")
@click.option(
    "--format",
    type=click.Choice(["messages", "sharegpt", "instruction", "prompt"]),
    help="What every file holds.  [default: detected file by file]",
)
@click.option(
    "--columns",
    type=Columns(),
    default={},
    show_default=False,
    metavar="OURS=THEIRS,...",
    help="Such as messages=dialog.  [default: ours]",
)
@click.option("--temperature", type=FiniteRange(0, 2), default=0.0, help="Of sampling; 0 takes the likeliest token.")
@click.option("--max-tokens", type=click.IntRange(1, MOST), default=4096, help="Most tokens of an answer, then it is cut.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Of sampling, where the temperature is not 0.")
@click.option(
    "--template-kwargs",
    type=Arguments(),
    default={},
    show_default=False,
    metavar="JSON",
    help="The chat template's arguments, as 'tokenize' has them.  [default: none]",
)
@click.option("--api-key", envvar="OPENAI_API_KEY", metavar="KEY", help="The server's key.  [default: $OPENAI_API_KEY]")
@click.option("--concurrency", type=click.IntRange(1, 4096), default=32, metavar="N", help="Most requests in flight.")
@click.option("--timeout", type=FiniteRange(0.001, 86_400), default=600.0, help="Seconds for an answer; then asked again.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Read the first N records only.  [default: all]")
@click.option("--max-reject-share", type=FiniteRange(0, 1), default=0.05, help="More failures than this: exit 1.")
@one_line_errors
def regenerate(inputs, output, endpoint, model, api_key, concurrency, timeout, max_reject_share, **options):
    """Replace every answer of a chat corpus by the target's own, asked of a server such as vLLM, SGLang or llama-server.

    INPUT is as for 'tokenize', which takes the output; the shipped sample by default. Run the same again after a stop: only
    what is missing is asked for.

    Each answer is asked for with the new ones before it. A missing last answer is added. Assistant turns in a row become
    one; those before any question are left out. An assistant turn that a tool's result follows stays as recorded. A
    conversation ends early where the target calls a tool itself or its answer is cut at --max-tokens: the cut answer is
    kept (finish_reason "length"). All of this is counted.
    """
    from dflash_prep import console
    from dflash_prep.endpoint import Endpoint
    from dflash_prep.regenerate import Options
    from dflash_prep.regenerate import regenerate as run

    server = Endpoint(endpoint, api_key, timeout, concurrency)
    with console.regenerating() as progress:
        report = run(inputs or (DEMO,), output, server, model, Options(**options), concurrency, max_reject_share, progress)
    if report is None:
        click.echo(f"{in_line(output)} is there already: the same command had finished it")
    else:
        console.print_answers(output, report)


@main.command("plan-epochs")
@click.option(
    "--data", type=PATH, multiple=True, metavar="STORE", help=f"A store to plan; may be repeated.  [default: {STORE}]"
)
@click.option("--lengths", type=PATH, metavar="FILE", help="Plan from a Parquet file of lengths.  [default: from the store]")
@click.option("-o", "--output", type=PATH, default=PLAN, metavar="PLAN", help="The plan.")
@click.option("--epochs", type=click.IntRange(1, 10_000), default=6, help="How many epochs, each in an order of its own.")
@click.option(
    "--strategy",
    type=click.Choice(["bucketed", "packed", "shuffled", "sorted"]),
    default="bucketed",
    help="How samples share micro-batches: of like length, end to end, as drawn, or by length throughout.",
)
@click.option(
    "--bucket-scope",
    type=click.Choice(["epoch", "step"]),
    default="epoch",
    help="Bounds for the whole run, or each step's samples cut anew.",
)
@click.option(
    "--buckets",
    type=AutoRange(1, 65_535),
    default="auto",
    metavar="auto|K",
    help="How many buckets (scope epoch); auto: the fewest within 2 % of the best number's time.",
)
@click.option(
    "--boundaries", type=Bounds(), metavar="770,1216,...", help="Inclusive upper bounds.  [default: the optimal ones]"
)
@click.option("--fixed-shapes", is_flag=True, help="Pad rows to their bucket's bound, packed: to the budget.  [default: no]")
@click.option("--align", type=click.IntRange(1, 4096), default=1, metavar="N", help="Round widths up to a multiple of N.")
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
@click.option(
    "--weight",
    "weights",
    type=Weight(),
    multiple=True,
    metavar="SOURCE=F",
    help="Repeat or thin a source by a factor, each epoch with a fresh part; may be repeated.  [default: 1]",
)
@click.option("--holdout", type=FiniteRange(0, 0.9), default=0.0, help="Share held out for validation, by content.")
@click.option("--cost", type=PATH, metavar="FILE", help="Cost model of 'dflash-train --calibrate'.  [default: built in]")
@click.option("--dry-run", is_flag=True, help="Plan and print, but write nothing.  [default: no]")
@click.option("--compare", is_flag=True, help="Print all strategies side by side, write nothing.  [default: no]")
@one_line_errors
def plan_epochs(data, lengths, output, cost, dry_run, compare, **options):
    """Write every batch of every epoch of a store as Parquet."""
    from dflash_prep import console
    from dflash_prep.cost import CostModel, read_cost
    from dflash_prep.plan import check_place, write_plan
    from dflash_prep.plan import dry_run as run_dry
    from dflash_prep.pool import from_lengths, from_stores
    from dflash_prep.scheme import PlanOptions, settle
    from dflash_prep.stores import Stores

    if lengths and data:
        raise UserError("--lengths and --data are both given; leave one of them out")
    model = read_cost(cost, options["block_size"]) if cost else CostModel()
    options = PlanOptions(**options, cost=model, calibrated=cost is not None)
    writes = not (dry_run or compare)
    if writes:
        check_place(output)
    pool = (
        from_lengths(lengths, options.holdout > 0) if lengths else from_stores(Stores(data or (STORE,)), options.holdout > 0)
    )
    if compare:
        from dflash_prep.compare import compare as run_compare

        console.print_comparison(run_compare(pool, options), options.calibrated)
        return
    scheme = settle(pool, options)
    manifest = write_plan(scheme, output) if writes else run_dry(scheme)
    console.print_plan(output if writes else None, manifest)


@main.command()
@click.argument("plan", type=PATH, default=PLAN)
@click.option(
    "--data",
    type=PATH,
    multiple=True,
    metavar="STORE",
    help="A moved store or table of lengths; may be repeated.  [default: as planned]",
)
@one_line_errors
def verify(plan: Path, data: tuple[Path, ...]):
    """Prove a plan against its store: each sample once an epoch, budgets, steps, totals and checksums.

    PLAN is data/manifests by default.
    """
    from dflash_prep.verify import verify as run

    for line in run(plan, data):
        click.echo(in_line(line))
    click.echo(f"{in_line(plan)} holds")


@main.command()
@click.argument("plan", type=PATH, default=PLAN)
@click.option(
    "--data", type=PATH, multiple=True, metavar="STORE", help="A moved store; may be repeated.  [default: as planned]"
)
@click.option("-o", "--output", type=PATH, default=Path("report.html"), metavar="FILE", help="The page.")
@one_line_errors
def report(plan: Path, data: tuple[Path, ...], output: Path):
    """Write one HTML page about a plan: its charts, its certificate, and the strategies side by side.

    PLAN is data/manifests by default.
    """
    from dflash_prep import console
    from dflash_prep.report import write_report

    with console.waiting("planning every strategy once, to compare them"):
        write_report(plan, data, output)
    click.echo(f"{in_line(output)} written")


@main.command()
@click.argument("path", type=PATH, default=STORE)
@click.option(
    "--sample",
    "numbers",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="N",
    help="Show this sample's text with the loss on it; may be repeated.  [default: an overview]",
)
@click.option(
    "--key", type=Filled(), metavar="HEX", help="Show the sample of this key, or of one that begins so.  [default: none]"
)
@click.option(
    "--find", type=Place(), metavar="SOURCE:LINE", help="Show what was made of this record of the corpus.  [default: none]"
)
@click.option("--random", type=click.IntRange(min=1), metavar="N", help="Show so many random samples.  [default: none]")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Of the random samples.")
@click.option("--tokens", is_flag=True, help="Show samples token by token, with number, id and loss.  [default: as text]")
@click.option(
    "--tokenizer",
    type=Filled(),
    metavar="DIR|ID",
    help="Where the store's tokenizer is now.  [default: as the store states]",
)
@click.option(
    "--step",
    type=click.IntRange(min=0),
    metavar="S",
    help="Show a plan's step: what each slot holds; S counts from 0 over the whole run.  [default: none]",
)
@click.option(
    "--epoch", type=click.IntRange(min=0), metavar="E", help="Count S from this epoch's start.  [default: the run's]"
)
@click.option(
    "--data",
    type=PATH,
    multiple=True,
    metavar="STORE",
    help="A plan's moved store or table of lengths; may be repeated.  [default: as planned]",
)
@one_line_errors
def inspect(path: Path, step: int | None, epoch: int | None, data: tuple[Path, ...], **choice):
    """Show a store, a plan, or samples decoded back to text with the loss marked.

    PATH is data/tokens by default.
    """
    from dflash_prep.inspect import inspect as run
    from dflash_prep.lookup import Choice

    run(path, Choice(**choice), step, epoch, data)
