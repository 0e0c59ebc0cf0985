"""Loading a target: whole, Llama-like, or refused in one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from dflash_prep.errors import UserError
from dflash_trainer.target import load_target, target_fingerprint

CPU = torch.device("cpu")


@pytest.fixture
def copy(target_dir, tmp_path) -> Path:
    return Path(shutil.copytree(target_dir, tmp_path / "copy"))


def edit_config(directory: Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refuse(directory: Path) -> str:
    with pytest.raises(UserError) as fault:
        load_target(str(directory), torch.float32, CPU)
    assert "\n" not in str(fault.value)
    return str(fault.value)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.norm.weight", None, "lacks model.norm.weight"),
        ("model.embed_tokens.weight", None, "lacks"),
        ("model.layers.2.mlp.up_proj.weight", None, "lacks model.layers.2.mlp.up_proj.weight"),
        ("model.layers.2.mlp.up_proj.weight", (40, 32), "another shape of model.layers.2.mlp.up_proj.weight"),
        ("model.layers.6.mlp.up_proj.weight", (48, 32), "does not know model.layers.6.mlp.up_proj.weight"),
        ("model.layers.0.self_attn.q_proj.bias", (32,), "does not know model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_weights_that_do_not_fit(copy, name, shape, message, capfd):
    weights = load_file(copy / "model.safetensors")
    weights.pop(name, None)
    if shape:
        weights[name] = torch.zeros(shape)
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    assert message in refuse(copy)
    assert capfd.readouterr().err == ""


def test_surplus_that_does_no_harm(copy):
    weights = load_file(copy / "model.safetensors")
    weights |= {"vision.layers.0.weight": torch.zeros(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    load_target(str(copy), torch.float32, CPU)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "nonsense"},
        {"model_type": 5},
        {"num_hidden_layers": "six"},
        {"hidden_size": -1},
        {"num_hidden_layers": 3},
        {"num_attention_heads": 0},
        {"model_type": "bert", "architectures": ["BertModel"]},
        {"auto_map": {"AutoModelForCausalLM": "mine.Model"}, "model_type": "mine"},
    ],
    ids=str,
)
def test_configurations_that_are_none(copy, changes):
    edit_config(copy, **changes)
    assert str(copy) in refuse(copy)


def test_not_llama_like(tmp_path):
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16, n_positions=8)).save_pretrained(tmp_path)
    assert "not a Llama-like decoder, it lacks layers, norm" in refuse(tmp_path)


def test_fingerprint_tells_targets_apart(target_dir, copy):
    one = target_fingerprint(load_target(str(target_dir), torch.float32, CPU))
    assert target_fingerprint(load_target(str(target_dir), torch.bfloat16, CPU)) == one
    weights = load_file(copy / "model.safetensors")
    weights["model.embed_tokens.weight"][5] += 1
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    assert target_fingerprint(load_target(str(copy), torch.float32, CPU)) != one
