"""The draft's configuration: derived from the target's, changed by a JSON file, written as servers read it."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from dflash_prep.errors import UserError
from dflash_prep.files import read_json
from dflash_trainer.published import check_computable, completed
from dflash_trainer.sliding import FULL, KEYS, SLIDING, check_request, layer_windows, sliding_keys

DEFAULT_LAYERS = 5
# What a draft takes from its target as it stands there.
INHERITED = ("hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps")
INHERITED += ("max_position_embeddings", "vocab_size")
# What a draft computes depends on these: one that was written with other values is another model than `draft` has.
ARITHMETIC = ("architectures", "hidden_act", "attention_bias")


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
    layer_types: tuple[str, ...]
    sliding_window: int | None  # of the layers that slide; None where none does

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's window, None where it sees everything; what it sees says `sliding`."""
        return tuple(self.sliding_window if kind == SLIDING else None for kind in self.layer_types)

    def to_json(self) -> dict:
        """`config.json`: what vLLM, SGLang, llama.cpp and transformers look for."""
        values = asdict(self)
        nested = {key: values.pop(key) for key in ("mask_token_id", "target_layer_ids")}
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
            **sliding_keys(self.layer_types, self.sliding_window),
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }

    @classmethod
    def checked(cls, values: dict, where: str) -> "DraftConfig":
        """A configuration whose values are possible, each alone and all together; `where` they come from."""
        check_values(values, where)
        values, depth = dict(values), values["num_hidden_layers"]
        kinds, window = layer_windows({key: values.pop(key) for key in KEYS if key in values}, depth, where)
        chosen = {"target_layer_ids": tuple(values["target_layer_ids"]), "layer_types": kinds, "sliding_window": window}
        config = cls(**values | chosen)
        if config.num_attention_heads % config.num_key_value_heads or config.head_dim % 2:
            raise UserError(
                f"{where}: the draft has {config.num_attention_heads} heads on {config.num_key_value_heads} key-value heads "
                f"of {config.head_dim}: heads must be a multiple of key-value heads, and head_dim even"
            )
        if config.mask_token_id >= config.vocab_size:
            raise UserError(
                f"{where}: mask_token_id is {config.mask_token_id}; give one below vocab_size, {config.vocab_size}"
            )
        check_taps(config.target_layer_ids, config.num_target_layers)
        return config

    @classmethod
    def load(cls, directory: Path) -> "DraftConfig":
        """Read the `config.json` of a draft, ours or a published one."""
        path = directory / "config.json"
        flat = completed(read_flat(path, "draft's configuration"), str(path))
        missing = [name for name in RULES if name not in flat and name not in KEYS]
        if missing:
            raise UserError(f"{path}: not a DFlash draft, it lacks {', '.join(missing)}")
        config = cls.checked({name: flat[name] for name in RULES if name in flat}, str(path))
        config.check_constants({key: flat[key] for key in ARITHMETIC if key in flat}, str(path))
        check_computable(flat, config.layer_types, str(path))
        return config

    def check_constants(self, given: dict, where: str) -> None:
        """Refuse keys that no draft of ours can vary and that are given with another value than `to_json` writes."""
        written = self.to_json()
        for key, value in given.items():
            if value != written[key]:
                raise UserError(f"{where}: {key} is {shown(value)}, but a draft has {shown(written[key])}; leave it out")


class Rule(NamedTuple):
    """What a value must be, as a test and in words."""

    holds: Callable[[object], bool]
    words: str


def whole(low: int, high: int) -> Rule:
    """Whole numbers of a range; JSON's `true` and `5.0` are none."""
    return Rule(lambda value: type(value) is int and low <= value <= high, f"a whole number of {low} to {high}")


def number(words: str, low: float = 0.0) -> Rule:
    """Numbers from `low` up to one that no constant of a model reaches; nan and infinity are none of them."""
    return Rule(lambda value: type(value) in (int, float) and low <= value <= 1e12, words)


def listed(rule: Rule) -> Rule:
    """Lists with at least one value, all of a kind."""
    return Rule(
        lambda value: isinstance(value, list | tuple) and len(value) > 0 and all(map(rule.holds, value)),
        f"a list, each {rule.words}",
    )


def shown(value: object) -> str:
    """A value as JSON has it, cut where it is long."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}…"


def one_of(*values: object) -> Rule:
    """Some values of one type."""
    return Rule(lambda value: type(value) is type(values[0]) and value in values, " or ".join(map(shown, values)))


def either(*rules: Rule) -> Rule:
    """Values of any of several kinds, or null."""
    words = " or ".join([*(rule.words for rule in rules), "null"])
    return Rule(lambda value: value is None or any(rule.holds(value) for rule in rules), words)


SIZE, TOKEN, POSITIVE = whole(1, 1 << 20), whole(0, (1 << 24) - 1), number("a finite number above 0", low=1e-30)
RULES = {
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_hidden_layers": whole(1, 128),
    "num_attention_heads": SIZE,
    "num_key_value_heads": SIZE,
    "head_dim": SIZE,
    "rms_norm_eps": POSITIVE,
    "rope_theta": POSITIVE,
    "max_position_embeddings": whole(1, 1 << 30),
    "vocab_size": whole(1, 1 << 24),
    "initializer_range": number("a finite number, 0 or above"),
    "bos_token_id": either(TOKEN),
    "eos_token_id": either(TOKEN, listed(TOKEN)),
    "num_target_layers": whole(1, 1024),
    "block_size": whole(2, 1024),
    "mask_token_id": TOKEN,
    "target_layer_ids": listed(whole(0, 1023)),
    "layer_types": either(listed(one_of(FULL, SLIDING))),
    "sliding_window": either(SIZE),
    "use_sliding_window": one_of(True, False),
    "max_window_layers": whole(0, 1024),
}


def check_values(values: dict, where: str) -> None:
    """Refuse values of another type or range than their key's; keys that are none of `RULES` are left to the caller."""
    for key, value in values.items():
        if key in RULES and not RULES[key].holds(value):
            raise UserError(f"{where}: {key} is {shown(value)}; give {RULES[key].words}")


def read_flat(path: Path, what: str) -> dict:
    """A draft's JSON with the keys of its `dflash_config` beside the others."""
    config = read_json(path, what)
    nested = config.pop("dflash_config", {})
    if not isinstance(nested, dict):
        raise UserError(f"{path}: dflash_config is {shown(nested)}; give an object or leave it out")
    for key in nested.keys() & config.keys():
        if nested[key] != config[key]:
            raise UserError(
                f"{path}: {key} is {shown(config[key])}, and {shown(nested[key])} in dflash_config: make them agree"
            )
    return config | nested


def derive_config(
    target, *, block_size: int, mask_token_id: int, overrides: dict | None = None, taps: tuple[int, ...] | None = None
) -> DraftConfig:
    """The draft for a target's transformers configuration, with a user's overrides on top.

    `mask_token_id` and `taps` win over those among the overrides: they were chosen, and checked, knowing both.
    """
    overrides = dict(overrides or {})
    overrides.pop("mask_token_id", None)
    named = overrides.pop("target_layer_ids", None)
    constants = {key: overrides.pop(key) for key in list(overrides) if key not in RULES}
    depth = overrides.get("num_hidden_layers", DEFAULT_LAYERS)
    taps = tuple(taps or named or tap_layers(target.num_hidden_layers, depth))
    check_taps(taps, target.num_hidden_layers)
    heads = target.num_attention_heads
    values = {
        **{key: getattr(target, key) for key in INHERITED},
        "num_hidden_layers": depth,
        "num_key_value_heads": getattr(target, "num_key_value_heads", None) or heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
        "rope_theta": rope_theta(target),
        "initializer_range": getattr(target, "initializer_range", 0.02),
        "bos_token_id": getattr(target, "bos_token_id", None),
        "eos_token_id": getattr(target, "eos_token_id", None),
        "num_target_layers": target.num_hidden_layers,
        "block_size": block_size,
        "mask_token_id": mask_token_id,
        "target_layer_ids": taps,
    }
    check_request(overrides, "the draft configuration")
    fixed = {"hidden_size", "vocab_size", "num_target_layers", "block_size"}
    for key, value in overrides.items():
        if key in fixed and value != values[key]:
            source = "the plan" if key == "block_size" else "the target"
            raise UserError(f"the draft configuration has {key} {value}, {source} has {values[key]}: make them agree")
    config = DraftConfig.checked(values | overrides, "the draft's configuration")
    config.check_constants(constants, "the draft configuration")
    return config


def read_overrides(path: Path | None) -> dict:
    """A `--draft-config` file: any of `config.json`'s keys, those that a draft can vary and those that it cannot."""
    if path is None:
        return {}
    given = read_flat(path, "draft configuration")
    for key in given:
        if key not in RULES and key not in CONSTANT:
            raise UserError(f"{path}: unknown key {json.dumps(key)}; known are {', '.join(sorted(RULES))}")
    check_values(given, str(path))
    return given


CONSTANT = {"architectures", "model_type", "hidden_act", "rope_parameters", "rope_scaling", "attention_bias"}
CONSTANT |= {"attention_dropout", "tie_word_embeddings", "dtype", "torch_dtype", "use_cache"}


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
