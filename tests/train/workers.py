"""What tests run in several processes."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from dflash_prep.manifest import Plan
from dflash_prep.store import Store
from dflash_trainer.config import derive_config
from dflash_trainer.draft import DraftModel
from dflash_trainer.launch import join
from dflash_trainer.prefetch import BatchPrefetcher
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
