"""What a step does with numbers that it must not learn from."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_trainer.config import derive_config
from dflash_trainer.draft import DraftModel
from dflash_trainer.prefetch import BatchPrefetcher
from dflash_trainer.step import Recipe, Stepper
from dflash_trainer.target import FrozenTarget


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(value, target_dir, store, make_plan):
    plan = make_plan()
    model = AutoModelForCausalLM.from_pretrained(target_dir)
    config = derive_config(model.config, block_size=4, mask_token_id=259, overrides={"num_hidden_layers": 2}, taps=(1, 3))
    draft = DraftModel(config).initialise(0)
    stepper = Stepper(draft, FrozenTarget(model, (1, 3)), Recipe(), plan.total_steps)
    batches = BatchPrefetcher(plan, store)
    step = [next(batches) for _ in range(plan["slots"])]
    batches.close()
    with torch.no_grad():
        draft.fc.weight[0, 0] = value
    before = [parameter.clone() for parameter in draft.parameters()]
    assert stepper.step(0, step).bad_steps == 1
    assert not stepper.optimizer.state
    for after, then in zip(draft.parameters(), before, strict=True):
        torch.testing.assert_close(after, then, rtol=0, atol=0, equal_nan=True)
