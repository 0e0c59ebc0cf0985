"""The command lines of `dflash-train` and `dflash-eval`."""

from pathlib import Path

import click

from dflash_prep.cli import one_line_errors
from dflash_prep.errors import UserError

CONTEXT = {"help_option_names": ["-h", "--help"], "show_default": True}
DTYPE = click.Choice(["auto", "float32", "bfloat16"])


def choose_dtype(name: str):
    """Of matrix products: bfloat16 on GPUs and float32 on CPUs unless the user says otherwise."""
    import torch

    if name == "auto":
        name = "bfloat16" if torch.cuda.is_available() else "float32"
    return getattr(torch, name)


def parse_taps(text: str | None) -> tuple[int, ...] | None:
    """`1,9,17` as numbers."""
    try:
        return tuple(int(part) for part in text.split(",")) if text else None
    except ValueError:
        raise UserError(f"--taps {text}: not a list of layer numbers; write them like 1,9,17") from None


@click.command(context_settings=CONTEXT)
@click.option("--manifest-dir", type=click.Path(path_type=Path), default=Path("data/manifests"), metavar="PLAN")
@click.option("--data", type=click.Path(path_type=Path), metavar="STORE", help="The store, if it has moved.")
@click.option("--target", metavar="DIR|ID", help="Hugging Face directory or hub id.  [default: SmolLM2-135M]")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="RUN", help="[default: runs/<time>]")
@click.option("--draft-config", type=click.Path(path_type=Path), metavar="FILE", help="JSON: layers, heads and so on.")
@click.option("--taps", metavar="1,9,...", help="Target layers that feed the draft.  [default: spread evenly]")
@click.option("--mask-token-id", type=int, help="Token of masked slots.  [default: an unused special token]")
@click.option("--max-steps", type=click.IntRange(min=0), help="Stop early, with a checkpoint.")
@click.option("--save-every", type=click.IntRange(min=1), default=500, metavar="N", help="Steps between checkpoints.")
@click.option("--nproc-per-node", type=click.IntRange(min=1), metavar="N", help="Workers.  [default: one a GPU, else 1]")
@click.option("--resume", metavar="auto|DIR", help="Go on from a checkpoint; auto starts afresh where there is none.")
@click.option("--lr", type=click.FloatRange(min=0, min_open=True), default=6e-4, help="Peak learning rate.")
@click.option("--warmup", type=click.FloatRange(0, 1), default=0.04, help="Share of all steps.")
@click.option("--clip", type=click.FloatRange(min=0, min_open=True), default=1.0, help="Largest gradient norm.")
@click.option("--dtype", type=DTYPE, default="auto", help="Of matrix products; auto: bfloat16 on GPU, else float32.")
@one_line_errors
def train(taps: str | None, nproc_per_node: int | None, lr: float, warmup: float, clip: float, dtype: str, **options):
    """Train a DFlash draft on the batches of a plan."""
    from dflash_trainer.step import Recipe
    from dflash_trainer.train import TrainOptions, start

    recipe = Recipe(lr, warmup, clip, choose_dtype(dtype))
    run = start(TrainOptions(taps=parse_taps(taps), recipe=recipe, **options), nproc_per_node)
    click.echo(f"{run}: done")


@click.command(context_settings=CONTEXT)
@click.option("--draft", required=True, type=click.Path(path_type=Path), metavar="RUN|DIR", help="Run or draft.")
@click.option("--target", metavar="DIR|ID", help="Hugging Face directory or hub id.  [default: SmolLM2-135M]")
@click.option("--prompts", type=click.Path(path_type=Path), default=Path("data/eval.jsonl"), metavar="FILE")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256)
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N prompts.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32")
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the report there too.")
@one_line_errors
def evaluate(draft: Path, target: str | None, prompts: Path, json_file: Path | None, dtype: str, **options):
    """Measure a draft: acceptance length, speed against plain decoding, and equality of the output."""
    from dflash_prep.console import counter, print_evaluation
    from dflash_prep.files import write_json
    from dflash_trainer.evaluate import evaluate as run

    with counter("prompts") as progress:
        report = run(draft, target, prompts, dtype=choose_dtype(dtype), progress=progress, **options)
    print_evaluation(report)
    if json_file:
        try:
            write_json(json_file, report)
        except OSError as fault:
            raise UserError(f"{json_file}: cannot write the report: {fault.strerror}") from None
