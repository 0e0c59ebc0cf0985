"""How many real tokens a second each layout trains, and where a step's time goes.

The same samples for all, each layout's whole epoch, whole steps: target, draft, loss, backward, reduction, optimizer. The
layouts take their steps by turns, whoever is furthest behind first, so that a slow moment of the machine meets each alike.
Only what a layout waits for its batches is a little flattered by that: they are read ahead while the others compute.
`shuffled` is the story's: as drawn, each micro-batch padded to its longest sample.
"""

import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from clock import Clock
from show import machine, print_table
from work import per_anchor, per_token, product_rate

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
    samples: int = 120  # records read, taken at random
    max_length: int = 512
    token_budget: int = 1024
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
    """A layout on its way through its epoch."""

    name: str
    plan: Plan
    batches: BatchPrefetcher
    seconds: float = 0.0
    waited: float = 0.0
    results: list[StepResult] = field(default_factory=list)

    @property
    def progress(self) -> float:
        """The share of the epoch that is done."""
        return len(self.results) / self.plan.total_steps

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


def begin(setting: Setting, store: Stores, folder: Path, names: list[str], epochs_planned: int = 1) -> list[Epoch]:
    """Plan each layout."""
    epochs = []
    for number, name in enumerate(names):
        plan = setting.make_plan(store, folder / f"plan-{number}", epochs=epochs_planned, **LAYOUTS[name])
        epochs.append(Epoch(name, plan, BatchPrefetcher(plan, store)))
    return epochs


def warm_up(stepper: Stepper, epochs: list[Epoch], store: Stores, device: torch.device) -> None:
    """Meet each layout's first micro-batch once."""
    for epoch in epochs:
        row = next(iter(epoch.plan.rows(0)))
        stepper.rehearse(make_micro_batch(row, 0, epoch.plan, store).to(device))


def strategies(setting: Setting, folder: Path, device: torch.device) -> None:
    """Print real tokens a second of every layout, and as ratios to `sorted`."""
    store, stepper = setting.make_store(folder / "tokens"), setting.make_stepper(device)
    epochs = begin(setting, store, folder, list(LAYOUTS))
    warm_up(stepper, epochs, store, device)
    while (behind := min(epochs, key=lambda epoch: epoch.progress)).progress < 1:
        behind.take_step(stepper, device)
    rate, length = product_rate(device, setting.dtype), store.column("length")
    weighted = float((length**2).sum() / length.sum())  # the length of the sample that a token is in
    config = stepper.draft.config
    base = next(epoch.total("tokens") / epoch.seconds for epoch in epochs if epoch.name == "sorted")
    rows = []
    for epoch in epochs:
        tokens, anchors = epoch.total("tokens"), epoch.total("anchors")
        work = tokens * per_token(stepper.target, config, weighted) + anchors * per_anchor(config, weighted)
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


def split(setting: Setting, folder: Path, device: torch.device, steps: int) -> None:
    """Print where the time of some steps of the default layout and of `packed` goes, one step after another."""
    store, stepper = setting.make_store(folder / "tokens"), setting.make_stepper(device)
    epochs = begin(setting, store, folder, list(SPLIT), 2)
    warm_up(stepper, epochs, store, device)
    names = ["data wait", *(name for _, _, name in PARTS), "other"]
    rows = []
    for epoch in epochs:
        clock, steps = Clock(), min(steps, epoch.plan["epochs"][0]["steps"])
        with clock.wrapping(PARTS):
            for _ in range(steps):
                with clock.time("other"):
                    epoch.take_step(stepper, device)
        found = clock.seconds | {"data wait": epoch.waited, "other": clock.seconds["other"] - epoch.waited}
        total = sum(found.values())
        rows.append([epoch.name, f"{total / steps:.2f}", *(f"{found.get(name, 0) / total:.1%}" for name in names)])
        if device.type == "cuda":
            rows[-1].append(f"{busy_share(epoch, stepper, device):.1%}")
    headings = ["layout", "seconds a step", *names] + (["GPU busy"] if device.type == "cuda" else [])
    print_table(f"Where a step's time goes, {steps} steps; {describe(setting)}", headings, rows)


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
