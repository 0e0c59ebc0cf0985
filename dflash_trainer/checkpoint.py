"""Checkpoints: a draft that servers load, and beside it what training needs to go on bit for bit."""

import errno
import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash_prep.errors import UserError
from dflash_prep.files import new_directory, read_json, write_json
from dflash_trainer.config import DraftConfig
from dflash_trainer.draft import DraftModel
from dflash_trainer.history import NAME, checkpoint_path, newest_checkpoint, point_to, retire
from dflash_trainer.identity import check_identity

VERSION = 4
MOMENTS = ("exp_avg", "exp_avg_sq")


def expected_tensors(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a servable draft's tensors, spelled out: servers ignore names that they do not know."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "self_attn.q_norm": (config.head_dim,),
        "self_attn.k_norm": (config.head_dim,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes = {f"layers.{i}.{name}.weight": shape for i in range(config.num_hidden_layers) for name, shape in layer.items()}
    fused = len(config.target_layer_ids) * hidden
    return {"fc.weight": (hidden, fused), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)} | shapes


def check_tensors(tensors: dict[str, torch.Tensor], config: DraftConfig, where: Path) -> None:
    """The set of names and shapes is exactly that of a servable draft."""
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = expected_tensors(config)
    wrong = sorted(set(found.items()) ^ set(expected.items()))
    if wrong:
        raise UserError(f"{where}: tensor {wrong[0][0]} is missing, unknown or of another shape than config.json says")


def save_draft(draft: DraftModel, directory: Path) -> None:
    """Write `config.json` and `model.safetensors` (bfloat16) into a directory."""
    tensors = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in draft.state_dict().items()}
    check_tensors(tensors, draft.config, directory)
    write_json(directory / "config.json", draft.config.to_json())
    write_tensors(tensors, directory / "model.safetensors")


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file; a full disk is an OSError here as everywhere else, which safetensors says only in words."""
    try:
        save_file(tensors, path, {"format": "pt"})
    except SafetensorError as fault:
        code = re.search(r"os error (\d+)", str(fault))
        reason = (int(code[1]), os.strerror(int(code[1]))) if code else (errno.EIO, str(fault))
        raise OSError(*reason, str(path)) from None


def draft_directory(path: Path) -> Path:
    """Where the draft is that a path names, itself or by its run."""
    directory = path if (path / "config.json").is_file() else newest_checkpoint(path)
    if directory is None:
        raise UserError(f"{path}: no draft and no checkpoint here; name a run, a checkpoint or a draft's directory")
    return directory


def load_draft(path: Path, dtype: torch.dtype) -> DraftModel:
    """A draft from its directory, a checkpoint or a run (its newest checkpoint)."""
    directory = draft_directory(path)
    config = DraftConfig.load(directory)
    tensors = read_tensors(directory / "model.safetensors")
    check_tensors(tensors, config, directory / "model.safetensors")
    draft = DraftModel(config)
    draft.load_state_dict(tensors)
    return draft.to(dtype)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """A safetensors file, or an error in one line."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as fault:
        raise UserError(
            f"{path}: cannot read the tensors ({fault}); the checkpoint is damaged, use an earlier one"
        ) from None


def save_checkpoint(run: Path, draft: DraftModel, optimizer: torch.optim.Optimizer, state: dict, keep: int) -> Path:
    """Write one checkpoint, whole or not at all; `state` is what `trainer.json` says beside its version.

    Once it is whole, `latest` names it, and only then older ones than the `keep` newest go: at no moment does `latest` name
    one that is gone.
    """
    path = checkpoint_path(run, state["step"])
    with new_directory(path) as directory:
        save_draft(draft, directory)
        tensors = {}
        for name, parameter in draft.named_parameters():
            tensors[f"master.{name}"] = parameter.detach()
            for moment in MOMENTS:
                if parameter in optimizer.state:
                    tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment]
        cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        write_tensors(cpu, directory / "optimizer.safetensors")
        write_json(directory / "trainer.json", {"version": VERSION, **state})
    point_to(path)
    retire(path, keep)
    return path


def load_checkpoint(path: Path, draft: DraftModel, optimizer: torch.optim.AdamW, expected: dict) -> dict:
    """Restore parameters and moments; returns `trainer.json`.

    `expected` are entries that must agree (the plan's, the recipe and so on, see `identity`): a run goes on only with what
    it began with.
    """
    state = read_state(path, expected)
    if DraftConfig.load(path) != draft.config:
        raise UserError(f"{path}: its draft configuration differs from the one asked for; use the same options")
    tensors = read_tensors(path / "optimizer.safetensors")
    check_optimizer(tensors, draft, state["updates"], path / "optimizer.safetensors")
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.copy_(tensors[f"master.{name}"])
            if state["updates"]:
                moments = {moment: tensors[f"{moment}.{name}"].to(parameter.device) for moment in MOMENTS}
                step = torch.tensor(float(state["updates"]), device=parameter.device)  # where fused updates want it
                optimizer.state[parameter] = {"step": step, **moments}
    return state


def read_state(path: Path, expected: dict) -> dict:
    """A checkpoint's `trainer.json`, if it is of a run with the `expected` entries and its counts can be.

    Each step was an update or a bad one, and the name says how many there were.
    """
    state = read_json(path / "trainer.json", "trainer's state")
    if state.get("version") != VERSION:
        raise UserError(f"{path}: not a checkpoint of format version {VERSION}; train anew with this release")
    check_identity(path, state, expected)
    named = NAME.fullmatch(path.resolve().name)
    most = {"step": expected["total_steps"], "updates": state.get("step"), "bad_steps": state.get("step")}
    for key, limit in (most | {"bad_in_a_row": state.get("bad_steps")}).items():
        if type(state.get(key)) is not int or not 0 <= state[key] <= limit:
            raise impossible(path, key, state)
    if named and int(named[1]) != state["step"]:
        raise impossible(path, "step", state)
    if state["updates"] + state["bad_steps"] != state["step"]:
        raise impossible(path, "updates", state)
    return state


def impossible(path: Path, key: str, state: dict) -> UserError:
    """A count that no trainer wrote."""
    return UserError(
        f"{path / 'trainer.json'}: has {key.replace('_', ' ')} {state.get(key)}, which cannot be; "
        "it is damaged, use an earlier checkpoint"
    )


def check_optimizer(tensors: dict[str, torch.Tensor], draft: DraftModel, updates: int, where: Path) -> None:
    """Master weights, and after the first update both moments, of exactly the draft's parameters: float32 and finite."""
    kinds = ("master", *MOMENTS) if updates else ("master",)
    shapes = {f"{kind}.{name}": parameter.shape for kind in kinds for name, parameter in draft.named_parameters()}
    for name in sorted(shapes.keys() | tensors.keys()):
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != shapes.get(name) or tensor.dtype != torch.float32:
            fault = "is missing, unknown or of another shape or type than the draft's"
        elif not tensor.isfinite().all():
            fault = "holds values that are not finite"
        else:
            continue
        raise UserError(f"{where}: tensor {name} {fault}; it is damaged, use an earlier checkpoint")
