"""The command lines of `dflash-train` and `dflash-eval`."""

from pathlib import Path

import click
from click.core import ParameterSource

from dflash_prep.command_line import FiniteRange, one_line_errors

CONTEXT = {"help_option_names": ["-h", "--help"], "show_default": True}
PATH = click.Path(path_type=Path)
COMMANDLINE = ParameterSource.COMMANDLINE
DTYPE = click.Choice(["auto", "float32", "bfloat16"])


def choose_dtype(name: str):
    """Of matrix products: bfloat16 on GPUs and float32 on CPUs unless the user says otherwise."""
    import torch

    if name == "auto":
        name = "bfloat16" if torch.cuda.is_available() else "float32"
    return getattr(torch, name)


def given(_, __, text: str | None) -> str | None:
    """An option's text, which is wrong usage if it is empty: `--resume "$RUN"` with nothing in it."""
    if text is not None and not text.strip():
        raise click.BadParameter("is empty; give a value or leave the option out")
    return text


def parse_taps(_, __, text: str | None) -> tuple[int, ...] | None:
    """`1,9,17` as numbers."""
    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of layer numbers; write them like 1,9,17") from None


@click.command(context_settings=CONTEXT)
@click.option("--manifest-dir", type=PATH, default=Path("data/manifests"), metavar="PLAN")
@click.option("--data", type=PATH, multiple=True, metavar="STORE", help="A moved store; may be repeated.")
@click.option(
    "--target", callback=given, metavar="DIR|ID", help="Hugging Face directory or hub id.  [default: SmolLM2-135M]"
)
@click.option("-o", "--output", type=PATH, metavar="RUN", help="[default: runs/<time>]")
@click.option("--draft-config", type=PATH, metavar="FILE", help="JSON: layers, heads, layer_types and so on.")
@click.option("--taps", callback=parse_taps, metavar="1,9,...", help="Target layers to tap.  [default: spread evenly]")
@click.option("--mask-token-id", type=int, help="Token of masked slots.  [default: an unused special token]")
@click.option("--max-steps", type=click.IntRange(min=0), help="Stop early, with a checkpoint.")
@click.option("--save-every", type=click.IntRange(min=1), default=500, metavar="N", help="Steps between checkpoints.")
@click.option("--keep", type=click.IntRange(min=1), default=3, metavar="N", help="Newest checkpoints that are kept.")
@click.option(
    "--max-bad-steps",
    type=click.IntRange(min=1),
    default=5,
    metavar="N",
    help="Steps in a row without finite numbers after which the run stops.",
)
@click.option(
    "--eval-every", type=click.IntRange(min=1), metavar="N", help="Steps between validations.  [default: as --save-every]"
)
@click.option("--init-from", type=PATH, metavar="DRAFT", help="Start from this draft or run.  [default: random weights]")
@click.option(
    "--checkpoint-activations", is_flag=True, help="Recompute the draft's layers in the backward pass.  [default: no]"
)
@click.option("--compile", is_flag=True, help="Compile the layers with torch.compile: a slow first step.  [default: no]")
@click.option("--nproc-per-node", type=click.IntRange(min=1), metavar="N", help="Workers.  [default: one a GPU, else 1]")
@click.option("--resume", callback=given, metavar="auto|DIR", help="Go on from a checkpoint; auto: from the newest, if any.")
@click.option("--lr", type=FiniteRange(0, 1, min_open=True), default=6e-4, help="Peak learning rate.")
@click.option("--warmup", type=FiniteRange(0, 1), default=0.04, help="Share of all steps.")
@click.option("--clip", type=FiniteRange(min=0, min_open=True), default=1.0, help="Largest gradient norm.")
@click.option(
    "--loss",
    type=click.Choice(["ce", "kd", "mix"]),
    default="ce",
    help="Cross-entropy, divergence from the target's own distributions (all of its layers run), or half of each.",
)
@click.option("--dtype", type=DTYPE, default="auto", help="Of matrix products; auto: bfloat16 on GPU, else float32.")
@click.option("--target-dtype", type=DTYPE, default="auto", help="What the target runs in; auto: as --dtype.")
@click.option("--shard-target", is_flag=True, help="Spread the target's layers over the workers.  [default: no]")
@click.option(
    "--hidden-cache", type=PATH, metavar="DIR", help="Keep the target's features there and read them again.  [default: no]"
)
@click.option("--wandb", is_flag=True, help="Log to Weights & Biases too, if wandb is installed.  [default: no]")
@click.option(
    "--calibrate",
    type=PATH,
    metavar="COST.json",
    help="Time micro-batches and write a cost model instead.",
)
@click.option("--status", type=PATH, metavar="RUN", help="Say where a run is instead, from its files.")
@one_line_errors
def train(nproc_per_node, lr, warmup, clip, loss, dtype, target_dtype, calibrate, status, **options):
    """Train a DFlash draft on the batches of a plan."""
    if status:
        from dflash_trainer.status import status as lines_of

        refuse_others("--status", {"status"})
        for line in lines_of(status):
            click.echo(line)
        return
    if calibrate:
        named = {name: options[name] for name in ("target", "draft_config", "taps")}
        write_cost(calibrate, dtype=dtype, target_dtype=target_dtype, **named)
        return
    from dflash_trainer.step import Recipe
    from dflash_trainer.train import TrainOptions, start

    recipe = Recipe(lr, warmup, clip, choose_dtype(dtype), loss)
    start(TrainOptions(recipe=recipe, target_dtype=own_dtype(target_dtype, dtype), **options), nproc_per_node)


def own_dtype(target_dtype: str, dtype: str):
    """What the target runs in."""
    return choose_dtype(dtype if target_dtype == "auto" else target_dtype)


def write_cost(path: Path, *, dtype: str, target_dtype: str, **options) -> None:
    """Calibrate: no plan, no run."""
    from dflash_prep.console import counter
    from dflash_trainer.calibrate import calibrate, print_cost
    from dflash_trainer.json_report import check_place, write_report

    refuse_others("--calibrate", {"calibrate", "dtype", "target_dtype", *options})
    check_place(path, "--calibrate")
    with counter("micro-batches") as progress:
        own = own_dtype(target_dtype, dtype)
        cost = calibrate(**options, dtype=choose_dtype(dtype), target_dtype=own, progress=progress)
    write_report(path, "--calibrate", cost)
    print_cost(path, cost)


def refuse_others(instead: str, used: set[str]) -> None:
    """Wrong usage: options on the command line that what was asked for has no use for."""
    context = click.get_current_context()
    given = [option for option in context.command.params if context.get_parameter_source(option.name) == COMMANDLINE]
    others = [option.opts[-1] for option in given if option.name not in used]
    if others:
        raise click.UsageError(f"{instead} trains nothing; leave {', '.join(others)} out")


@click.command(context_settings=CONTEXT)
@click.option("--draft", required=True, type=PATH, metavar="RUN|DIR", help="Run or draft.")
@click.option(
    "--target", callback=given, metavar="DIR|ID", help="Hugging Face directory or hub id.  [default: SmolLM2-135M]"
)
@click.option("--prompts", type=PATH, default=Path("data/eval.jsonl"), metavar="FILE", help="JSONL: messages or turns.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, help="Longest answer to a turn.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N prompts.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", help="Of both models.")
@click.option("--json", "json_file", type=PATH, metavar="FILE", help="Write the report there too.")
@one_line_errors
def evaluate(draft: Path, target: str | None, prompts: Path, json_file: Path | None, dtype: str, **options):
    """Measure a draft: acceptance length, speed against plain decoding, and equality of the output."""
    from dflash_prep.console import counter, print_evaluation
    from dflash_trainer.evaluate import evaluate as run
    from dflash_trainer.json_report import check_place, write_report

    if json_file:
        check_place(json_file, "--json")
    with counter("prompts") as progress:
        report = run(draft, target, prompts, dtype=choose_dtype(dtype), progress=progress, **options)
    print_evaluation(report)
    if json_file:
        write_report(json_file, "--json", report)
