"""The loop of a run: step after step, with reports and checkpoints, to the end or to where it has to stop."""

import time
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NoReturn

from dflash_prep.errors import UserError
from dflash_prep.manifest import Plan
from dflash_prep.stores import Stores
from dflash_trainer.cached_target import CachedTarget
from dflash_trainer.checkpoint import checkpoint_path, save_checkpoint
from dflash_trainer.launch import Ranks, collect_together
from dflash_trainer.micro_batch import MicroBatch
from dflash_trainer.monitor import Monitor
from dflash_trainer.prefetch import BatchPrefetcher
from dflash_trainer.shapes import Shapes
from dflash_trainer.step import Stepper
from dflash_trainer.stop import StopRequest
from dflash_trainer.validation import validate
from dflash_trainer.wandb_log import WandbLog

if TYPE_CHECKING:
    from dflash_trainer.train import TrainOptions

NAMED = 8  # samples in an error


@dataclass(frozen=True)
class Run:
    """What one rank of a run works with; `identity` is what its checkpoints say of it."""

    options: "TrainOptions"
    ranks: Ranks
    plan: Plan
    store: Stores
    stepper: Stepper
    identity: dict
    shapes: Shapes | None = None
    cache: CachedTarget | None = None

    def validates_after(self, step: int, last: int) -> bool:
        """Whether the hold-out's turn comes after so many steps; it does after the last."""
        every = self.options.eval_every or self.options.save_every
        return bool(self.plan["holdout_set"]) and (step % every == 0 or step == last)

    def monitor(self, first: int, last: int) -> Monitor:
        """What reports the steps between two."""
        wandb = WandbLog(self.options.output, first, self.identity) if self.options.wandb else None
        return Monitor(self.options.output, first, last, self.plan.total_steps, wandb)

    def save(self, step: int) -> None:
        """Write the checkpoint after `step` steps, if this rank leads; before it, on every rank, what is to be cached."""
        if self.cache:
            self.cache.keep()
        if not self.ranks.leads:
            return
        epoch, _ = self.plan.locate(step)
        state = {
            "epoch": epoch,
            "step": step,
            "updates": step - self.stepper.bad_steps,  # AdamW's own count
            "bad_steps": self.stepper.bad_steps,
            "bad_in_a_row": self.stepper.bad_in_a_row,
            "seed": self.plan["seed"],
            "target": self.options.target or "default",
            "target_dtype": str(self.options.target_dtype).removeprefix("torch."),
            "hidden_cache": self.cache is not None,
            **self.identity,
        }
        save_checkpoint(self.options.output, self.stepper.draft, self.stepper.optimizer, state, self.options.keep)


def take_steps(run: Run, first: int, last: int, stop: StopRequest) -> int | None:
    """Take this rank's micro-batches of each step, the step, its report, and a checkpoint now and then.

    Returns the number of steps after which it stopped because it was asked to, None if it reached `last`.
    """
    options, ranks, stepper = run.options, run.ranks, run.stepper
    place = {"rank": ranks.rank, "world_size": ranks.world_size, "device": ranks.device}
    if run.cache:
        place["finish"] = run.cache.attach
    batches = BatchPrefetcher(run.plan, run.store, **place, first_step=first, shapes=run.shapes)
    monitor = run.monitor(first, last) if ranks.leads else None
    per_step = run.plan["slots"] // ranks.world_size
    done = first
    try:
        while done < last and not stepper.stopping:
            began = time.perf_counter()
            own = list(islice(batches, per_step))
            waited = time.perf_counter() - began
            result = stepper.step(done, own, stop.asked, waited)
            seconds = time.perf_counter() - began
            done += 1
            if monitor:
                monitor.report(done, result, batches, seconds=seconds, lr=stepper.learning_rate(done - 1))
            if stepper.bad_in_a_row >= options.max_bad_steps:
                give_up(run, done, own)
            if run.cache and run.plan.locate(done)[1] == 0:
                run.cache.turn()
            if run.validates_after(done, last) and not stepper.stopping:
                found = validate(run.plan, run.store, stepper, ranks, run.shapes)
                if monitor:
                    monitor.validated(done, found)
            if done % options.save_every == 0 and done < last and not stepper.stopping:
                run.save(done)
        if done > first or not checkpoint_path(options.output, done).exists():
            run.save(done)
    finally:
        batches.close()
        if monitor:
            monitor.close()
    return done if done < last else None


def give_up(run: Run, step: int, own: list[MicroBatch]) -> NoReturn:
    """End the run on every rank after too many bad steps, with a checkpoint from which it can go on behind them.

    The checkpoint is whole before any rank fails: a launcher ends the others then.
    """
    stepper = run.stepper
    row, stepper.bad_in_a_row = stepper.bad_in_a_row, 0
    run.save(step)
    bad = [(batch.slot, batch.samples) for batch in stepper.bad_slots(own)]
    slots = sorted(slot for found in collect_together(bad, run.ranks) for slot in found)
    samples = [sample for _, members in slots for sample in members]
    named = ", ".join(map(str, samples[:NAMED])) + (" …" if len(samples) > NAMED else "")
    where = f"of samples {named}" if samples else "of the sum over all slots"
    raise UserError(
        f"step {step}: the loss or gradient {where} is not finite, in {row} steps in a row; the last good state is in "
        f"{checkpoint_path(run.options.output, step)}: look at the samples and go on with --resume auto, or train anew "
        "with a lower --lr"
    )
