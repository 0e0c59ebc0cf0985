"""Processes: one worker a GPU through torch's elastic launcher, or joining those that `torchrun` started."""

import logging
import os
import uuid
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from dflash_prep.errors import UserError


class Ranks(NamedTuple):
    """This process's place among the workers."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.rank == 0


def under_torchrun() -> bool:
    """Whether a launcher started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size(requested: int | None) -> int:
    """How many workers there will be: as asked for, else one a visible GPU, else one."""
    if under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    if requested and gpus and requested > gpus:
        raise UserError(f"--nproc-per-node {requested}: only {gpus} GPUs are visible; ask for that many or fewer")
    return requested or max(1, gpus)


def launch(worker: Callable[..., None], arguments: tuple, workers: int) -> None:
    """Run `worker(*arguments)` once in each of `workers` processes, or here if there is one or `torchrun` made them."""
    if under_torchrun() or workers == 1:
        worker(*arguments)
        return
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for noisy in ("torch.distributed.elastic", "torch.multiprocessing"):  # what went wrong is said once, below
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
    )
    try:
        elastic_launch(config, worker)(*arguments)
    except ChildFailedError as fault:
        rank, failure = fault.get_first_failure()
        message = failure.message if isinstance(failure.message, str) else failure.message.get("message", "")
        last = message.strip().rsplit("\n", 1)[-1].removeprefix(f"{UserError.__name__}: ")
        raise UserError(f"worker {rank} failed: {last or 'see what it printed above'}") from None


def join() -> Ranks:
    """Join the other workers, NCCL on GPUs and gloo on CPUs; alone where nobody launched any."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not under_torchrun():
        return Ranks(0, 1, device)
    if device.type == "cpu":
        here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // here))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), device)
