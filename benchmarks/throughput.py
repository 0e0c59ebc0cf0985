"""How many real tokens a second each layout trains, and where a step's time goes.

The same samples for all, each layout's whole epoch, whole steps: target, draft, loss, backward, reduction, optimizer. The
layouts take their steps by turns, whoever is furthest behind first, so that a slow moment of the machine meets each alike.
Only what a layout waits for its batches is a little flattered by that: they are read ahead while the others compute.
`shuffled` is the story's: as drawn, each micro-batch padded to its longest sample.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from clock import Clock
from show import machine, print_table
from work import per_anchor, per_token, product_rate, token_length

import dflash_trainer.step
from dflash_prep.embedded import default_target
from dflash_prep.manifest import Plan
from dflash_prep.plan import write_plan
from dflash_prep.pool import from_stores
from dflash_prep.sample_maker import Options
from dflash_prep.scheme import PlanOptions, settle
from dflash_prep.stores import Stores
from dflash_prep.tokenize import tokenize
from dflash_prep.tokenizer import load_tokenizer
from dflash_trainer.config import derive_config
from dflash_trainer.draft import DraftModel
from dflash_trainer.prefetch import BatchPrefetcher, make_micro_batch
from dflash_trainer.shapes import Shapes, shapes_for
from dflash_trainer.step import GradientBuffer, Recipe, Stepper, StepResult
from dflash_trainer.target import FrozenTarget, load_target

LAYOUTS = {
    "sorted": {"strategy": "sorted"},
    "shuffled": {"strategy": "shuffled"},
    "bucketed, 6": {"buckets": 6},
    "bucketed, auto": {},
    "packed": {"strategy": "packed"},
}
SPLIT = ("bucketed, auto", "packed")
PARTS = [
    (FrozenTarget, "features", "target"),
    (DraftModel, "forward", "draft forward"),
    (dflash_trainer.step, "block_loss", "loss"),  # without the two above; the head's gradient is computed in it
    (torch.Tensor, "backward", "backward"),
    (GradientBuffer, "reduce", "reduce"),
    (torch.optim.AdamW, "step", "optimizer"),
]


class Setting(NamedTuple):
    """What is trained on what. Anchors, where not said here, are the planner's defaults."""

    corpus: Path
    target: str | None = None
    samples: int = 80  # records read, taken at random
    max_length: int = 1024
    token_budget: int = 2048
    slots: int = 2
    layers: int = 2
    block_size: int = 16
    dtype: torch.dtype = torch.float32

    def make_store(self, output: Path) -> Stores:
        """Tokenize as many records as are wanted."""
        options = Options(max_length=self.max_length, max_reject_share=1, limit=self.samples, shuffle_input=1)
        tokenize((str(self.corpus),), load_tokenizer(self.target), output, options, workers=1)
        return Stores([output])

    def make_plan(self, store: Stores, output: Path, **options) -> Plan:
        """Plan with this setting's step."""
        common = {"token_budget": self.token_budget, "slots": self.slots, "block_size": self.block_size}
        chosen = PlanOptions(**common | options)
        write_plan(settle(from_stores(store, chosen.holdout > 0), chosen), output)
        return Plan(output)

    def make_stepper(self, device: torch.device, seed: int = 0) -> Stepper:
        """A fresh draft of the target, and what steps it."""
        model = load_target(self.target, self.dtype, device)
        overrides = {"num_hidden_layers": self.layers}
        description = model.config.get_text_config()
        config = derive_config(description, block_size=self.block_size, mask_token_id=0, overrides=overrides)
        target = FrozenTarget(model, config.target_layer_ids)
        draft = DraftModel(config).initialise(seed).to(device)
        return Stepper(draft, target, Recipe(dtype=self.dtype), total_steps=1000)


@dataclass
class Epoch:
    """A layout on its way through an epoch."""

    name: str
    plan: Plan
    shapes: Shapes | None
    batches: BatchPrefetcher
    seconds: float = 0.0
    waited: float = 0.0
    results: list[StepResult] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """How many the epoch has."""
        return self.plan["epochs"][0]["steps"]

    def take_step(self, stepper: Stepper, device: torch.device) -> None:
        """The next step, as the trainer's loop takes it."""
        began = time.perf_counter()
        own = [batch.to(device) for batch in islice(self.batches, self.plan["slots"])]
        self.waited += time.perf_counter() - began
        self.results.append(stepper.step(len(self.results), own))  # reads its result, so a GPU is done with it
        self.seconds += time.perf_counter() - began

    def total(self, name: str) -> int:
        """A sum over the steps that were taken."""
        return sum(getattr(result, name) for result in self.results)

    def again(self) -> None:
        """Forget what was measured; the next epoch counts."""
        self.seconds, self.waited, self.results = 0.0, 0.0, []


@contextmanager
def begun(
    setting: Setting, store: Stores, folder: Path, names: Iterable[str], stepper: Stepper, device: torch.device
) -> Iterator[list[Epoch]]:
    """Each layout, planned and met once: a GPU compiles its kernels in the first epoch."""
    epochs, windows = [], (stepper.target.windows, frozenset(stepper.draft.config.windows))
    try:
        for number, name in enumerate(names):
            plan = setting.make_plan(store, folder / f"plan-{number}", epochs=3, **LAYOUTS[name])
            shapes = shapes_for(plan, device, False, windows)
            epochs.append(Epoch(name, plan, shapes, BatchPrefetcher(plan, store, device=device, shapes=shapes)))
            stepper.rehearse(make_micro_batch(next(iter(plan.rows(0))), 0, plan, store, shapes=shapes).to(device))
        yield epochs
    finally:
        for epoch in epochs:
            epoch.batches.close()


def race(epochs: list[Epoch], stepper: Stepper, device: torch.device) -> None:
    """Take an epoch of every layout by turns, whoever is furthest behind first."""
    while left := [epoch for epoch in epochs if len(epoch.results) < epoch.steps]:
        min(left, key=lambda epoch: len(epoch.results) / epoch.steps).take_step(stepper, device)


def strategies(setting: Setting, folder: Path, device: torch.device) -> None:
    """Print real tokens a second of every layout, and as ratios to `sorted`."""
    store, stepper = setting.make_store(folder / "tokens"), setting.make_stepper(device)
    with begun(setting, store, folder, LAYOUTS, stepper, device) as epochs:
        race(epochs, stepper, device)
        if device.type == "cuda":
            for epoch in epochs:
                epoch.again()
            race(epochs, stepper, device)
    rate, length = product_rate(device, setting.dtype), store.column("length")
    weighted, config, layers = token_length(length), stepper.draft.config, stepper.target._decoder.layers
    base = next(epoch.total("tokens") / epoch.seconds for epoch in epochs if epoch.name == "sorted")
    rows = []
    for epoch in epochs:
        tokens, anchors = epoch.total("tokens"), epoch.total("anchors")
        work = tokens * per_token(layers, config, weighted) + anchors * per_anchor(config, weighted)
        rows.append(
            [
                epoch.name,
                f"{len(epoch.results)}",
                f"{tokens:,}",
                f"{anchors:,}",
                f"{1 - tokens / epoch.total('padded_tokens'):.1%}",
                f"{epoch.seconds:.1f}",
                f"{epoch.waited / epoch.seconds:.2%}",
                f"{tokens / epoch.seconds:,.0f}",
                f"{tokens / epoch.seconds / base:.3f}",
                f"{work / epoch.seconds / rate:.1%}",
            ]
        )
    title = (
        f"One epoch of {len(length)} samples, {setting.slots} slots of {setting.token_budget:,} tokens; {describe(setting)}"
    )
    headings = ["layout", "steps", "tokens", "anchors", "padding", "seconds", "wait", "tokens/s", "of sorted", "utilisation"]
    print_table(title, headings, rows)
    print(f"utilisation: of {rate / 1e12:.2f} TFLOP/s, which one large matrix product reaches here")


def split(setting: Setting, folder: Path, device: torch.device, most: int) -> None:
    """Print where the time of some steps of the default layout and of `packed` goes, one step after another."""
    store, stepper = setting.make_store(folder / "tokens"), setting.make_stepper(device)
    names = ["data wait", *(name for _, _, name in PARTS), "other"]
    rows = []
    with begun(setting, store, folder, SPLIT, stepper, device) as epochs:
        for epoch in epochs:
            steps = min(most, epoch.steps)
            if device.type == "cuda":  # one after another, so that kernels are compiled
                race([epoch], stepper, device)
                epoch.again()
            clock = Clock()
            with clock.wrapping(PARTS):
                for _ in range(steps):
                    with clock.time("other"):
                        epoch.take_step(stepper, device)
            found = clock.seconds | {"data wait": epoch.waited, "other": clock.seconds["other"] - epoch.waited}
            total = sum(found.values())
            rows.append([epoch.name, f"{steps}", f"{total / steps:.2f}"])
            rows[-1] += [f"{found.get(name, 0) / total:.1%}" for name in names]
            if device.type == "cuda":
                rows[-1].append(f"{busy_share(epoch, stepper, device):.1%}")
    headings = ["layout", "steps", "seconds a step", *names] + (["GPU busy"] if device.type == "cuda" else [])
    print_table(f"Where a step's time goes; {describe(setting)}", headings, rows)


def busy_share(epoch: Epoch, stepper: Stepper, device: torch.device) -> float:
    """The share of a step's time during which a kernel runs, unclocked."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        began = time.perf_counter()
        epoch.take_step(stepper, device)
        seconds = time.perf_counter() - began
    spans = sorted((event.time_range.start, event.time_range.end) for event in profiler.events())
    busy, reached = 0.0, 0.0
    for start, end in spans:  # kernels of several streams overlap
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy / 1e6 / seconds


def describe(setting: Setting) -> str:
    """Target, draft and machine."""
    target = setting.target or default_target().name
    return f"{target}, {setting.layers} layers, {str(setting.dtype).removeprefix('torch.')}; {machine()}"
