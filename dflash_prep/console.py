"""What the commands print: counters while they run, tables when they are done."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from dflash_prep.harmless import in_line

if TYPE_CHECKING:  # the other commands need nothing of it
    from dflash_prep.regenerate import Tally
    from dflash_prep.tokenize import Status

CUT = {"truncated": "records cut to --max-length", "split": "records split", "pieces": "samples more by splitting"}
MOST_SOURCES = 12  # lines; the others are summed up
USUAL = 80  # columns where a terminal states none
WIDE = 120  # columns of what goes to a file or a pipe: no figure is cut


def output() -> Console:
    """Standard output, as wide as the terminal."""
    console = known_width()
    return console if console.is_terminal else Console(width=WIDE, emoji=False)


def known_width(**options: bool) -> Console:
    """A console that has some columns: COLUMNS=0 is what some environments state."""
    console = Console(emoji=False, **options)
    return console if console.width > 0 else Console(width=USUAL, emoji=False, **options)


def harmless(text: object) -> str:
    """A text from anywhere as a cell or a title: neither markup nor anything that a terminal obeys."""
    return escape(in_line(text))


@contextmanager
def counter(unit: str) -> Iterator[Callable[[int], None]]:
    """A running count on standard error, for work whose total is unknown; silent where that is no terminal."""
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
    console = known_width(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(unit, total=None)
        yield lambda count: progress.advance(task, count)


@contextmanager
def tokenizing() -> Iterator[Callable[["Status"], None]]:
    """Records, tokens a second and the time left on standard error; silent where that is no terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    console = known_width(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task, begin, first = progress.add_task("reading", total=None), time.monotonic(), None

        def show(status: "Status") -> None:
            nonlocal first
            first = status if first is None else first  # of a run that is taken up: what was there before is not its speed
            rate = (status.tokens - first.tokens) / max(time.monotonic() - begin, 1e-9)
            text = f"{status.records:,} records, {rate:,.0f} tokens/s"
            progress.update(task, completed=status.read, total=status.total, description=text)

        yield show


@contextmanager
def regenerating() -> Iterator[Callable[["Tally"], None]]:
    """Records, failures, tokens a second and the time left on standard error; silent where that is no terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = known_width(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=None)

        def show(tally: "Tally") -> None:
            rate = tally.tokens / max(tally.seconds, 1e-9)
            text = f"{tally.failed:,} failed, {rate:,.0f} tokens/s, records"
            progress.update(task, completed=tally.before + tally.done, total=tally.total, description=text)

        yield show


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A sign of life on standard error, silent where that is no terminal."""
    console = known_width(stderr=True)
    with console.status(what) if console.is_terminal else nullcontext():
        yield


def print_store(path: Path, manifest: dict) -> None:
    """A store's counts, each reason for a reject included."""
    counts = manifest["counts"]
    table = Table(title=harmless(path), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name in ("records", "samples", "tokens", "loss_tokens", "longest"):
        table.add_row(name.replace("_", " "), f"{counts[name]:,}")
    for reason, count in counts["rejected"].items():
        table.add_row(f"rejected: {harmless(reason)}", f"{count:,}")
    for form, files in manifest.get("formats", {}).items():
        table.add_row(f"files of format: {harmless(form)}", f"{files:,}")
    for name, what in CUT.items():
        if counts.get(name):
            table.add_row(what, f"{counts[name]:,}")
    if manifest.get("special_texts"):
        table.add_row("records that spell a special token", f"{manifest['special_texts']:,}")
    if manifest.get("other_files"):
        table.add_row("other files, passed over", f"{manifest['other_files']:,}")
    if (manifest.get("options") or {}).get("limit") == counts["records"]:
        table.add_row("stopped at --limit", f"{counts['records']:,}")
    output().print(table)
    print_lost(manifest.get("lost_files", []))


def print_answers(path: Path, report: dict) -> None:
    """What a regenerated corpus came to, each reason for a failure included."""
    table = Table(title=harmless(path), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("model", harmless(report["model"]))
    rows = {"records": report["records"]} | report["counts"]
    rows |= {f"files of format: {form}": files for form, files in report["formats"].items()}
    if report["other_files"]:
        rows["other files, passed over"] = report["other_files"]
    if report["options"]["limit"] == report["records"]:
        rows["stopped at --limit"] = report["records"]
    for name, count in rows.items():
        table.add_row(harmless(name), f"{count:,}")
    output().print(table)
    print_lost(report["lost_files"])


def print_lost(files: list[str]) -> None:
    """A warning for each file that could not be read to its end."""
    for file in files:
        known_width(stderr=True).print(
            f"warning: lost: {in_line(file)}", style="bold red", markup=False, highlight=False, soft_wrap=True
        )


def print_plan(path: Path | None, manifest: dict) -> None:
    """A plan's epochs, a row each, and what its options came to; `path` is None for one that is not written.

    With a measured cost its hours, too.
    """
    title = f"{harmless(path or 'not written')}: {manifest['strategy']}, {manifest['slots']} slots"
    table = Table(title=title, title_justify="left")
    headings = "epoch", "steps", "micro-batches", "samples", "real tokens", "padded tokens", "real share", "anchors"
    for heading in headings:
        table.add_column(heading, justify="right")
    held = [manifest["holdout_set"]] if manifest["holdout_set"] else []
    for name, epoch in [*enumerate(manifest["epochs"]), *(("hold-out", part) for part in held)]:
        cells = (epoch[key] for key in ("steps", "micro_batches", "samples", "tokens", "padded_tokens"))
        share = f"{epoch['tokens'] / epoch['padded_tokens']:.1%}"
        table.add_row(str(name), *(f"{cell:,}" for cell in cells), share, f"{epoch['anchors']:,}")
    output().print(table)
    lines = [
        f"token budget {manifest['token_budget']:,} a micro-batch; {describe_buckets(manifest)}",
        describe(manifest["certificate"]),
    ]
    if len(manifest["sources"]) > 1 or manifest["weights"]:
        lines += describe_sources(manifest["sources"])
    if manifest["calibrated"]:
        lines.append(
            f"{manifest['certificate']['seconds'] / 3600:,.2f} hours on {manifest['slots']} workers like the calibrated one"
        )
    for line in lines:
        output().print(in_line(line), soft_wrap=True, highlight=False, markup=False)


def describe_sources(sources: dict[str, dict]) -> list[str]:
    """A line a source, or one each for the largest and the sum of the others."""
    many = len(sources) > MOST_SOURCES + 1
    ranked = sorted(sources, key=lambda name: -sources[name]["per_epoch"]) if many else list(sources)
    shown = ranked[:MOST_SOURCES] if many else ranked
    lines = []
    for name in shown:
        samples, weight, drawn = (sources[name][key] for key in ("samples", "weight", "per_epoch"))
        lines.append(f"source {name or '(unnamed)'}: {samples:,} x {weight:g} = {drawn:,} an epoch")
    if others := [sources[name] for name in ranked[len(shown) :]]:
        samples, drawn = (sum(source[key] for source in others) for key in ("samples", "per_epoch"))
        lines.append(f"{len(others):,} other sources: {samples:,} samples, {drawn:,} an epoch")
    return lines


def describe(certificate: dict) -> str:
    """The certificate's chief figures in one line."""
    parts = [
        f"real tokens {certificate['real_token_share']:.2%}",
        f"design effect {figure(certificate['design_effect'], '.2f')}",
        f"straggler share {certificate['straggler_share']:.2%}",
        f"time above the optimum {certificate['gap_to_optimum']:.2%}",
        f"Jaccard {figure(certificate['jaccard'], '.2g')} (random {figure(certificate['jaccard_random'], '.2g')})",
        f"step correlation {figure(certificate['step_correlation'], '.2f')}",
    ]
    return "; ".join(parts)


def figure(value: float | None, form: str) -> str:
    """A figure that may be undefined."""
    return "undefined" if value is None else format(value, form)


def describe_buckets(manifest: dict) -> str:
    """The boundaries and how good they are: the curve of more and fewer buckets, and the distance from the optimum."""
    if not manifest.get("curve"):
        return f"boundaries {manifest['boundaries'] or 'cut by step'}"
    curve, chosen, bounds = manifest["curve"]["seconds"], manifest["curve"]["chosen"], manifest["boundaries"]
    floor = min(curve)
    shown = [k for k in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64) if k <= len(curve)]
    points = ", ".join(f"{k}: {curve[k - 1] / floor - 1:.1%}" for k in shown)
    gap = chosen / manifest["curve"]["optimum"] - 1
    return (
        f"{len(bounds)} buckets up to {', '.join(map(str, bounds))}, {abs(gap):.2%} from the optimum of as many and "
        f"{chosen / floor - 1:.1%} above the best number's time (buckets: time above it: {points})"
    )


def print_comparison(rows: list[dict], calibrated: bool) -> None:
    """Strategies side by side, a row each; times are of one epoch."""
    table = Table(title="one epoch, by strategy", title_justify="left")
    headings = ["strategy", "buckets", "steps", "real tokens", "stragglers", "design effect", "Jaccard", "at random", "time"]
    for number, heading in enumerate([*headings, "hours"] if calibrated else headings):
        table.add_column(heading, justify="right" if number else "left")
    best = min(row["certificate"]["seconds"] / row["epochs"] for row in rows)
    for row in rows:
        certificate = row["certificate"]
        seconds = certificate["seconds"] / row["epochs"]
        cells = [
            row["name"],
            str(row["buckets"] or "-"),
            f"{row['steps']:,}",
            f"{certificate['real_token_share']:.1%}",
            f"{certificate['straggler_share']:.2%}",
            figure(certificate["design_effect"], ".2f"),
            figure(certificate["jaccard"], ".1e"),
            figure(certificate["jaccard_random"], ".1e"),
            f"{seconds / best:.3f}x",
        ]
        table.add_row(*cells, *([f"{seconds / 3600:,.2f}"] if calibrated else []))
    output().print(table)


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
