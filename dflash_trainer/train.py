"""A training run: open the plan, its store and the target, then take the plan's steps one by one."""

import time
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch.distributed as dist

from dflash_prep.errors import UserError
from dflash_prep.manifest import Plan
from dflash_prep.store import Store
from dflash_prep.tokenizer import load_tokenizer
from dflash_prep.verify import open_store
from dflash_trainer.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from dflash_trainer.config import DraftConfig, derive_config, read_overrides
from dflash_trainer.draft import DraftModel
from dflash_trainer.launch import Ranks, join, launch, world_size
from dflash_trainer.mask_token import choose_mask_token
from dflash_trainer.monitor import Monitor
from dflash_trainer.prefetch import BatchPrefetcher
from dflash_trainer.step import Recipe, Stepper
from dflash_trainer.target import FrozenTarget, load_target


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What the user asked for; see `dflash-train --help`."""

    manifest_dir: Path = Path("data/manifests")
    data: Path | None = None
    target: str | None = None
    output: Path | None = None
    draft_config: Path | None = None
    taps: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    max_steps: int | None = None
    save_every: int = 500
    resume: str | None = None
    recipe: Recipe


def start(options: TrainOptions, nproc_per_node: int | None) -> Path:
    """Check the input, then train on as many workers as there are; returns the run's directory."""
    workers = world_size(nproc_per_node)
    options = place_run(options)
    check_inputs(options, workers)
    launch(run_worker, (options,), workers)
    return options.output


def place_run(options: TrainOptions) -> TrainOptions:
    """Settle the run's directory and the checkpoint that it goes on from, if any."""
    output, resume = options.output, options.resume
    if resume == "auto":
        output = output or max(Path("runs").glob("*"), default=None)
        resume = newest_checkpoint(output) if output else None
    elif resume is not None:
        named = Path(resume)
        resume = named if (named / "trainer.json").is_file() else newest_checkpoint(named)
        if resume is None:
            raise UserError(f"{named}: no checkpoint here; name a run or a checkpoint of one")
        output = output or resume.parent.parent
    elif output is not None and newest_checkpoint(output):
        raise UserError(f"{output}: holds a run; go on with --resume auto or choose another with -o")
    output = output or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    return replace(options, output=output, resume=str(resume) if resume else None)


def check_inputs(options: TrainOptions, workers: int) -> tuple[Plan, Store]:
    """Everything that can be refused before a worker starts."""
    plan = Plan(options.manifest_dir)
    store = open_store(plan, options.data)
    if plan["slots"] % workers:
        raise UserError(
            f"{plan.path}: its steps have {plan['slots']} slots, which {workers} workers do not divide; "
            f"use another --nproc-per-node or plan with --slots"
        )
    tokenizer = load_tokenizer(options.target)
    if tokenizer.fingerprint != store.manifest["tokenizer"]["fingerprint"]:
        raise UserError(
            f"{store.path}: was tokenized with {store.manifest['tokenizer']['name']}, not with the tokenizer of the "
            f"target {tokenizer.name}; tokenize it with --tokenizer {options.target or 'left out'}"
        )
    read_overrides(options.draft_config)
    return plan, store


def run_worker(options: TrainOptions) -> None:
    """One worker's whole run."""
    ranks = join()
    try:
        train(options, ranks)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def train(options: TrainOptions, ranks: Ranks) -> None:
    """Train from the first step, or from a checkpoint's, to the plan's end or to `--max-steps`."""
    plan, store = check_inputs(options, ranks.world_size)
    model = load_target(options.target, options.recipe.dtype, ranks.device)
    config = draft_config(options, model, plan, store)
    target = FrozenTarget(model, config.target_layer_ids)
    draft = DraftModel(config).initialise(plan["seed"]).to(ranks.device)
    stepper = Stepper(draft, target, options.recipe, plan.total_steps)
    first = 0
    if options.resume:
        expected = {"plan_fingerprint": plan["fingerprint"], "store_fingerprint": store.fingerprint}
        first = load_checkpoint(Path(options.resume), draft, stepper.optimizer, expected)["step"]
    last = min(plan.total_steps, options.max_steps if options.max_steps is not None else plan.total_steps)
    take_steps(options, ranks, plan, store, stepper, first, last)


def draft_config(options: TrainOptions, model, plan: Plan, store: Store) -> DraftConfig:
    """The draft's configuration for this target, plan and store."""
    overrides = read_overrides(options.draft_config)
    rows = model.get_input_embeddings().weight.shape[0]
    requested = options.mask_token_id if options.mask_token_id is not None else overrides.pop("mask_token_id", None)
    return derive_config(
        model.config.get_text_config(),
        block_size=plan["block_size"],
        mask_token_id=choose_mask_token(load_tokenizer(options.target), store, rows, requested),
        overrides=overrides,
        taps=options.taps,
    )


def take_steps(
    options: TrainOptions, ranks: Ranks, plan: Plan, store: Store, stepper: Stepper, first: int, last: int
) -> None:
    """The loop: this rank's micro-batches of each step, the step, its report, and a checkpoint now and then."""
    batches = BatchPrefetcher(plan, store, rank=ranks.rank, world_size=ranks.world_size, first_step=first)
    monitor = Monitor(options.output, first, last) if ranks.leads else None
    per_step = plan["slots"] // ranks.world_size
    try:
        for number in range(first, last):
            began = time.perf_counter()
            own = [batch.to(ranks.device) for batch in islice(batches, per_step)]
            waited = time.perf_counter() - began
            result = stepper.step(number, own)
            if monitor:
                monitor.report(
                    number + 1,
                    result,
                    seconds=time.perf_counter() - began,
                    waited=waited,
                    lr=stepper.learning_rate(number),
                    epoch=batches.epoch,
                    progress=batches.epoch_progress,
                )
            if ranks.leads and (number + 1) % options.save_every == 0 and number + 1 < last:
                save(options, plan, store, stepper, number + 1)
        if ranks.leads and (last > first or not options.resume):
            save(options, plan, store, stepper, last)
    finally:
        batches.close()
        if monitor:
            monitor.close()


def save(options: TrainOptions, plan: Plan, store: Store, stepper: Stepper, step: int) -> None:
    """Write the checkpoint after `step` updates."""
    epoch, _ = plan.locate(step)
    state = {
        "epoch": epoch,
        "step": step,
        "plan_fingerprint": plan["fingerprint"],
        "store_fingerprint": store.fingerprint,
        "seed": plan["seed"],
        "target": options.target or "default",
        "total_steps": plan.total_steps,
    }
    save_checkpoint(options.output, stepper.draft, stepper.optimizer, state)
