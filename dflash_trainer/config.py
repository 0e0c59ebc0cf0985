"""The draft's configuration: derived from the target's, changed by a JSON file, written as servers read it."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from dflash_prep.errors import UserError
from dflash_prep.files import read_json

DEFAULT_LAYERS = 5


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Shapes and constants of a draft; names as in its `config.json`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    initializer_range: float
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    num_target_layers: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]

    def to_json(self) -> dict:
        """`config.json`: what vLLM, SGLang, llama.cpp and transformers look for."""
        values = asdict(self)
        nested = {key: values.pop(key) for key in ("mask_token_id", "target_layer_ids")}
        layers = self.num_hidden_layers
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **values,
            "dflash_config": {**nested, "block_size": self.block_size},
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "layer_types": ["full_attention"] * layers,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": layers,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }

    @classmethod
    def load(cls, directory: Path) -> "DraftConfig":
        """Read the `config.json` of a draft."""
        config = read_json(directory / "config.json", "draft's configuration")
        flat = config | (config.get("dflash_config") or {})
        missing = [field.name for field in fields(cls) if field.name not in flat]
        if missing:
            raise UserError(f"{directory / 'config.json'}: not a DFlash draft, it lacks {', '.join(missing)}")
        values = {field.name: flat[field.name] for field in fields(cls)}
        return cls(**values | {"target_layer_ids": tuple(values["target_layer_ids"])})


def derive_config(
    target, *, block_size: int, mask_token_id: int, overrides: dict | None = None, taps: tuple[int, ...] | None = None
) -> DraftConfig:
    """The draft for a target's transformers configuration, with a user's overrides on top."""
    overrides = dict(overrides or {})
    depth = overrides.get("num_hidden_layers", DEFAULT_LAYERS)
    taps = taps or tuple(overrides.pop("target_layer_ids", ())) or tap_layers(target.num_hidden_layers, depth)
    check_taps(taps, target.num_hidden_layers)
    heads = target.num_attention_heads
    values = {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(target, "num_key_value_heads", heads),
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": rope_theta(target),
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "initializer_range": getattr(target, "initializer_range", 0.02),
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "num_target_layers": target.num_hidden_layers,
        "block_size": block_size,
        "mask_token_id": mask_token_id,
        "target_layer_ids": taps,
    }
    fixed = {"hidden_size", "vocab_size", "num_target_layers", "rope_theta", "block_size"}
    for key, value in overrides.items():
        if key in fixed and value != values[key]:
            source = "the plan" if key == "block_size" else "the target"
            raise UserError(f"the draft configuration has {key} {value}, {source} has {values[key]}: make them agree")
    config = DraftConfig(**values | overrides)
    if config.num_attention_heads % config.num_key_value_heads or config.head_dim % 2:
        raise UserError(
            f"the draft has {config.num_attention_heads} heads on {config.num_key_value_heads} key-value heads "
            f"of {config.head_dim}: heads must be a multiple of key-value heads, and head_dim even"
        )
    return config


def read_overrides(path: Path | None) -> dict:
    """A `--draft-config` file: any of `config.json`'s keys that a draft can vary, and `target_layer_ids`."""
    if path is None:
        return {}
    given = read_json(path, "draft configuration")
    given |= given.pop("dflash_config", {})
    known = {field.name: field.type for field in fields(DraftConfig)}
    derived = set(DraftConfig.__dataclass_fields__) | CONSTANT
    for key, value in given.items():
        if key not in derived:
            raise UserError(f"{path}: unknown key {json.dumps(key)}; known are {', '.join(sorted(known))}")
        if known.get(key) is int and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise UserError(f"{path}: {key} is {json.dumps(value)}; give a positive whole number")
    return {key: value for key, value in given.items() if key in known}


CONSTANT = {"architectures", "model_type", "hidden_act", "rope_parameters", "rope_scaling", "attention_bias"}
CONSTANT |= {"attention_dropout", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers"}
CONSTANT |= {"tie_word_embeddings", "dtype", "torch_dtype", "use_cache"}


def tap_layers(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """The target layers whose outputs feed the draft: spread from the second to the third-last. arXiv 2602.06036."""
    if draft_layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers))


def check_taps(taps: tuple[int, ...], target_layers: int) -> None:
    """Taps are different layers below the target's last."""
    if len(set(taps)) < len(taps) or not all(0 <= tap <= target_layers - 2 for tap in taps):
        raise UserError(
            f"tapped layers {list(taps)} do not fit a target of {target_layers} layers: "
            f"give different ones of 0 to {target_layers - 2} with --taps"
        )


def rope_theta(target) -> float:
    """The target's rotary base, where transformers 4 and 5 keep it."""
    parameters = getattr(target, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(target, "rope_theta", 10_000.0))
