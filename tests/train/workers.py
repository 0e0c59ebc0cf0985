"""What tests run in several processes."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from dflash_prep.manifest import Plan
from dflash_prep.store import Store
from dflash_trainer.cli import train
from dflash_trainer.config import derive_config
from dflash_trainer.draft import DraftModel
from dflash_trainer.launch import join
from dflash_trainer.micro_batch import MicroBatch
from dflash_trainer.prefetch import BatchPrefetcher
from dflash_trainer.sharding import place
from dflash_trainer.step import Recipe, Stepper
from dflash_trainer.target import FrozenTarget


def write_gradient(plan_path: Path, store_path: Path, target_dir: Path, output: Path) -> None:
    """The float64 gradient of a plan's first step, over all processes."""
    ranks = join()
    plan, store = Plan(plan_path), Store(store_path)
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float64)
    config = derive_config(model.config, block_size=plan["block_size"], mask_token_id=259, taps=(1, 3))
    stepper = Stepper(DraftModel(config).initialise(1).double(), FrozenTarget(model, (1, 3)), Recipe(), plan.total_steps)
    batches = BatchPrefetcher(plan, store, rank=ranks.rank, world_size=ranks.world_size)
    buffer = stepper.gradient([next(batches) for _ in range(plan["slots"] // ranks.world_size)])
    batches.close()
    if ranks.leads:
        save_file({"gradient": buffer.gradients.clone()}, output)
    if ranks.world_size > 1:
        torch.distributed.destroy_process_group()


def train_rank(arguments: list[str], rank: int, size: int, port: int, output: Path, fault: Callable | None) -> None:
    """One rank of `dflash-train`, in an environment as torchrun makes it; `fault(rank, batch)` before each micro-batch."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "localhost"} | {name: str(value) for name, value in names.items()})
    said = os.open(f"{output}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    if fault:
        watch_batches(lambda stepper, batch: fault(rank, stepper, batch))
    train(arguments)


def watch_batches(call: Callable[[Stepper, MicroBatch], None]) -> Callable:
    """Have `call` called after each micro-batch's gradient was added; returns what was there before."""
    before = Stepper.accumulate

    def accumulate(stepper: Stepper, batch: MicroBatch) -> None:
        before(stepper, batch)
        call(stepper, batch)

    Stepper.accumulate = accumulate
    return before


class Poison:
    """Spoils the gradient or the loss of micro-batches (step, slot)."""

    def __init__(self, *places: tuple[int, int], loss: bool = False, value: float = float("nan")):
        self.places, self.loss, self.value = places, loss, value

    def __call__(self, rank: int, stepper: Stepper, batch: MicroBatch) -> None:
        if batch.epoch == 0 and (batch.step, batch.slot) in self.places:
            if self.loss:
                stepper._buffer.totals[1] += self.value
            else:
                stepper._buffer.gradients[7] += self.value


def send_own(number: int) -> None:
    """Send this process a signal and give it time to arrive."""
    os.kill(os.getpid(), number)
    time.sleep(0.2)


class Die:
    """Strikes one rank in the midst of a step: it exits with a code or, negative, gets a signal."""

    def __init__(self, rank: int, step: int, code: int, epoch: int = 0):
        self.rank, self.step, self.code, self.epoch = rank, step, code, epoch

    def __call__(self, rank: int, stepper: Stepper, batch: MicroBatch) -> None:
        if (batch.epoch, batch.step) == (self.epoch, self.step) and rank == self.rank:
            if self.code < 0:
                send_own(-self.code)
            else:
                os._exit(self.code)


class Hang:
    """Blocks every rank for good in its first micro-batch, which the file `sign` tells."""

    def __init__(self, sign: Path):
        self.sign = sign

    def __call__(self, rank: int, stepper: Stepper, batch: MicroBatch) -> None:
        self.sign.touch()
        while True:
            time.sleep(1000)


class NoMemory:
    """One rank runs out of memory in its first micro-batch."""

    def __init__(self, rank: int):
        self.rank = rank

    def __call__(self, rank: int, stepper: Stepper, batch: MicroBatch) -> None:
        if rank == self.rank:
            raise torch.OutOfMemoryError("out of memory")


def compare_sharded(rank: int, port: int, output: Path) -> None:
    """One of two ranks: taps of each family's target whole and sharded, as `output/rank.json` says."""
    from test_families import FAMILIES, TAPS, batch, make

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    ranks, found = join(), {}
    for family in FAMILIES:
        one, other = batch([3, 17 - 9 * rank, 9], packed=False)[0], batch([5 + rank], packed=False)[0]
        whole, model = FrozenTarget(make(family), TAPS), make(family)
        embedding = model.get_input_embeddings().weight
        layers = sum(weight.numel() for weight in model.get_decoder().layers[: max(TAPS) + 1].parameters())
        sharded = FrozenTarget(model, TAPS, place=lambda model: place(model, ranks, sharded=True))
        equal = [torch.equal(whole.features(one), sharded.features(one))]
        if rank:
            sharded.stand_by()
        else:
            equal.append(torch.equal(whole.features(other), sharded.features(other)))
        equal += [torch.equal(whole.features(one), sharded.features(one))] * (1 + rank)
        kept = sum(weight.to_local().numel() for weight in model.get_decoder().layers.parameters())
        found[family] = {
            "equal": equal,
            "share": kept / layers,
            "tied_and_whole": model.get_input_embeddings().weight is embedding
            and (model.get_output_embeddings().weight is embedding) == model.config.tie_word_embeddings
            and torch.equal(whole.head, sharded.head)
            and torch.equal(whole.embed(one.input_ids), sharded.embed(one.input_ids)),
        }
    (output / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
