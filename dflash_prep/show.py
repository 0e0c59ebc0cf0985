"""Samples, histograms and steps on a terminal or in a pipe, with nothing of the data that a terminal would obey.

Loss is green, special tokens are reversed, what stands for a control character is underlined. Without colour loss stands
between ⟦ and ⟧. Whatever comes from a corpus is written as it is but for control characters: no markup, no wrapping.
"""

import re
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from dflash_prep.console import MOST_SOURCES, output, print_store
from dflash_prep.harmless import HIDDEN, escaped, in_line
from dflash_prep.lookup import Found
from dflash_prep.overview import Bin, Source, examples, length_bins, loss_bins, quantiles, sources
from dflash_prep.store import Store

OPEN, CLOSE = "⟦", "⟧"
LOSS, SPECIAL, ESCAPED, HEADING, FAINT = map(Style.parse, ("green", "reverse", "underline", "bold", "dim"))
PLAIN = Style.null()
EIGHTHS = " ▏▎▍▌▋▊▉█"
BAR = 40  # columns of the longest bar, where there is room


class Page:
    """Standard output, written in styled parts; `marks` tells whether loss has to be marked for lack of colour."""

    def __init__(self):
        self.console: Console = output()
        self.marks = self.console.color_system is None or self.console.no_color
        self.told = f", between {OPEN} and {CLOSE}" if self.marks else ", in green"
        self._hidden = re.compile(f"([{HIDDEN}{OPEN + CLOSE if self.marks else ''}])")

    def write(self, *parts: tuple[str, Style]) -> None:
        """Write texts as they are, each line styled by itself: pagers forget a style at a line's end."""
        segments = []
        for text, style in parts:
            for number, line in enumerate(text.split("\n")):
                segments += [Segment("\n")] * (number > 0) + [Segment(line, style)] * bool(line)
        self.console.print(Segments(segments), soft_wrap=True, end="")

    def line(self, text: str = "", style: Style = PLAIN) -> None:
        """Write one line of our own or of names, control characters escaped."""
        self.write((in_line(text) + "\n", style))

    def title(self, text: str) -> None:
        """Write a heading after an empty line."""
        self.line()
        self.line(text, HEADING)

    def shown(self, text: str, style: Style) -> list[tuple[str, Style]]:
        """A text of several lines, what is escaped in it styled apart."""
        parts = self._hidden.split(text)
        return [(escaped(part), style + ESCAPED) if odd % 2 else (part, style) for odd, part in enumerate(parts) if part]

    def bar(self, share: float) -> str:
        """A bar of a share of the longest one; none is empty but for 0."""
        width = max(8, min(BAR, self.console.width - 30))
        eighths = max(round(share * width * 8), share > 0)
        if not str(self.console.encoding).lower().startswith("utf"):
            return "#" * -(-eighths // 8)
        return ("█" * (eighths // 8) + EIGHTHS[eighths % 8]).rstrip()


def show_store(page: Page, store: Store) -> None:
    """What a store holds: counts, sources, lengths, loss and rejects."""
    print_store(store.path, store.manifest)
    show_sources(page, sources(store))
    length = store.column("length")
    page.title("lengths in tokens")
    show_bins(page, length_bins(length))
    stated = ", ".join(f"{name} {value:,}" for name, value in quantiles(length).items())
    page.line(f"{stated}, mean {length.mean():,.1f}")
    page.title("share of a sample's tokens that carries loss, in percent")
    show_bins(page, loss_bins(length, store.column("loss_tokens")))
    show_rejects(page, store)


def show_sources(page: Page, found: Sequence[Source]) -> None:
    """The largest sources, a line each, and the sum of the others."""
    most, others = found[:MOST_SOURCES], found[MOST_SOURCES:]
    if len(others) == 1:
        most, others = found, []
    if others:
        sums = (sum(column) for column in list(zip(*others, strict=True))[1:])
        most = [*most, Source(f"{len(others)} others", *sums)]
    page.title(f"{'samples':>11} {'tokens':>15}   loss  source")
    for source in most:
        share = source.loss_tokens / max(source.tokens, 1)
        page.line(f"{source.samples:>11,} {source.tokens:>15,} {share:>6.1%}  {source.name or '(unnamed)'}")


def show_bins(page: Page, bins: Sequence[Bin]) -> None:
    """A histogram, a line a bin."""
    most, total = max(part.count for part in bins), sum(part.count for part in bins)
    high = max(len(f"{part.high:,}") for part in bins)
    for part in bins:
        name = f"{part.low:>{high},}-{part.high:<{high},}"
        page.line(f"{name} {part.count:>9,} {part.count / total:>6.1%} {page.bar(part.count / most)}".rstrip())


def show_rejects(page: Page, store: Store) -> None:
    """Each reason for a reject with its first examples."""
    counts = store.manifest["counts"]["rejected"]
    if not sum(counts.values()):
        return
    page.title("rejects")
    for reason, entries in examples(store).items():
        page.line(f"{counts[reason]:>9,}  {reason}")
        for entry in entries:
            detail = entry["reason"].partition(":")[2].strip()
            stated = [place(entry["source"], entry["line"]), *([detail] if detail else []), entry["excerpt"]]
            page.line(f"{'':>11}{': '.join(stated)}")
        if counts[reason] and not entries:
            page.line(f"{'':>11}(further down in rejects.jsonl.zst)")


def place(source: str, line: int) -> str:
    """Where a record is."""
    return f"{source or '(unnamed)'}:{line}"


def show_sample(page: Page, sample: Found, tokenizer, by_token: bool) -> None:
    """What the index says of a sample, and its text or, `by_token`, its tokens."""
    share = sample.loss_tokens / max(sample.length, 1)
    page.title(f"sample {sample.number:,} from {place(sample.source, sample.line)}")
    page.line(
        f"{sample.length:,} tokens, {sample.loss_tokens:,} with loss ({share:.1%}{page.told}), "
        f"{sample.eligible:,} eligible anchors, key {sample.key}",
        FAINT,
    )
    (show_tokens if by_token else show_text)(page, sample, tokenizer)


def show_text(page: Page, sample: Found, tokenizer) -> None:
    """A sample's text, loss and special tokens told apart."""
    from dflash_prep.pieces import runs

    parts, loss, split = [], False, False
    for run in runs(sample.ids, sample.spans, tokenizer):
        if page.marks and run.loss != loss:
            parts.append((OPEN if run.loss else CLOSE, PLAIN))
        loss, split = run.loss, split or run.split
        style = (LOSS if run.loss else PLAIN) + (SPECIAL if run.special else PLAIN)
        parts += page.shown(run.text, style)
    if page.marks and loss:
        parts.append((CLOSE, PLAIN))
    page.write(*parts, ("" if parts and parts[-1][0].endswith("\n") else "\n", PLAIN))
    if split:
        page.line("a border of loss lies inside a character, which is shown on its later side; --tokens shows where", FAINT)


def show_tokens(page: Page, sample: Found, tokenizer) -> None:
    """A sample's tokens, a line each: number in the sample, id, whether it carries loss, text."""
    from dflash_prep.pieces import is_special, loss_mask, nameless, token_texts

    page.line(f"{'token':>7} {'id':>7}  loss  text", HEADING)
    mask = loss_mask(sample.spans, len(sample.ids)).tolist()
    rows = zip(sample.ids.tolist(), mask, token_texts(sample.ids, tokenizer), strict=True)
    for number, (token, loss, text) in enumerate(rows):
        style = (LOSS if loss else PLAIN) + (SPECIAL if is_special(token, tokenizer) else PLAIN)
        spelled = tokenizer.backend.id_to_token(token)  # as the vocabulary has it, bytes that are no character included
        named = nameless(token, tokenizer) or (f'"{text}"' if text else f"part of what follows: {spelled}")
        start = f"{number:>7} {token:>7}  {'loss' if loss else '   -'}  "
        page.write((start, LOSS if loss else PLAIN), (in_line(named), style), ("\n", PLAIN))


def show_step(page: Page, heading: str, rows: Sequence[dict], fact: Callable[[int], tuple[int, str]]) -> None:
    """A step's micro-batches and the samples in each; `fact` gives a sample's length and where it came from."""
    page.line(heading, HEADING)
    for row in rows:
        if not row["samples"]:
            page.title(f"slot {row['slot']}: empty")
            continue
        padding = row["padded_tokens"] - row["tokens"]
        page.title(
            f"slot {row['slot']}: {len(row['samples']):,} samples, width {row['width']:,}, bucket {row['bucket']}; "
            f"{row['tokens']:,} tokens and {padding:,} of padding ({padding / row['padded_tokens']:.1%}); "
            f"{row['loss_tokens']:,} with loss, {row['anchors']:,} anchors"
        )
        for sample in row["samples"]:
            length, origin = fact(sample)
            page.line(f"{sample:>11,} {length:>9,}  {origin}")


def show_occurrences(page: Page, found: dict[str, Sequence[tuple[int, int]]]) -> None:
    """Where a sample stands, a line an epoch: each (step, slot)."""
    for name, places in found.items():
        page.line(f"{name}: {', '.join(f'step {step:,} slot {slot}' for step, slot in places) or 'not in it'}", FAINT)
