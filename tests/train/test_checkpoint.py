"""Checkpoints: what is damaged or of another run is refused; a full disk is one line."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from dflash_prep.errors import UserError
from dflash_trainer import checkpoint
from dflash_trainer.checkpoint import (
    load_checkpoint,
    load_draft,
    newest_checkpoint,
    save_checkpoint,
    save_draft,
    write_tensors,
)
from dflash_trainer.config import derive_config
from dflash_trainer.draft import DraftModel
from dflash_trainer.monitor import keep_lines

PLAN = {"plan_fingerprint": "p", "plan_options": "o", "plan_epochs": ["a", "b"], "total_steps": 9}
IDENTITY = {**PLAN, "recipe": {"lr": 0.1, "warmup": 0.0, "clip": 1.0}}
STATE = {"step": 3, "updates": 2, "bad_steps": 1, "bad_in_a_row": 1, **IDENTITY}
TARGET = LlamaConfig(vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=6, num_attention_heads=2)


def make_draft() -> tuple[DraftModel, torch.optim.AdamW]:
    config = derive_config(TARGET, block_size=4, mask_token_id=1, overrides={"num_hidden_layers": 1})
    draft = DraftModel(config).initialise(0)
    return draft, torch.optim.AdamW(draft.parameters())


@pytest.fixture
def saved(tmp_path):
    draft, optimizer = make_draft()
    for parameter in draft.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return save_checkpoint(tmp_path / "run", draft, optimizer, STATE, keep=3)


def refuse(path, **changes) -> str:
    with pytest.raises(UserError) as fault:
        load_checkpoint(path, *make_draft(), IDENTITY | changes)
    return str(fault.value)


def test_restores(saved):
    draft, optimizer = make_draft()
    assert load_checkpoint(saved, draft, optimizer, IDENTITY)["step"] == 3
    assert all(optimizer.state[parameter]["step"] == 2 for parameter in draft.parameters())


@pytest.mark.parametrize("step", [-1, 10, 4, 3.0, True, "3", None])
def test_steps_that_cannot_be(saved, step):
    state = json.loads((saved / "trainer.json").read_text())
    (saved / "trainer.json").write_text(json.dumps(state | {"step": step}))
    assert "trainer.json: has step" in refuse(saved)


@pytest.mark.parametrize("key", ["updates", "bad_steps", "bad_in_a_row"])
@pytest.mark.parametrize("value", [-1, 4, 0, 3.0, True, None])
def test_counts_that_cannot_be(saved, key, value):
    if (key, value) == ("bad_in_a_row", 0):
        return
    state = json.loads((saved / "trainer.json").read_text())
    (saved / "trainer.json").write_text(json.dumps(state | {key: value}))
    assert "which cannot be; it is damaged" in refuse(saved)


@pytest.mark.parametrize("name", ["master.fc.weight", "exp_avg.norm.weight", "exp_avg_sq.fc.weight"])
@pytest.mark.parametrize(
    "damage",
    [lambda x: None, lambda x: x[:1].clone(), lambda x: x.double(), lambda x: x.index_fill(0, torch.tensor(0), torch.nan)],
    ids=["missing", "shape", "type", "nan"],
)
def test_optimizer_states_that_are_damaged(saved, name, damage):
    tensors = load_file(saved / "optimizer.safetensors")
    tensors[name] = damage(tensors[name])
    save_file({key: value for key, value in tensors.items() if value is not None}, saved / "optimizer.safetensors")
    assert f"optimizer.safetensors: tensor {name}" in refuse(saved)


def test_another_run(saved):
    assert "another store fingerprint" in refuse(saved, store_fingerprint="q")
    line = refuse(saved, recipe={"lr": 0.2, "warmup": 0.0, "clip": 1.0})
    assert "go on with the same --lr 0.1 --warmup 0.0 --clip 1.0" in line


def test_only_checkpoints_are_taken_for_one(tmp_path):
    for name in ("step-00000002", "step-00000010", "step-99", "step-00000011.bak", "step-best"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000012").touch()
    assert newest_checkpoint(tmp_path).name == "step-00000010"


@pytest.mark.parametrize(
    ("words", "reason"),
    [("I/O error: No space left on device (os error 28)", "No space left on device"), ("something else", "something else")],
)
def test_a_full_disk(tmp_path, monkeypatch, words, reason):
    def fail(*_):
        raise checkpoint.SafetensorError(words)

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(OSError, match=reason):
        write_tensors({}, tmp_path / "x")
    with pytest.raises(UserError, match=f"cannot write: {reason}"):
        save_checkpoint(tmp_path / "run", *make_draft(), STATE, keep=3)
    assert newest_checkpoint(tmp_path / "run") is None


@pytest.mark.parametrize(
    "torn",
    [
        b'{"step": 2',
        b'{"step": 2\n',
        b"\0\0\0\n",
        b"\xff\n",
        b"[1]\n",
        b'{"step": "2"}\n',
        b"{}\n",
        b"\n",
        b"[" * 99999 + b"\n",
    ],
    ids=lambda value: repr(value[:12]),
)
def test_metrics_with_torn_lines(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + torn)
    assert keep_lines(path, 3).read_bytes() == b'{"step": 1}\n'
    path.write_bytes((torn if torn.endswith(b"\n") else b"") + b'{"step": 3}\n{"step": 4}\n')
    assert keep_lines(path, 3).read_bytes() == b'{"step": 3}\n'


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
def test_a_draft_with_other_tensors_is_neither_written_nor_read(fault, saved, tmp_path):
    """Servers pass over names that they do not know: a draft of other names would be served with random weights."""
    draft, _ = make_draft()
    tensors = load_file(saved / "model.safetensors")
    assert len(tensors) == 3 + 11 * draft.config.num_hidden_layers
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    name = "layers.0.self_attn.q_norm.weight"
    if fault == "missing":
        del tensors[name], draft.layers[0].self_attn.q_norm
    elif fault == "unknown":
        tensors["embed_tokens.weight"] = draft.embed_tokens = torch.nn.Parameter(torch.zeros(64, 8))
    else:
        tensors[name] = draft.layers[0].self_attn.q_norm.weight = torch.nn.Parameter(torch.ones(3))
    save_file({name: tensor.detach() for name, tensor in tensors.items()}, saved / "model.safetensors")
    (tmp_path / "other").mkdir()
    for act in (lambda: save_draft(draft, tmp_path / "other"), lambda: load_draft(saved, torch.float32)):
        with pytest.raises(UserError, match="is missing, unknown or of another shape"):
            act()
    assert not any((tmp_path / "other").iterdir())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_published_draft_s_dtype_is_read(dtype, saved):
    tensors = load_file(saved / "model.safetensors")
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, saved / "model.safetensors")
    read = load_draft(saved, torch.float32).state_dict()
    assert all(torch.equal(read[name], tensor.float()) for name, tensor in tensors.items())
