"""Where the target's weights lie: whole on this rank's device, or its layers sharded over all ranks.

A target that no GPU holds is spread with torch's FSDP2 (`fully_shard`, arXiv 2304.11277): each rank keeps a part of every
decoder layer, a layer is gathered just before it runs and dropped right after. A gathered layer has the bits of the whole
one, so a run is the same either way. Embedding, final norm and LM head stay whole: the draft uses them between the target's
passes, where ranks are not in step.

A layer is gathered by all ranks or by none, so they all have to run the target equally often. A rank that has nothing to
run it on takes `stand_in`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from dflash_trainer.launch import Ranks, others_needed, refuse_together
from dflash_trainer.micro_batch import MicroBatch, Sample, assemble


def place(model: nn.Module, ranks: Ranks, *, sharded: bool) -> None:
    """Bring what a target computes with from the CPU to this rank's device, whole or `sharded`.

    Other parts of the model (a vision tower) stay where they are. A lack of memory is a user error, on all ranks.
    """
    fault = None
    try:
        if sharded:
            shard(model, ranks)
        else:
            move(ranks.device, model.get_decoder(), model.get_output_embeddings())
    except torch.OutOfMemoryError:
        remedy = "use more workers" if sharded else "spread it over several with --shard-target"
        fault = f"the target does not fit the memory of {ranks.device}; {remedy}, or try --target-dtype bfloat16"
    refuse_together(fault, ranks)


def shard(model: nn.Module, ranks: Ranks) -> None:
    """Spread a target's decoder layers over the ranks; no more than one layer is whole on a device at a time."""
    decoder, mesh = model.get_decoder(), init_device_mesh(ranks.device.type, (ranks.world_size,))
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    whole = set(decoder.parameters()) - set(decoder.layers.parameters())
    fully_shard(decoder, mesh=mesh, ignored_params=whole)  # a common root lets a layer be gathered while another computes
    move(ranks.device, model.get_input_embeddings(), decoder.norm, model.get_output_embeddings())


def move(device: torch.device, *modules: nn.Module) -> None:
    """Bring modules to a device; weights that they share stay shared."""
    for module in modules:
        module.to(device)


def is_sharded(decoder: nn.Module) -> bool:
    """Whether a decoder's layers are spread over the ranks."""
    return isinstance(decoder, FSDPModule)


@contextmanager
def in_step() -> Iterator[None]:
    """While a sharded target runs: a rank that has died is a fault in one line on all others; other faults stay as they are.

    gloo says it by a RuntimeError like any other, but names its source file.
    """
    try:
        yield
    except RuntimeError as fault:
        if not isinstance(fault, dist.DistError) and "gloo" not in str(fault):
            raise
        with others_needed():
            raise


def stand_in() -> MicroBatch:
    """One token without an anchor: the least that a target runs on."""
    nothing = np.empty(0, np.int64)
    return assemble([Sample(np.zeros(1, np.uint32), nothing, nothing)], packed=False, width=1, block_size=2)
