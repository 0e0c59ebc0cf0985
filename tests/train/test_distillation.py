"""Distillation: the target's own predictions are learnt, at the right places, whatever the layout and the ranks."""

import json

import pytest
import torch
from conftest import reported, same_tensors, state_of
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dflash_prep.anchors import draw_anchors
from dflash_trainer.blocks import loss_mask, slot_weights
from dflash_trainer.checkpoint import newest_checkpoint
from dflash_trainer.config import derive_config
from dflash_trainer.draft import DraftModel
from dflash_trainer.objective import SHARES, block_loss
from dflash_trainer.prefetch import make_micro_batch, planned_anchors
from dflash_trainer.step import Recipe, Stepper
from dflash_trainer.target import FrozenTarget
from tests.train.reference import block_hidden, sample_features

TAPS, BLOCK = (1, 3), 4


def load(target_dir, whole: bool):
    """The target in float64 as transformers has it, a draft for it, and the target as training cuts it."""
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float64)
    config = derive_config(model.config, block_size=BLOCK, mask_token_id=259, overrides={"num_hidden_layers": 2}, taps=TAPS)
    cut = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float64)
    return model, DraftModel(config).initialise(3).double(), FrozenTarget(cut, TAPS, whole=whole)


def divergence(draft, weights, model, sample, mask, anchor, features, logits):
    """Σ w · KL(target ‖ draft) of one block, the slow way; logits: the target's own of the whole sample."""
    tokens = torch.tensor([int(sample[anchor])] + [draft.config.mask_token_id] * (BLOCK - 1))
    hidden = block_hidden(draft, weights, features, model.get_input_embeddings()(tokens).detach(), anchor)
    total = 0.0
    for k, weight in enumerate(slot_weights(BLOCK), start=1):
        if anchor + k >= len(sample) or not mask[anchor + k]:
            break
        said = (hidden[k] @ model.get_output_embeddings().weight.detach().T).log_softmax(-1)
        total = total + weight * F.kl_div(said, logits[anchor + k - 1].log_softmax(-1), reduction="sum", log_target=True)
    return total


@pytest.mark.parametrize("strategy", ["packed", "bucketed"])
def test_gradient_equals_the_plain_reference(strategy, target_dir, store, make_plan):
    plan = make_plan(strategy=strategy, anchor_density=1.0, max_anchors=6, token_budget=300)
    model, draft, target = load(target_dir, whole=True)
    row = next(row for row in plan.rows(0) if len(row["samples"]) > 1)
    weights = {name: value.detach().clone().requires_grad_() for name, value in draft.named_parameters()}
    expected = 0.0
    for sample in row["samples"]:
        ids, spans = store.sample(sample)
        features = sample_features(model, ids.tolist(), TAPS)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids.tolist()])).logits[0]
        for anchor in draw_anchors(spans, planned_anchors(spans, plan), plan["seed"], 0, sample).tolist():
            mask = loss_mask(spans, len(ids))
            expected = expected + divergence(draft, weights, model, ids, mask, anchor, features, logits)
    expected.backward()
    found = block_loss(draft, target, make_micro_batch(row, 0, plan, store), SHARES["kd"])
    found.total.backward()
    assert found.total.item() == pytest.approx(expected.item(), rel=1e-10)
    gradient, slow = (
        torch.cat([part.flatten() for part in parts])
        for parts in ([p.grad for p in draft.parameters()], [weights[n].grad for n, _ in draft.named_parameters()])
    )
    assert (gradient - slow).norm() <= 1e-9 * slow.norm()


def test_mix_is_half_of_each(target_dir, store, make_plan):
    plan = make_plan(strategy="packed")
    _, draft, target = load(target_dir, whole=True)
    batch = make_micro_batch(next(plan.rows(0)), 0, plan, store)
    ce, kd, mix = (block_loss(draft, target, batch, SHARES[name]) for name in ("ce", "kd", "mix"))
    assert mix.total.item() == pytest.approx((ce.total.item() + kd.total.item()) / 2, rel=1e-12)
    assert ce.total.item() == pytest.approx(kd.cross_entropy.item(), rel=1e-12)
    assert torch.equal(ce.hits, kd.hits)


def test_layers_that_a_loss_does_not_need_are_not_kept(target_dir):
    for whole, layers in ((False, max(TAPS) + 1), (True, 6)):
        target = load(target_dir, whole)[2]
        assert len(target._decoder.layers) == layers


@pytest.mark.parametrize("loss", ["kd", "mix"])
def test_a_run_is_the_same_on_two_ranks_and_after_a_resume(loss, make_plan, run_ranks, train_here, tmp_path):
    plan = make_plan(strategy="packed", holdout=0.1)
    assert train_here(plan, tmp_path / "one", "--loss", loss, "--max-steps", "4").exit_code == 0
    assert run_ranks(plan, tmp_path / "two", "--loss", loss, "--max-steps", "4", "--shard-target")[0] == 0
    losses = [[row["loss"] for row in reported(tmp_path / name)] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert train_here(plan, tmp_path / "half", "--loss", loss, "--max-steps", "2").exit_code == 0
    assert train_here(plan, tmp_path / "half", "--loss", loss, "--max-steps", "4", "--resume", "auto").exit_code == 0
    assert same_tensors(tmp_path / "one", tmp_path / "half")
    other = train_here(plan, tmp_path / "half", "--max-steps", "5", "--resume", "auto")
    assert other.exit_code == 1
    assert f"--loss {loss}" in other.output
    assert state_of(newest_checkpoint(tmp_path / "one"))["recipe"]["loss"] == loss


def test_a_target_that_scales_its_logits_is_refused(make_plan, target_dir, draft_json, train_here, tmp_path):
    """The loss would be another than the target's own."""
    path = tmp_path / "granite"
    path.mkdir()
    for file in target_dir.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"logits_scaling": 8.0}))
    done = train_here(make_plan(), tmp_path / "run", "--target", str(path), "--loss", "kd")
    assert done.exit_code == 1
    assert "scales its logits (logits_scaling 8.0)" in done.output


def test_training_on_the_targets_words_lowers_the_divergence(make_plan, store):
    """A draft learns what it is taught: some steps on one micro-batch."""
    plan = make_plan(strategy="packed")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=264, **sizes, initializer_range=0.2))
    config = derive_config(model.config, block_size=BLOCK, mask_token_id=259, overrides={"num_hidden_layers": 2}, taps=TAPS)
    target = FrozenTarget(model.requires_grad_(False), TAPS, whole=True)
    stepper = Stepper(DraftModel(config).initialise(0), target, Recipe(3e-3, warmup=0, loss="kd"), 40)
    batch = make_micro_batch(next(plan.rows(0)), 0, plan, store)
    losses = [stepper.step(step, [batch]).loss for step in range(40)]
    assert losses[-1] < 0.5 * losses[0]
