"""The report: one whole page with nothing from elsewhere, the plan's own figures, and charts that a browser shows."""

import html
import json
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_prep.charts import share_bins, whole_bins
from dflash_prep.cost import CostModel
from dflash_prep.errors import UserError
from dflash_prep.manifest import Plan
from dflash_prep.plan import write_plan
from dflash_prep.pool import from_lengths
from dflash_prep.report import write_report
from dflash_prep.scheme import PlanOptions, settle
from tests.prep.support import make_plan, make_store

LENGTHS = [3 + 37 * i % 12 * 700 for i in range(90)]
VOID = {"meta"}
SECTIONS = ["lengths", "fill", "cost", "overlap", "certificate", "strategies", "epochs", "options"]
PLANS = {
    "bucketed": {"epochs": 3},
    "fixed shapes": {"epochs": 2, "buckets": 3, "fixed_shapes": True, "align": 8, "anchor_budget": 600},
    "boundaries": {"epochs": 2, "boundaries": (900, 3000, 8192)},
    "step": {"epochs": 2, "bucket_scope": "step"},
    "packed": {"epochs": 2, "strategy": "packed"},
    "shuffled": {"epochs": 2, "strategy": "shuffled"},
    "sorted": {"epochs": 2, "strategy": "sorted"},
    "mixed": {"epochs": 10, "strategy": "packed", "holdout": 0.2, "weights": (("made", 1.5),)},
    "one epoch": {"epochs": 1, "strategy": "packed"},
}


class Page(HTMLParser):
    """A parsed page; fails where an element is not closed in its turn."""

    def __init__(self, text: str):
        super().__init__()
        self.text, self.open, self.elements, self.cells = text, [], [], {}
        self.ids, self.words = [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.row = []
        if tag in ("td", "th"):
            self.row.append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "tr":
            self.cells[self.row[0]] = self.row

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)
        if {"td", "th"} & set(self.open):
            self.row[-1] += " ".join(data.split())

    @property
    def prose(self) -> str:
        """All text, with single spaces."""
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return make_store(tmp_path_factory.mktemp("report") / "store", LENGTHS)


@pytest.fixture(scope="module")
def report(store, tmp_path_factory):
    """The plan of a name in PLANS and its page, made once."""
    made = {}

    def of(name: str) -> tuple[Plan, Page]:
        if name not in made:
            directory = tmp_path_factory.mktemp("plan")
            plan = make_plan(store, directory / "plan", **PLANS[name])
            write_report(plan.path, (), directory / "report.html")
            made[name] = plan, Page((directory / "report.html").read_text("utf-8"))
        return made[name]

    return of


def plan_lengths(directory: Path, columns: dict, **options) -> Plan:
    """A plan of a table of lengths."""
    pq.write_table(pa.table(columns), directory / "lengths.parquet")
    options = PlanOptions(**options)
    write_plan(settle(from_lengths(directory / "lengths.parquet", options.holdout > 0), options), directory / "plan")
    return Plan(directory / "plan")


def page_of(plan: Plan, output: Path, *data: Path) -> Page:
    """The page of a plan."""
    write_report(plan.path, data, output)
    return Page(output.read_text("utf-8"))


def assert_self_contained(page: Page) -> None:
    """Nothing is fetched, and no script is there to fetch anything."""
    for tag, attributes in page.elements:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base", "image", "use", "a")
        assert not {"src", "href", "xlink:href", "srcset", "action", "background"} & set(attributes), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes)
    without_names = re.sub(r' xmlns(:xlink)?="http://www\.w3\.org/[^"]+"', "", page.text)
    assert not re.search(r"https?://|@import|url\(", without_names)
    assert "default-src 'none'" in page.text


@pytest.mark.parametrize("name", PLANS)
def test_a_page_is_whole_and_self_contained(name, report):
    plan, page = report(name)
    assert_self_contained(page)
    assert Counter(page.ids).most_common(1)[0][1] == 1
    assert [section for section in SECTIONS if section not in page.ids] == []
    assert ("buckets" in page.ids) == ("padding" in page.ids) == (plan["curve"] is not None)
    assert len(page.text.encode()) < 1_000_000
    charts = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert len(charts) == 2 * (5 + 2 * ("buckets" in page.ids) - (name == "one epoch"))
    assert all(chart["role"] == "img" and len(chart["aria-label"]) > 40 for chart in charts)


@pytest.mark.parametrize("name", PLANS)
def test_a_page_states_the_plans_own_figures(name, report):
    plan, page = report(name)
    certificate = plan["certificate"]
    assert page.cells["Real tokens"][1] == f"{certificate['real_token_share']:.2%}"
    assert page.cells["Straggler share"][1] == f"{certificate['straggler_share']:.2%}"
    assert page.cells["Time above the floor"][1] == f"{certificate['gap_to_optimum']:.2%}"
    assert page.cells["Design effect"][1] == f"{certificate['design_effect']:.2f}"
    assert page.cells["Largest micro-batch"][1] == f"{certificate['most_tokens']:,} of {plan['token_budget']:,} tokens"
    assert page.cells["Longest row"][1] == f"{plan['rehearse']['longest']['width']:,} tokens"
    assert page.cells["this plan"][2] == f"{plan['epochs'][0]['steps']:,}"
    for number, epoch in enumerate(plan["epochs"]):
        row = page.cells[str(number)]
        assert row[1:5] == [f"{epoch[key]:,}" for key in ("steps", "micro_batches", "samples", "tokens")]
    assert plan["fingerprint"] in page.prose and plan["store"]["path"] in page.prose
    for option in ("strategy", "bucket scope", "token budget", "seed", "align", "holdout", "weights", "cost"):
        assert f" {option} " in page.prose


def test_strategies_stand_side_by_side_whatever_the_plans_own(report):
    names = ["sorted", "shuffled", "packed", "bucketed, by step"]
    for name in ("bucketed", "packed"):
        cells = report(name)[1].cells
        assert [cells[other][0] for other in names] == names
        assert cells["sorted"][6] == "1" and cells["bucketed, 4"][1] == "4"
    assert report("packed")[1].cells["packed"][3] == report("bucketed")[1].cells["packed"][3] == "100.0%"


def test_overlap_of_frozen_and_of_few_epochs(report):
    assert "The plan has one epoch: there is none to compare it with." in report("one epoch")[1].prose
    assert report("one epoch")[1].cells["Composition Jaccard"][1] == "undefined"
    assert " 1 on average over all epochs" in report("sorted")[1].prose
    assert "on average over the first 8 epochs" in report("mixed")[1].prose


def test_hold_out_copies_and_boundaries_are_told(report):
    plan, page = report("mixed")
    assert page.cells["hold-out"][3] == f"{plan['holdout_set']['samples']:,}"
    assert page.cells["Copies of a sample"][1] == "1 to 2"
    assert "samples × 1.5" in page.prose
    assert "upper bounds of the buckets, 900, 3000, 8192 tokens" in report("boundaries")[1].prose
    assert report("fixed shapes")[1].cells["Most anchors"][1].endswith(" of 600")


def test_a_plan_of_lengths_and_hostile_names(tmp_path):
    source = ["<b>\"&'", "</td><script>"] * 20
    plan = plan_lengths(tmp_path, {"length": list(range(10, 50)), "source": source}, epochs=2)
    page = page_of(plan, tmp_path / "out" / "report.html")
    assert_self_contained(page)
    assert "source <b>\"&' 20 samples × 1 = 20 an epoch" in page.prose
    assert "40 samples of an epoch, 10 to 49 tokens long" in page.prose


def test_without_its_data_a_page_says_so(tmp_path, store):
    moved = tmp_path / "moved"
    shutil.copytree(store, tmp_path / "store")
    plan = make_plan(tmp_path / "store", tmp_path / "plan", epochs=2)
    (tmp_path / "store").rename(moved)
    page = page_of(plan, tmp_path / "report.html")
    assert_self_contained(page)
    assert "these are not the samples' lengths but the widths" in page.prose
    assert "Left out: the plan's data cannot be read here" in page.prose and "--data" in page.prose
    assert "sorted" not in page.cells
    page = page_of(plan, tmp_path / "report.html", moved)
    assert "Left out" not in page.prose and "sorted" in page.cells


def test_hours_only_with_a_measured_cost(tmp_path, store, report):
    assert "hours" not in report("bucketed")[1].cells["strategy"] and "gives hours" in report("bucketed")[1].prose
    plan = make_plan(store, tmp_path / "plan", epochs=2, cost=CostModel(1e-3, 1e-2, 1e-6, 0, 0), calibrated=True)
    page = page_of(plan, tmp_path / "report.html")
    hours = f"{plan['certificate']['seconds'] / 3600:,.2f} hours"
    assert page.cells["Time of the run"][1] == hours and page.cells["strategy"][-1] == "hours"


@pytest.mark.parametrize("lengths", [[7], [5, 5, 5, 5], [1, 1, 900]])
@pytest.mark.parametrize("strategy", ["bucketed", "packed"])
def test_the_smallest_plans(lengths, strategy, tmp_path):
    plan = plan_lengths(tmp_path, {"length": lengths}, epochs=2, strategy=strategy)
    assert_self_contained(page_of(plan, tmp_path / "report.html"))


def listing(directory: Path) -> dict[str, bytes | None]:
    """All that is in a directory."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in directory.rglob("*")}


def test_faults_end_in_one_line_and_write_nothing(tmp_path, store):
    other = make_store(tmp_path / "other", [4, 5, 6])
    plan = make_plan(store, tmp_path / "plan", epochs=1)
    damaged = tmp_path / "damaged"
    shutil.copytree(plan.path, damaged)
    stated = json.loads((damaged / "plan.json").read_text())
    stated["certificate"]["design_effect"] = "1"
    (damaged / "plan.json").write_text(json.dumps(stated))
    (tmp_path / "notes.html").write_text("<!doctype html>mine")
    before = listing(tmp_path)
    for path, data, output, words in [
        (tmp_path / "none", (), "report.html", "no plan here"),
        (store, (), "report.html", "no plan here"),
        (damaged, (), "report.html", "no valid certificate"),
        (plan.path, (other,), "report.html", "not the store"),
        (plan.path, (store, store), "report.html", "was made from 1 stores"),
        (plan.path, (tmp_path / "none",), "report.html", "no token store here"),
        (plan.path, (), "plan/report.html", "lies in the plan"),
        (plan.path, (), "plan", "lies in the plan"),
        (plan.path, (), "other", "is a directory"),
        (plan.path, (), "notes.html", "no report"),
        (plan.path, (), "notes.html/report.html", "check path"),
    ]:
        with pytest.raises(UserError, match=words) as fault:
            write_report(path, data, tmp_path / output)
        assert "\n" not in str(fault.value)
        assert listing(tmp_path) == before
    next(plan.path.glob("epoch-*.parquet")).write_bytes(b"x")
    with pytest.raises(UserError, match="checksum differs"):
        write_report(plan.path, (), tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_an_older_report_is_replaced(tmp_path, store):
    first = make_plan(store, tmp_path / "a", epochs=1, strategy="packed")
    second = make_plan(store, tmp_path / "b", epochs=1, strategy="shuffled")
    page_of(first, tmp_path / "report.html")
    page = page_of(second, tmp_path / "report.html")
    assert second["fingerprint"] in page.text and first["fingerprint"] not in page.text


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=50))
def test_bins_hold_every_length_once(values):
    counts, edges = whole_bins(np.array(values))
    assert sum(counts) == len(values) and len(edges) == len(counts) + 1 <= 103
    assert counts == [sum(low < value <= high for value in values) for low, high in pairwise(edges)]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_bins_of_shares_leave_out_only_a_tail(values):
    counts, edges, below = share_bins(np.array(values))
    left = sum(value < edges[0] for value in values)
    assert round(sum(counts) * len(values)) == len(values) - left and left <= 1
    assert edges[-1] == 1 and len(edges) <= 103 and bool(below) == bool(left)


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
QUIET += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"]
WIDTHS = 1200, 390
MEASURE = """
const result = [...document.querySelectorAll('iframe')].map(frame => {
  const page = frame.contentDocument, sees = element => element.getClientRects().length > 0
  const box = element => { const r = element.getBoundingClientRect(); return [r.left, r.right, r.width, r.height] }
  const meet = (one, other) => {
    const [a, b] = [one, other].map(element => element.getBoundingClientRect())
    const across = Math.min(a.right, b.right) - Math.max(a.left, b.left)
    return across > -2 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4
  }
  const size = element => parseFloat(frame.contentWindow.getComputedStyle(element).fontSize)
  const shown = text => sees(text) && text.textContent && text.getAttribute('opacity') !== '0'
  const texts = [...page.querySelectorAll('svg text')].filter(shown)
  const prose = [...page.querySelectorAll('h1, h2, p, td, th, dt, dd, figcaption, code, .tile *')].filter(sees)
  return {
    inner: frame.contentWindow.innerWidth,
    scroll: page.documentElement.scrollWidth,
    charts: [...page.querySelectorAll('figure')].map(f => [...f.querySelectorAll('svg')].filter(sees).map(box)),
    texts: texts.map(text => size(text) * Math.hypot(text.getScreenCTM().a, text.getScreenCTM().b)),
    edges: texts.map(box),
    clashes: texts.flatMap((one, i) => texts.slice(i + 1).filter(other => meet(one, other)).map(other => [one, other]))
      .map(pair => pair.map(text => text.textContent)),
    prose: prose.map(size),
    over: prose.filter(e => e.getBoundingClientRect().right > frame.contentWindow.innerWidth).map(e => e.textContent),
    fetched: frame.contentWindow.performance.getEntriesByType('resource').length,
  }
})
document.body.textContent = JSON.stringify(result)
"""


def browse(page: str, directory: Path) -> list[dict]:
    """What a browser makes of a page in windows of `WIDTHS`: as frames, since its own window has a least width."""
    frames = "".join(f'<iframe width="{width}" height="800" srcdoc="{html.escape(page)}"></iframe>' for width in WIDTHS)
    script = f"<script>onload = () => {{ {MEASURE} }}</script>"
    style = "<style>iframe { border: 0; display: block }</style>"
    (directory / "frames.html").write_text(f"<!doctype html><meta charset=utf-8>{style}<body>{frames}{script}", "utf-8")
    command = [BROWSER, *QUIET, f"--user-data-dir={directory / 'profile'}", "--window-size=1300,900", "--dump-dom"]
    done = subprocess.run([*command, (directory / "frames.html").as_uri()], capture_output=True, timeout=90, text=True)
    return json.loads(html.unescape(re.search(r"<body>(.*)</body>", done.stdout, re.DOTALL)[1]))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
@pytest.mark.parametrize("name", ["bucketed", "mixed", "one epoch"])
def test_a_browser_shows_every_chart_readable_and_nothing_overflows(name, report, tmp_path):
    for width, seen in zip(WIDTHS, browse(report(name)[1].text, tmp_path), strict=True):
        assert seen["inner"] == width and seen["scroll"] <= width
        assert seen["over"] == [] and seen["clashes"] == [] and seen["fetched"] == 0
        drawn = [chart for chart in seen["charts"] if chart]
        assert len(drawn) == len(seen["charts"]) - (name == "one epoch") and all(len(chart) == 1 for chart in drawn)
        for left, right, wide, high in (chart[0] for chart in drawn):
            assert wide > 280 and high > 150 and left >= 0 and right <= width
        assert min(seen["texts"]) >= 11 and min(seen["prose"]) >= 11
        assert all(left >= 0 and right <= width for left, right, *_ in seen["edges"])
