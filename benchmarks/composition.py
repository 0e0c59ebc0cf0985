"""Does it matter who shares a step? Small drafts, trained on the same tokens by layouts that differ in nothing else.

The same samples, epochs, anchors and initial weights for each layout and seed, and about the same number of steps: a layout
that pads is given a larger token budget until its epoch has no more steps than that of `packed`. In the corpus, lengths go
with content (a source's samples are of like length), so steps of like length are steps of like content. `sorted` has the
same neighbours in every epoch, `bucketed` new ones of like length, `packed` draws each step from all lengths.

To be done in minutes on two cores, the target's features are computed once and kept in memory, and the vocabulary is cut to
the tokens that occur, which makes the loss lower than it is in earnest. What is compared is the hold-out loss and expected
acceptance at the end; a difference is shown as mean and standard deviation over the seeds of (layout − sorted) with the same
seed, which has the same initial weights and anchors.
"""

import time
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np
import torch
from rich.progress import track
from show import machine, print_table
from throughput import Setting
from torch.nn import functional as F

from dflash_prep.manifest import Plan
from dflash_prep.stores import Stores
from dflash_prep.tokenizer import load_tokenizer
from dflash_trainer.config import DraftConfig, derive_config
from dflash_trainer.draft import DraftModel
from dflash_trainer.launch import Ranks
from dflash_trainer.mask_token import choose_mask_token
from dflash_trainer.micro_batch import MicroBatch, Sample, assemble
from dflash_trainer.prefetch import BatchPrefetcher
from dflash_trainer.shapes import shapes_for
from dflash_trainer.step import Recipe, Stepper
from dflash_trainer.target import FrozenTarget, load_target
from dflash_trainer.validation import validate

LAYOUTS = {"sorted": {"strategy": "sorted"}, "bucketed": {}, "packed": {"strategy": "packed"}}
LEARNING_RATE, HOLDOUT = 2e-3, 0.15
BUDGETS = [1 + 0.04 * growth for growth in range(16)]  # tried in turn, in the setting's token budget


class Result(NamedTuple):
    """One training's end."""

    loss: float
    acceptance: float


class CutTarget:
    """A target whose features are known for each sample, with the rows of its vocabulary that are used."""

    windows = frozenset()  # it attends to nothing

    def __init__(self, table: torch.Tensor, head: torch.Tensor, features: list[torch.Tensor]):
        self.head, self._table, self._features = head, table, features

    def features(self, batch: MicroBatch) -> torch.Tensor:
        """Of the samples of a micro-batch, one after another."""
        known = torch.cat([self._features[sample] for sample in batch.samples])
        return F.pad(known, (0, 0, 0, len(batch.real) - len(known)))

    def stand_by(self) -> None:
        """Nothing is sharded."""

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of renumbered tokens."""
        return self._table[tokens]


class CutStore:
    """A store whose token ids are renumbered to those that occur."""

    def __init__(self, store: Stores, used: np.ndarray):
        self._store, self._used = store, used

    def __len__(self) -> int:
        return len(self._store)

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """As the store has it, but for the ids."""
        ids, spans = self._store.sample(index)
        return np.searchsorted(self._used, ids).astype(np.uint32), spans


class Bench(NamedTuple):
    """What every training works on."""

    store: CutStore
    target: CutTarget
    config: DraftConfig


def prepare(setting: Setting, store: Stores, device: torch.device) -> Bench:
    """Run the target over every sample once and cut its vocabulary."""
    model = load_target(setting.target, setting.dtype, device)
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    mask = choose_mask_token(load_tokenizer(setting.target), store, len(table), None)
    used = np.unique(np.concatenate([*(store.sample(index)[0] for index in range(len(store))), [mask]])).astype(np.int64)
    config = derive_config(
        model.config.get_text_config(),
        block_size=setting.block_size,
        mask_token_id=mask,
        overrides={"num_hidden_layers": setting.layers},
    )
    target = FrozenTarget(model, config.target_layer_ids)
    nothing, features = np.empty(0, np.int64), []
    for index in track(range(len(store)), "the target's features"):
        ids = store.sample(index)[0]
        sample = Sample(ids, nothing.astype(np.uint32), nothing)
        batch = assemble([sample], packed=False, width=len(ids), block_size=setting.block_size)
        features.append(target.features(batch.to(device)))
    rows = torch.from_numpy(used).to(device)
    cut = replace(config, vocab_size=len(used), mask_token_id=int(np.searchsorted(used, mask)))
    return Bench(CutStore(store, used), CutTarget(table[rows].clone(), head[rows].clone(), features), cut)


def make_plans(setting: Setting, store: Stores, folder: Path, seed: int, epochs: int) -> dict[str, Plan]:
    """A plan for each layout, with as many steps as `packed` has or, where no token budget gives that, as near as can be."""
    options = {"epochs": epochs, "seed": seed, "holdout": HOLDOUT}
    plans = {}
    for name in ("packed", "bucketed", "sorted"):
        for budget in BUDGETS if plans else BUDGETS[:1]:
            output = folder / f"plan-{seed}-{name}-{budget}"
            tokens = round(setting.token_budget * budget)
            plan = setting.make_plan(store, output, token_budget=tokens, **options, **LAYOUTS[name])
            if name not in plans or plan.total_steps < plans[name].total_steps:
                plans[name] = plan
            if plan.total_steps <= plans["packed"].total_steps:
                break
    return plans


def train(bench: Bench, plan: Plan, dtype: torch.dtype, device: torch.device) -> Result:
    """Train a draft on a plan from its seed's initial weights to the end, and validate it."""
    draft = DraftModel(bench.config).initialise(plan["seed"]).to(device)
    shapes = shapes_for(plan, device, False, (bench.target.windows, frozenset(bench.config.windows)))
    stepper = Stepper(draft, bench.target, Recipe(LEARNING_RATE, dtype=dtype), plan.total_steps)
    batches = BatchPrefetcher(plan, bench.store, device=device, shapes=shapes)
    for step in range(plan.total_steps):
        stepper.step(step, [next(batches).to(device) for _ in range(plan["slots"])])
    batches.close()
    found = validate(plan, bench.store, stepper, Ranks(0, 1, device), shapes)
    return Result(found.loss, found.expected_acceptance)


def composition(setting: Setting, folder: Path, device: torch.device, seeds: int, epochs: int) -> None:
    """Train every layout with every seed, by turns, and print what came of it."""
    began = time.perf_counter()
    store = setting.make_store(folder / "tokens")
    bench = prepare(setting, store, device)
    results: dict[str, list[Result]] = {name: [] for name in LAYOUTS}
    for seed in range(seeds):
        plans = make_plans(setting, store, folder, seed, epochs)
        for name in LAYOUTS:
            results[name].append(train(bench, plans[name], setting.dtype, device))
            print(f"seed {seed}, {name}: {results[name][-1]}, {time.perf_counter() - began:.0f} s", flush=True)
    rows = [[name, *describe_plan(plans[name]), *describe_results(results, name)] for name in LAYOUTS]
    tokens = plans["packed"]["epochs"][0]["tokens"]
    title = (
        f"{seeds} seeds, {epochs} epochs of {tokens:,} tokens, {setting.slots} slots a step, blocks of {setting.block_size}"
    )
    title += f", {setting.layers} layers, {bench.config.vocab_size:,} tokens of vocabulary; {machine()}"
    headings = ["layout", "steps", "tokens a step", "design effect", "hold-out loss", "less sorted's"]
    print_table(title, [*headings, "expected acceptance", "less sorted's"], rows)
    print(f"{time.perf_counter() - began:.0f} s in all")


def describe_plan(plan: Plan) -> list[str]:
    """Steps, real tokens a step, and how far its steps are from a full shuffle (1)."""
    tokens = sum(epoch["tokens"] for epoch in plan["epochs"]) / plan.total_steps
    return [f"{plan.total_steps}", f"{tokens:,.0f}", f"{plan['certificate']['design_effect']:.2f}"]


def describe_results(results: dict[str, list[Result]], name: str) -> list[str]:
    """Means over seeds ± standard deviation, also of the difference to `sorted` seed by seed."""
    cells = []
    for field in Result._fields:
        own, base = ([getattr(result, field) for result in results[each]] for each in (name, "sorted"))
        cells.append(spread(own))
        cells.append(spread([mine - theirs for mine, theirs in zip(own, base, strict=True)]) if name != "sorted" else "")
    return cells


def spread(values: list[float]) -> str:
    """Mean ± standard deviation."""
    return f"{mean(values):.4f} ± {stdev(values) if len(values) > 1 else 0:.4f}"
