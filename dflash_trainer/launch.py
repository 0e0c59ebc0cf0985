"""Processes: one worker a GPU through torch's elastic launcher, or joining those that `torchrun` started."""

import logging
import multiprocessing
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from dflash_prep.errors import UserError
from dflash_trainer.stop import ONE_EVENT, SIGNALS

T = TypeVar("T")


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


def check_environment() -> None:
    """Refuse a launcher's environment that is torn: these variables are set all together or not at all."""
    local = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in os.environ]
    for name in ("RANK", "WORLD_SIZE", *local, "MASTER_PORT", "MASTER_ADDR"):
        value = os.environ.get(name, "")
        if not value or (name != "MASTER_ADDR" and not value.isdecimal()):
            raise UserError(
                f"RANK and WORLD_SIZE are in the environment, but {name} is {value!r}: start with torchrun, or unset them"
            )
    rank, size, gpus = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.cuda.device_count()
    if rank >= size:
        raise UserError(f"RANK {rank} is not below WORLD_SIZE {size}: start with torchrun, or unset both")
    if gpus and int(os.environ.get("LOCAL_RANK", 0)) >= gpus:
        raise UserError(f"LOCAL_RANK {os.environ['LOCAL_RANK']}: only {gpus} GPUs are visible; start that many workers")


def world_size(requested: int | None) -> int:
    """How many workers there will be: as asked for, else one a visible GPU, else one."""
    if under_torchrun():
        check_environment()
        return int(os.environ["WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    if requested and gpus and requested > gpus:
        raise UserError(f"--nproc-per-node {requested}: only {gpus} GPUs are visible; ask for that many or fewer")
    return requested or max(1, gpus)


def launch(worker: Callable[..., None], arguments: tuple, workers: int) -> None:
    """Run `worker(*arguments)` once in each of `workers` processes, or here if there is one or `torchrun` made them.

    SIGTERM and SIGINT are passed on to the workers, which end when they see fit; a second one ends them.
    """
    if under_torchrun() or workers == 1:
        worker(*arguments)
        return
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    for name in list(logging.root.manager.loggerDict):  # each has a level of its own; what went wrong is said once, below
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with forwarded_signals() as seen:
        try:
            elastic_launch(launch_config(workers), attend)(os.getpid(), worker, arguments)
        except (SignalException, ChildFailedError) as fault:
            if isinstance(fault, SignalException) or ended_by_signal(fault, seen):
                name = signal.Signals(seen[0] if seen else fault.sigval).name
                raise UserError(f"stopped by {name}; go on with --resume auto") from None
            raise UserError(describe_failure(fault)) from None


def launch_config(workers: int):
    """One node, no restarts, and the signals that end a run left to us."""
    from torch.distributed.launcher.api import LaunchConfig

    ours = {}
    if "signals_to_handle" in LaunchConfig.__dataclass_fields__:  # older ones end the workers on every signal
        ours["signals_to_handle"] = "SIGHUP,SIGQUIT"
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
        **ours,
    )


def attend(parent: int, worker: Callable[..., None], arguments: tuple) -> None:
    """Run a worker; one whose parent has died meanwhile ends here, as nobody is left to dismiss it."""
    worker(*arguments)
    if os.getppid() != parent:
        os._exit(0)


@contextmanager
def forwarded_signals() -> Iterator[list[int]]:
    """Pass SIGTERM and SIGINT on to this process's workers, as SIGTERM, and end the launcher on a second one.

    Yields the list of what came.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    seen: list[int] = []
    began = 0.0

    def forward(number: int, _) -> None:
        nonlocal began
        if not seen:
            began = time.monotonic()
        elif time.monotonic() - began > ONE_EVENT:
            raise SignalException("a second signal", signal.Signals(number))
        seen.append(number)
        for process in multiprocessing.active_children():
            process.terminate()

    handlers = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield seen
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def ended_by_signal(fault, seen: list[int]) -> bool:
    """Whether a worker failed only because a signal reached it before it could wait for one, or a second time."""
    codes = [-number for number in SIGNALS] + [128 + number for number in SIGNALS]
    return bool(seen) and fault.get_first_failure()[1].exitcode in codes


def describe_failure(fault) -> str:
    """Which worker failed first, and why, in a line."""
    rank, failure = fault.get_first_failure()
    message = failure.message if isinstance(failure.message, str) else failure.message.get("message", "")
    last = message.strip().rsplit("\n", 1)[-1].removeprefix(f"{UserError.__name__}: ")
    if failure.error_file == "<N/A>" and failure.exitcode > 0:  # it left no word
        last = f"it ended with exit code {failure.exitcode}"
    return f"worker {rank} failed: {last or 'see what it printed above'}"


def join() -> Ranks:
    """Join the other workers, NCCL on GPUs and gloo on CPUs; alone where nobody launched any."""
    local = int(os.environ.get("LOCAL_RANK", 0)) if under_torchrun() else 0
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not under_torchrun():
        return Ranks(0, 1, device)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if device.type == "cpu" and here > 1:  # one alone has torch's own choice, which OMP_NUM_THREADS sets
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // here))
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    except (RuntimeError, ValueError) as fault:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(f"cannot join the other workers at {where} ({fault}); start them with torchrun") from None
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


def decide_together(decide: Callable[[], T], ranks: Ranks) -> T:
    """Rank 0's decision on every rank, or its refusal: no rank is left waiting for one that has stopped."""
    decision = [None, None]
    if ranks.leads:
        try:
            decision[0] = decide()
        except UserError as fault:
            decision[1] = str(fault)
        except OSError as fault:  # a directory that cannot be looked at or made
            decision[1] = f"{fault.filename}: {fault.strerror}; check the path and its permissions"
    if ranks.world_size > 1:
        with others_needed():
            dist.broadcast_object_list(decision)
    if decision[1] is not None:
        raise UserError(decision[1])
    return decision[0]


def refuse_together(fault: str | None, ranks: Ranks) -> None:
    """Raise on every rank what any has to refuse, the lowest rank's: no rank goes on while another has stopped."""
    for each in collect_together(fault, ranks):
        if each is not None:
            raise UserError(each)


def collect_together(value: T, ranks: Ranks) -> list[T]:
    """Every rank's value, in the order of the ranks."""
    values = [value] * ranks.world_size
    if ranks.world_size > 1:
        with others_needed():
            dist.all_gather_object(values, value)
    return values


@contextmanager
def others_needed() -> Iterator[None]:
    """While the ranks talk: one that has died is a fault in one line on all others."""
    try:
        yield
    except RuntimeError as fault:
        reason = str(fault).strip().split("\n", 1)[0]
        raise UserError(f"another worker has ended ({reason}); go on with --resume auto") from None
