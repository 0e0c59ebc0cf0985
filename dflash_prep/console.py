"""What the commands print: counters while they run, tables when they are done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

WIDE = 120  # columns of what goes to a file or a pipe: no figure is cut


def output() -> Console:
    """Standard output, as wide as the terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDE)


@contextmanager
def counter(unit: str) -> Iterator[Callable[[int], None]]:
    """A running count on standard error, for work whose total is unknown; silent where that is no terminal."""
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(unit, total=None)
        yield lambda count: progress.advance(task, count)


def print_store(path: Path, manifest: dict) -> None:
    """A store's counts, each reason for a reject included."""
    counts = manifest["counts"]
    table = Table(title=str(path), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name in ("records", "samples", "tokens", "loss_tokens", "longest"):
        table.add_row(name.replace("_", " "), f"{counts[name]:,}")
    for reason, count in counts["rejected"].items():
        table.add_row(f"rejected: {reason}", f"{count:,}")
    output().print(table)


def print_plan(path: Path, manifest: dict) -> None:
    """A plan's epochs, a row each, and what its options came to."""
    table = Table(title=f"{path}: {manifest['strategy']}, {manifest['slots']} slots", title_justify="left")
    for heading in (
        "epoch",
        "steps",
        "micro-batches",
        "samples",
        "real tokens",
        "padded tokens",
        "real share",
        "anchors",
    ):
        table.add_column(heading, justify="right")
    for number, epoch in enumerate(manifest["epochs"]):
        cells = (epoch[key] for key in ("steps", "micro_batches", "samples", "tokens", "padded_tokens"))
        share = f"{epoch['tokens'] / epoch['padded_tokens']:.1%}"
        table.add_row(str(number), *(f"{cell:,}" for cell in cells), share, f"{epoch['anchors']:,}")
    console = output()
    console.print(table)
    effect = manifest["certificate"]["design_effect"]
    console.print(
        f"token budget {manifest['token_budget']:,} a micro-batch; boundaries {manifest['boundaries'] or 'cut by step'}; "
        f"straggler share {manifest['certificate']['straggler_share']:.2%}; "
        f"design effect {'undefined' if effect is None else format(effect, '.2f')}",
        soft_wrap=True,
        highlight=False,
    )


def print_evaluation(report: dict) -> None:
    """What a draft achieved, a row a prompt and the whole below."""
    table = Table()
    for heading in ("prompt", "tokens", "acceptance length"):
        table.add_column(heading, justify="right")
    for number, prompt in enumerate(report["prompts"], start=1):
        table.add_row(str(number), f"{prompt['tokens']:,}", f"{prompt['acceptance_length']:.3f}")
    console = output()
    console.print(table)
    same = "equals the target's own" if report["lossless"] else "DIFFERS from the target's own"
    ties = f" ({report['ties']} ties of two best logits)" if report["ties"] else ""
    console.print(
        f"acceptance length {report['acceptance_length']:.3f}; {report['tokens_per_second']:.1f} tokens/s, plain decoding "
        f"{report['plain_tokens_per_second']:.1f} ({report['speedup']:.2f}x); output {same}{ties}",
        soft_wrap=True,
        highlight=False,
    )
