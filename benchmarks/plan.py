"""The planner beside public ones: time, memory, fill, balance, randomness, all measured in one run by one code.

`python benchmarks/plan.py [--samples N] [--rivals-python PATH]`; how to make an environment for the rivals is said in
`rivals.py`. Lengths are the design's reference: 902,000 of them, drawn, like a chat corpus'. Ours are whole commands as a
user types them, from start-up to the last file written; each runs once before on a few lengths, so that compiled loops are
cached, as they are from the second command on. Rivals' seconds are planning alone. What a plan is worth is computed here
from the batches, not taken from what the planner says of itself.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rivals import PADDED, RIVALS

EPOCHS, SLOTS, BUDGET = 6, 8, 32_768
KNEE = 24_576  # tokens; work is judged as length · (1 + length / KNEE)
ANCHOR = 20  # what an anchor adds to a micro-batch's work where anchors count, in the same unit
DENSITY, MOST = 4, 512  # a sample has an anchor for every 4 eligible positions, at most 512: the command's defaults
LIMIT = 180  # seconds, start-up included; a rival that takes longer gets half the samples
WARM = 2_000  # lengths
OURS = {
    "bucketed": [],
    "same, 6 buckets": ["--buckets", "6"],
    "same, by hand": ["--boundaries", "770,1216,1728,2432,3296,8192"],
    "bucketed in the step": ["--bucket-scope", "step"],
    "same, 16 slots": ["--bucket-scope", "step", "--slots", "16"],
    "packed": ["--strategy", "packed"],
    "shuffled": ["--strategy", "shuffled"],
    "sorted": ["--strategy", "sorted"],
}
HEADINGS = ["planner", "seconds", "peak\nMB", "steps an\nepoch", "real\ntokens", "fill", "strag-\nglers", "with\nanchors"]
HEADINGS += ["design\neffect", "Jaccard", "at\nrandom", "time of\nsorted"]
# Starts a command and prints its seconds and its own peak memory in MB. A process of its own, and a small one: a child
# counts the memory of the process that it was started from as its own.
WATCH = """
import json, os, sys, time
began = time.perf_counter()
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(child, 0)
print(json.dumps([time.perf_counter() - began, usage.ru_maxrss * 1024 / 1e6]))
sys.exit(os.waitstatus_to_exitcode(status))
"""


@dataclass(frozen=True)
class Epoch:
    """An epoch's micro-batches by (step, slot): per micro-batch how many samples, tokens, computed tokens, work, anchors."""

    samples: np.ndarray
    sizes: np.ndarray
    tokens: np.ndarray
    computed: np.ndarray
    work: np.ndarray
    anchors: np.ndarray


@dataclass(frozen=True)
class Run:
    """What a planner made of these lengths: seconds, peak memory in MB (None: not measured), slots a step, the epochs."""

    name: str
    seconds: float
    peak: float | None
    slots: int
    length: np.ndarray
    epochs: list[Epoch]


def reference(count: int) -> np.ndarray:
    """The first `count` reference lengths, int64."""
    random, total = np.random.default_rng(11), 902_000
    short = random.random(total) < 0.6727
    lengths = np.where(short, random.lognormal(6.7276, 0.5215, total), random.lognormal(7.4595, 0.2606, total))
    return lengths.clip(4, 8192).astype(np.int64)[:count]


def anchor_count(length: np.ndarray) -> np.ndarray:
    """Anchors a sample: half of its tokens carry loss, all but the last of these are eligible."""
    eligible = np.maximum(length // 2 - 1, 0)
    return np.minimum(-(-eligible // DENSITY), MOST)


def write_lengths(file: Path, length: np.ndarray) -> str:
    """Write what both sides plan from."""
    pq.write_table(pa.table({"length": length.astype(np.uint32), "loss_tokens": (length // 2).astype(np.uint32)}), file)
    return str(file)


def read_epoch(file: Path, lengths: np.ndarray, packed: bool) -> Epoch:
    """Read an epoch's batches and weigh them; only alignment (`width`, `padded_tokens`) and anchors are the plan's word."""
    table = pq.read_table(file)
    lists = table["samples"].combine_chunks()
    samples, sizes = lists.flatten().to_numpy().astype(np.int64), lists.value_lengths().to_numpy().astype(np.int64)
    batch = np.repeat(np.arange(len(sizes)), sizes)
    length = lengths[samples]

    def stated(column: str, otherwise: np.ndarray) -> np.ndarray:
        return table[column].to_numpy().astype(np.int64) if column in table.column_names else otherwise

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(batch, values, len(sizes))

    longest = np.zeros(len(sizes), np.int64)
    np.maximum.at(longest, batch, length)
    width = stated("width", longest)
    tokens = total(length)
    computed = stated("padded_tokens", tokens if packed else sizes * width)
    work = total(length * (1 + length / KNEE)) if packed else sizes * width * (1 + width / KNEE)
    return Epoch(samples, sizes, tokens, computed, work, stated("anchors", total(anchor_count(length))))


def plan_ours(name: str, options: list[str], length: np.ndarray, folder: Path) -> Run:
    """Plan by `dflash-prep` and read what it wrote; raises where the command fails."""

    def command(length: np.ndarray, output: Path) -> tuple[float, float]:
        prep = [str(Path(sys.executable).parent / "dflash-prep"), "plan-epochs", "--lengths"]
        prep += [write_lengths(folder / "lengths.parquet", length), "-o", str(output), "--epochs", str(EPOCHS)]
        prep += ["--slots", str(SLOTS), "--token-budget", str(BUDGET), *options]
        watched = subprocess.run([sys.executable, "-ISc", WATCH, *prep], check=True, capture_output=True, text=True)
        return json.loads(watched.stdout.splitlines()[-1])

    command(length[:WARM], folder / "warm")
    seconds, peak = command(length, folder / "plan")
    plan = json.loads((folder / "plan/plan.json").read_text())
    epochs = [read_epoch(folder / "plan" / epoch["file"], length, plan["strategy"] == "packed") for epoch in plan["epochs"]]
    return Run(name, seconds, peak, plan["slots"], length, epochs)


def plan_rival(name: str, python: str, length: np.ndarray, folder: Path) -> Run:
    """Plan by a rival, on as many of the samples as it plans in time; raises where it cannot be run."""
    command = [python, "-W", "ignore", str(Path(__file__).with_name("rivals.py")), name]
    command += [write_lengths(folder / "lengths.parquet", length), str(folder)]
    command += ["--epochs", str(EPOCHS), "--slots", str(SLOTS), "--token-budget", str(BUDGET)]
    try:
        answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT).stdout
    except subprocess.TimeoutExpired:
        return plan_rival(name, python, length[: len(length) // 2], folder)
    stated = json.loads(answer.splitlines()[-1])
    epochs = [read_epoch(file, length, name not in PADDED) for file in sorted(folder.glob("epoch-*.parquet"))]
    return Run(stated["package"], stated["seconds"], None, SLOTS, length, epochs)


def step_time(run: Run) -> float:
    """The work of a sample of the run, anchors included, if each step takes as long as its costliest slot, on all slots."""
    slots = [(epoch.work + ANCHOR * epoch.anchors).reshape(-1, run.slots).max(axis=1).sum() for epoch in run.epochs]
    return run.slots * sum(slots) / sum(len(epoch.samples) for epoch in run.epochs)


def straggler_share(work: np.ndarray, slots: int) -> float:
    """The share of slots · time that is spent waiting for each step's costliest slot."""
    steps = work.reshape(-1, slots)
    return 1 - work.sum() / (slots * steps.max(axis=1).sum())


def design_effect(epoch: Epoch, slots: int, length: np.ndarray) -> float:
    """Variance of the steps' mean log length over what it is where samples are drawn singly; a full shuffle has 1."""
    logs, sizes = np.log(length), epoch.sizes.reshape(-1, slots).sum(axis=1)
    sums = np.bincount(np.repeat(np.arange(len(sizes)), sizes), logs[epoch.samples], len(sizes))
    return float((sums / sizes).var(ddof=1) * sizes.mean() / logs.var())


def pairs(counts: np.ndarray) -> int:
    """How many pairs groups of these sizes hold."""
    return int((counts * (counts - 1) // 2).sum())


def met_again(epochs: list[Epoch], count: int) -> tuple[float, float]:
    """Jaccard index of the pairs of samples that share a micro-batch, and its value for random batches of these sizes.

    Means over all pairs of epochs. 1: the same neighbours in every epoch.
    """
    homes = np.full((len(epochs), count), -1, np.int64)
    for home, epoch in zip(homes, epochs, strict=True):
        home[epoch.samples] = np.repeat(np.arange(len(epoch.sizes)), epoch.sizes)
    found, chance = [], []
    for first, second in combinations(range(len(epochs)), 2):
        both = (homes[first] >= 0) & (homes[second] >= 0)
        shared = pairs(np.unique(homes[first, both] << 32 | homes[second, both], return_counts=True)[1])
        mine, theirs = pairs(epochs[first].sizes), pairs(epochs[second].sizes)
        expected = mine * theirs / (count * (count - 1) / 2)
        found.append(shared / (mine + theirs - shared))
        chance.append(expected / (mine + theirs - expected))
    return float(np.mean(found)), float(np.mean(chance))


def measure(run: Run, base: float | None) -> list[str]:
    """A run's row of the table; `base` is the step time that it is compared with."""

    def joined(field: str, last: int | None = None) -> np.ndarray:
        return np.concatenate([getattr(epoch, field)[:last] for epoch in run.epochs])

    full = joined("tokens", -run.slots)  # a step that ends an epoch holds what is left
    jaccard, chance = met_again(run.epochs, len(run.length))
    effect = np.mean([design_effect(epoch, run.slots, run.length) for epoch in run.epochs])
    work, anchors = joined("work"), joined("anchors")
    return [
        run.name,
        f"{run.seconds:.2f}",
        "" if run.peak is None else f"{run.peak:,.0f}",
        f"{len(joined('sizes')) / run.slots / len(run.epochs):,.0f}",
        f"{joined('tokens').sum() / joined('computed').sum():.2%}",
        f"{full.sum() / (BUDGET * len(full)):.2%}",
        f"{straggler_share(work, run.slots):.2%}",
        f"{straggler_share(work + ANCHOR * anchors, run.slots):.2%}",
        f"{effect:.2f}",
        f"{jaccard:.1e}",
        f"{chance:.1e}",
        f"{step_time(run) / base:.3f}" if base else "",
    ]


def remarks(run: Run, samples: int) -> list[str]:
    """What a plan does that it should not, and where it was given less."""
    count, said = len(run.length), []
    planned = [len(np.unique(epoch.samples)) for epoch in run.epochs]
    over = np.mean(np.concatenate([epoch.computed > BUDGET for epoch in run.epochs]))
    if count < samples:
        said.append(f"{run.name} planned {count:,} samples; {2 * count:,} take it over {LIMIT} s")
    if min(planned) < count:
        said.append(f"{run.name} leaves out up to {count - min(planned):,} samples an epoch")
    if any(len(epoch.samples) > number for epoch, number in zip(run.epochs, planned, strict=True)):
        said.append(f"{run.name} repeats samples within an epoch")
    if over:
        said.append(f"{run.name} exceeds the token budget in {over:.2%} of its micro-batches")
    return said


def attempt(function, name: str, *arguments) -> Run | None:
    """Run a planner; where it cannot be run, say why in one line."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            return function(name, *arguments, Path(folder))
    except subprocess.CalledProcessError as fault:
        print(f"skipped: {name}: {(fault.stderr or str(fault)).strip().splitlines()[-1]}", flush=True)


def machine() -> str:
    """Cores and the processor's name."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return f"{os.cpu_count()} cores, {names[0].partition(': ')[2] if names else 'unknown processor'}"


def table(title: str, headings: list[str], rows: list[list[str]]) -> Table:
    """A table whose first column holds names and whose others hold numbers."""
    result = Table(title=title, box=SIMPLE_HEAD)
    for heading in headings:
        result.add_column(heading, justify="right" if result.columns else "left", no_wrap=True)
    for row in rows:
        result.add_row(*row)
    return result


def main() -> None:
    """Plan by every planner and print both tables."""
    parser = argparse.ArgumentParser(description="Compare dflash-prep with public planners.")
    parser.add_argument("--samples", type=int, default=902_000)
    parser.add_argument("--rivals-python", default=sys.executable, metavar="PATH", help="Python that can import the rivals.")
    options = parser.parse_args()
    length = reference(options.samples)
    ours = [run for name, extra in OURS.items() if (run := attempt(plan_ours, name, extra, length))]
    rivals = [run for name in RIVALS if (run := attempt(plan_rival, name, options.rivals_python, length))]

    console = Console(width=max(140, Console().width))
    title = f"{len(length):,} samples, {EPOCHS} epochs, {SLOTS} slots of {BUDGET:,} tokens; {machine()}"
    base = next((step_time(run) for run in ours if run.name == "sorted"), None)
    rows = [measure(run, base) for run in ours + rivals]
    console.print(table(title, HEADINGS, rows))
    for run in ours + rivals:
        for remark in remarks(run, len(length)):
            console.print(remark)
    pace = {run.name: run.seconds / len(run.length) for run in ours + rivals}
    ratios = [[run.name, *(f"{pace[run.name] / pace[rival.name]:.2f}" for rival in rivals)] for run in ours]
    if ours and rivals:
        title = "Our seconds, start-up and writing included, over the rival's planning alone, a sample"
        console.print(table(title, ["planner", *(rival.name for rival in rivals)], ratios))
    sys.exit(len(ours) < len(OURS))


if __name__ == "__main__":
    main()
