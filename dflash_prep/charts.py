"""The charts of a report: altair draws them to plain SVG, without script, in the colours that the page's style sets.

Each is drawn twice, for a wide column and for a phone, since text that shrinks with its picture soon cannot be read. What is
drawn is aggregated: no chart has more than a few hundred marks, however many samples the plan has.
"""

import io
import math
from dataclasses import dataclass
from html import escape
from itertools import combinations

import altair as alt
import numpy as np

from dflash_prep.diversity import Company, overlap
from dflash_prep.manifest import Plan

INK, LINE, MARK, ACCENT = "currentColor", "var(--line)", "var(--mark)", "var(--accent)"
WIDE, NARROW = (520, 280), (340, 260)  # pixels, axes and titles included
FONT = 12  # pixels, where a picture is shown at its own size
BAR, ROOM = 24, 60  # pixels: what a bar of a list takes, and what stands around the list
SHADE = 0.65  # opacity of the darkest cell: text on it can still be read
BINS = 100  # of a histogram, at most
TAIL = 0.001  # share of micro-batches that an axis may leave out

Chart = alt.Chart | alt.LayerChart


@dataclass(frozen=True)
class Drawing:
    """One chart as two SVG elements; both state the same text to those who cannot see them."""

    wide: str
    narrow: str


@dataclass(frozen=True)
class Figure:
    """A chart with its words; without a drawing, the caption says why there is none."""

    name: str
    title: str
    caption: str
    drawing: Drawing | None = None


@dataclass(frozen=True)
class Axis:
    """An axis' title, unit included, how it spells its values (d3-format), and the least step between two of them."""

    title: str
    form: str
    step: float


PART = Axis("share of micro-batches", "~%", 1e-6)


def lengths_figure(plan: Plan, length: np.ndarray) -> Figure:
    """An epoch's samples by length (int64 [samples of the epoch]), and where buckets end."""
    bounds = plan["boundaries"] if plan["curve"] else []
    shortest, longest, mean = int(length.min()), int(length.max()), float(length.mean())
    caption = f"{len(length):,} samples of an epoch, {shortest:,} to {longest:,} tokens long, {mean:,.0f} on average."
    if bounds:
        caption += f" Lines: the upper bounds of the buckets, {', '.join(map(str, bounds))} tokens."
    counts, edges = whole_bins(length)
    shown = [bound for bound in bounds if bound <= edges[-1]]
    drawing = histogram(counts, edges, Axis("tokens of a sample", ",d", 1), Axis("samples", ",d", 1), shown, caption)
    return Figure("lengths", "Lengths and boundaries" if bounds else "Lengths", caption, drawing)


def widths_figure(width: np.ndarray) -> Figure:
    """All micro-batches by width (int64): what a plan knows of lengths without its data."""
    caption = (
        f"The plan's data cannot be read here, so these are not the samples' lengths but the widths of the {len(width):,} "
        f"micro-batches of the run, {width.min():,} to {width.max():,} tokens."
    )
    counts, edges = whole_bins(width)
    drawing = histogram(counts, edges, Axis("tokens of a row", ",d", 1), Axis("micro-batches", ",d", 1), [], caption)
    return Figure("lengths", "Widths", caption, drawing)


def buckets_figure(plan: Plan) -> Figure:
    """The expected time with 1, 2, … buckets, beside that of no padding."""
    certificate, found, own = plan["certificate"], plan["curve"], len(plan["boundaries"])
    run = certificate["seconds"] / (1 + certificate["gap_to_optimum"])  # steps of full micro-batches without padding
    floor = run * plan["slots"] / len(plan["epochs"])
    above = [seconds / floor - 1 for seconds in found["seconds"]]
    chosen, best = found["chosen"] / floor - 1, min(found["seconds"])
    distance = abs(found["chosen"] / found["optimum"] - 1)
    caption = (
        f"Expected time of an epoch's micro-batches above that of no padding: {chosen:.1%} with this plan's {own}, "
        f"{above[0]:.1%} with 1 and {best / floor - 1:.1%} with the best number of them. The boundaries are {distance:.2%} "
        "from the optimum of as many. More buckets pad less, but mix samples less and mean more shapes to compile."
    )
    return Figure(
        "buckets", "Time by number of buckets", caption, curve(above, own, chosen, "time above no padding", caption)
    )


def padding_figure(plan: Plan) -> Figure:
    """The expected share of padding with 1, 2, … buckets, and the plan's own."""
    found, own, share = plan["curve"]["padding"], len(plan["boundaries"]), plan["certificate"]["padding_share"]
    caption = (
        f"Share of padding in what is computed: {share:.1%} in this plan with its {own}; expected are {found[0]:.1%} with 1 "
        f"and {found[-1]:.1%} with {len(found)}."
    )
    return Figure("padding", "Padding by number of buckets", caption, curve(found, own, share, "share of padding", caption))


def fill_figure(fill: np.ndarray) -> Figure:
    """All micro-batches by real tokens over the budget (float64)."""
    counts, edges, below = share_bins(fill)
    caption = f"Real tokens of a micro-batch in its budget: {fill.mean():.2%} on average, {fill.min():.2%} at least.{below}"
    drawing = histogram(counts, edges, Axis("real tokens / token budget", "~%", 1e-6), PART, [], caption)
    return Figure("fill", "Fill of micro-batches", caption, drawing)


def cost_figure(cost: np.ndarray) -> Figure:
    """All micro-batches by their cost over that of the dearest in their step (float64)."""
    counts, edges, below = share_bins(cost)
    caption = (
        f"Cost of a micro-batch beside the dearest of its step, for which all ranks wait: {cost.mean():.2%} on average, "
        f"{cost.min():.2%} at least.{below}"
    )
    drawing = histogram(counts, edges, Axis("cost / cost of the step's dearest", "~%", 1e-6), PART, [], caption)
    return Figure("cost", "Balance within steps", caption, drawing)


def overlap_figure(epochs: list[Company], count: int) -> Figure:
    """How many neighbours any two of the first epochs share; `count` is the number of all epochs."""
    title = "Composition overlap between epochs"
    found = {(i, j): overlap([epochs[i], epochs[j]]) for i, j in combinations(range(len(epochs)), 2)}
    if not found:
        return Figure("overlap", title, "The plan has one epoch: there is none to compare it with.")
    if None in found.values():
        return Figure("overlap", title, "No two samples ever share a micro-batch: there are no neighbours to compare.")
    met, random = (sum(part) / len(found) for part in zip(*found.values(), strict=True))
    over = f"the first {len(epochs)} epochs" if count > len(epochs) else "all epochs"
    caption = (
        "Jaccard index: of the pairs of samples that share a micro-batch in one of two epochs, the share that does so in "
        f"both. {met:.2g} on average over {over}; random micro-batches have {random:.2g}, frozen ones 1. Cells: multiples "
        "of the random value; the stronger the colour, the nearer to frozen."
    )
    cells = [(*pair, times(*values), nearness(*values)) for pair, values in found.items()]
    return Figure("overlap", title, caption, matrix(cells, caption))


def strategies_figure(seconds: dict[str, float], own: str) -> Figure:
    """Each strategy's time of an epoch; `own` names the plan's."""
    least = min(seconds.values())
    best = min(seconds, key=seconds.get)
    caption = f"Time of an epoch beside the shortest, that of {best}: {seconds[own] / least:.2f} times as long with {own}."
    drawing = bars({name: value / least for name, value in seconds.items()}, own, caption)
    return Figure("times", "Time by strategy", caption, drawing)


def times(met: float, random: float) -> str:
    """A Jaccard index in multiples of the random one, in four characters."""
    ratio = met / random if random else 0.0
    return f"{ratio / 1000:,.0f}k" if ratio >= 1000 else f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"


def nearness(met: float, random: float) -> float:
    """From 0 for a Jaccard index as by chance to 1 for frozen batches, by its logarithm."""
    return math.log(random / met) / math.log(random) if 0 < random < met else 0.0


def whole_bins(values: np.ndarray) -> tuple[list[int], list[int]]:
    """How many whole numbers lie above edges[i] and up to edges[i + 1], as a bucket holds its upper bound; the edges."""
    step = max(1, round(nice_step(int(values.max()))))
    counts = np.bincount((values.astype(np.int64) - 1) // step)
    return counts.tolist(), (np.arange(len(counts) + 1) * step).tolist()


def share_bins(values: np.ndarray) -> tuple[list[float], list[float], str]:
    """Shares of values in bins that end at 1, the edges, and a sentence on what lies below the first."""
    lowest = float(np.quantile(values, TAIL))
    step = nice_step(max(1 - lowest, 0.01))
    first = max(0, math.floor(lowest / step))
    edges = np.arange(first, round(1 / step) + 1) * step
    edges[-1] = 1.0
    counts = np.histogram(values, edges)[0] / len(values)
    below = float((values < edges[0]).mean())
    return counts.tolist(), edges.tolist(), f" {below:.2%} lie below the axis." if below else ""


def nice_step(span: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that cuts a span into no more than about `BINS`."""
    power = 10.0 ** math.floor(math.log10(span / BINS))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power * BINS >= span)


def histogram(counts: list[float], edges: list[float], x: Axis, y: Axis, rules: list[int], text: str) -> Drawing:
    """Bars of the given heights over edges[i] to edges[i + 1], and a line at each of `rules`."""
    bins = [{"from": low, "to": high, "count": count} for low, high, count in zip(edges, edges[1:], counts, strict=False)]
    across = alt.X(
        "from:Q",
        bin="binned",
        title=x.title,
        scale=alt.Scale(domain=[edges[0], edges[-1]], nice=False),
        axis=alt.Axis(format=x.form, tickMinStep=x.step, grid=False, tickCount=6),
    )
    up = alt.Y("count:Q", title=y.title, axis=alt.Axis(format=y.form, tickMinStep=y.step, tickCount=5))
    bars = chart(bins).mark_bar(color=MARK, binSpacing=0).encode(x=across, x2="to:Q", y=up)
    lines = chart([{"at": at} for at in rules]).mark_rule(color=ACCENT, opacity=0.8).encode(x="at:Q")
    return draw(alt.layer(bars, lines) if rules else bars, text)


def curve(above: list[float], own: int, own_above: float, title: str, text: str) -> Drawing:
    """A share with 1, 2, … buckets; the plan's `own` number of them is marked."""
    last = max(2, len(above), own)
    points = [{"k": k, "above": share} for k, share in enumerate(above, start=1)]
    scale = alt.Scale(domain=[1, last], nice=False)
    across = alt.X("k:Q", title="buckets", scale=scale, axis=alt.Axis(tickMinStep=1, grid=False))
    up = alt.Y("above:Q", title=title, axis=alt.Axis(format="~%", tickCount=6))
    line = chart(points).mark_line(color=MARK, point=alt.OverlayMarkDef(color=MARK, size=14)).encode(x=across, y=up)
    name = f"{own} bucket{'s' * (own > 1)}: {own_above:.1%}"
    mark = chart([{"k": own, "above": own_above, "name": name}]).encode(x="k:Q", y="above:Q")
    align, shift = ("right", -4) if 2 * own > last else ("left", 8)
    label = mark.mark_text(color=ACCENT, align=align, dx=shift, dy=-16, fontSize=FONT + 1, fontWeight="bold")
    dot = mark.mark_point(color=ACCENT, filled=True, size=110, opacity=1)
    return draw(alt.layer(line, dot, label.encode(text="name:N")), text)


def matrix(cells: list[tuple[int, int, str, float]], text: str) -> Drawing:
    """A cell for each two epochs: (the one, the other, what is written there, its shade from 0 to 1)."""
    rows = [{"one": one, "other": other, "label": label, "shade": SHADE * shade} for one, other, label, shade in cells]
    plain = {"ticks": False, "domain": False, "labelAngle": 0}
    base = chart(rows).encode(
        x=alt.X("one:O", title="epoch", axis=alt.Axis(**plain)), y=alt.Y("other:O", title="epoch", axis=alt.Axis(**plain))
    )
    fill = base.mark_rect(color=MARK).encode(opacity=alt.Opacity("shade:Q", scale=None))
    frame = base.mark_rect(filled=False, stroke=LINE, strokeWidth=1)
    return draw(alt.layer(fill, frame, base.mark_text(color=INK, fontSize=FONT).encode(text="label:N")), text)


def bars(values: dict[str, float], own: str, text: str) -> Drawing:
    """A bar for each name, as long as its value in multiples of the least; that of `own` stands out."""
    rows = [{"name": name, "time": time, "label": f"{time:.2f}×"} for name, time in values.items()]
    across = alt.X(
        "time:Q",
        title="time, multiples of the shortest",
        scale=alt.Scale(domain=[0, 1.15 * max(values.values())], nice=False),
        axis=alt.Axis(tickCount=5),
    )
    up = alt.Y("name:N", title=None, sort=list(values), axis=alt.Axis(ticks=False, domain=False))
    base = chart(rows).encode(x=across, y=up)
    colour = alt.condition(alt.datum.name == own, alt.value(ACCENT), alt.value(MARK))
    label = base.mark_text(color=INK, align="left", dx=4, fontSize=FONT).encode(text="label:N")
    return draw(alt.layer(base.mark_bar(height=14).encode(color=colour), label), text, BAR * len(rows) + ROOM)


def chart(rows: list[dict]) -> alt.Chart:
    """A chart of rows that it holds itself."""
    return alt.Chart(alt.Data(values=rows))


def draw(drawn: Chart, text: str, height: int | None = None) -> Drawing:
    """Both pictures of a chart."""
    fit = alt.AutoSizeParams(type="fit", contains="padding")
    return Drawing(*(svg(drawn.properties(width=w, height=height or h, autosize=fit), text) for w, h in (WIDE, NARROW)))


def svg(drawn: Chart, text: str) -> str:
    """A chart as an SVG element."""
    styled = drawn.configure(
        aria=False,  # `text` speaks for the whole picture, not a label for each mark
        background="transparent",
        padding=4,
        view=alt.ViewConfig(stroke=None),
        axis=alt.AxisConfig(
            domainColor=LINE,
            tickColor=LINE,
            gridColor=LINE,
            labelColor=INK,
            titleColor=INK,
            labelFontSize=FONT,
            titleFontSize=FONT,
            titleFontWeight="normal",
            titlePadding=12,
            labelFlush=False,
            labelOverlap="greedy",
            labelSeparation=8,
        ),
    )
    buffer = io.StringIO()
    styled.save(buffer, format="svg")
    return buffer.getvalue().replace("<svg ", f'<svg role="img" aria-label="{escape(text)}" ', 1)
