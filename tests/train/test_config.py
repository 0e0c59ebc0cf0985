"""A draft's configuration: what is given wrongly is refused by name, and what the command line says wins."""

import json
from dataclasses import asdict, replace

import pytest
from transformers import LlamaConfig, Qwen3Config

from dflash_prep.errors import UserError
from dflash_trainer.config import DraftConfig, derive_config, read_overrides

TARGET = LlamaConfig(
    vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4, bos_token_id=None
)
WRONG = {
    "num_hidden_layers": [0, 129, 5.0, True, "5", None, [5]],
    "num_attention_heads": [0, 2**20 + 1],
    "head_dim": [3, 8.5],
    "block_size": [1, 1025, 4.0],
    "rms_norm_eps": [0, -1e-5, float("nan"), float("inf"), True, "1e-5", 10**400],
    "rope_theta": [0, float("inf")],
    "initializer_range": [-0.1, float("nan"), None],
    "vocab_size": [2**24 + 1],
    "eos_token_id": [-1, 1.0, "</s>", [], [True], [2, None]],
    "bos_token_id": [[1], -1],
    "mask_token_id": [-1, 1.0, False, None],
    "target_layer_ids": [[], 3, "1,3", [1, 3.0], [1, True], [-1, 2], [1, 1], [5]],
    "hidden_act": ["gelu"],
    "rope_scaling": [{"rope_type": "yarn", "factor": 4.0}],
    "attention_bias": [True],
    "layer_types": [
        ["sliding_attention"] * 2,
        ["full_attention"],
        ["full_attention"] * 3,
        ["full_attention", "linear_attention"],
        "full_attention",
        [],
    ],
    "sliding_window": [0, -1, 2.0, True, "16"],
    "use_sliding_window": ["true", 1, None],
    "max_window_layers": [-1, 1.0, None],
    "dflash_config": [None, [], "x"],
}
CASES = [(key, value) for key, values in WRONG.items() for value in values]


def derive(overrides: dict, **options) -> DraftConfig:
    defaults = {"block_size": 4, "mask_token_id": 259}
    return derive_config(TARGET, overrides={"num_hidden_layers": 2} | overrides, **defaults | options)


@pytest.mark.parametrize(("key", "value"), CASES, ids=lambda value: str(value)[:20])
class TestWrongValues:
    def test_given(self, key, value, tmp_path):
        path = tmp_path / "draft.json"
        path.write_text(json.dumps({"num_hidden_layers": 2} | {key: value}))
        with pytest.raises(UserError, match=key if key != "target_layer_ids" else "layer"):
            derive(read_overrides(path))

    def test_loaded(self, key, value, tmp_path):
        path = tmp_path / "config.json"
        written = derive({}).to_json()
        for place in (written, written["dflash_config"]):
            if key in place:
                place[key] = value
        path.write_text(json.dumps(written))
        with pytest.raises(UserError, match=key if key != "target_layer_ids" else "layer"):
            DraftConfig.load(tmp_path)


def test_what_is_written_is_accepted(tmp_path):
    for extra in ({}, {"eos_token_id": [1, 2]}, {"eos_token_id": None}, {"rms_norm_eps": 1}, {"initializer_range": 0}):
        config = derive(extra, mask_token_id=0)
        (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
        assert DraftConfig.load(tmp_path) == config
        assert derive(read_overrides(tmp_path / "config.json"), mask_token_id=0) == config


def test_other_values_in_dflash_config(tmp_path):
    (tmp_path / "draft.json").write_text('{"block_size": 4, "dflash_config": {"block_size": 8}}')
    with pytest.raises(UserError, match="make them agree"):
        read_overrides(tmp_path / "draft.json")


def test_arguments_win_over_the_file():
    config = derive({"mask_token_id": 1, "target_layer_ids": [1, 3]}, taps=(2, 4))
    assert (config.mask_token_id, config.target_layer_ids) == (259, (2, 4))
    assert derive({"target_layer_ids": [1, 4]}).target_layer_ids == (1, 4)


SLIDING = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("given", "windows"),
    [
        ({"layer_types": SLIDING, "sliding_window": 9}, (9, None)),
        ({"layer_types": SLIDING, "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2}, (9, None)),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, (None, 9)),
        ({"sliding_window": 9, "max_window_layers": 0}, (9, 9)),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 9}, (None, None)),
        ({"sliding_window": 9, "use_sliding_window": False}, (None, None)),
        ({"layer_types": None, "sliding_window": None}, (None, None)),
    ],
)
def test_windows_are_read_and_written_as_transformers_reads_them(given, windows, tmp_path):
    (tmp_path / "draft.json").write_text(json.dumps(given))
    config = derive(read_overrides(tmp_path / "draft.json"))
    assert config.windows == windows
    written = config.to_json()
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert DraftConfig.load(tmp_path) == config
    theirs = Qwen3Config.from_pretrained(tmp_path)
    kinds = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert kinds == list(windows)
    assert theirs.use_sliding_window == (theirs.sliding_window is not None) == any(windows)


@pytest.mark.parametrize(
    "given",
    [
        {"sliding_window": 9},
        {"sliding_window": 9, "use_sliding_window": True},
        {"layer_types": SLIDING, "use_sliding_window": True},
        {"layer_types": SLIDING, "sliding_window": 9, "use_sliding_window": False},
        {"max_window_layers": 1, "use_sliding_window": True},
    ],
)
def test_windows_that_do_not_fit_together_are_refused(given, tmp_path):
    (tmp_path / "draft.json").write_text(json.dumps(given))
    with pytest.raises(UserError, match="sliding"):
        derive(read_overrides(tmp_path / "draft.json"))


# What published drafts do otherwise than ours, as changes of a config.json, "-" for a key that is left out, and the windows.
PUBLISHED = [
    ({"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "transformers_version": "4.57.1", "dtype": "float16"}, None),
    ({"tie_word_embeddings": True, "torch_dtype": "-", "use_cache": False, "max_window_layers": 5}, None),
    ({"rope_theta": "-", "rope_scaling": "-"}, None),
    ({"rope_parameters": "-", "rope_scaling": {"type": "default"}}, None),
    ({"layer_types": "-", "sliding_window": 4096, "max_window_layers": "-", "use_sliding_window": "-"}, None),
    ({"layer_types": "-", "sliding_window": 4096, "max_window_layers": "-", "use_sliding_window": True}, None),
    ({"layer_types": "-", "sliding_window": 64, "max_window_layers": 1, "use_sliding_window": True}, (None, 64)),
    ({"layer_types": SLIDING, "sliding_window": 2048, "use_sliding_window": True}, (2048, None)),
    ({"is_causal": None, "causal": False, "final_logit_softcapping": None, "input_embedding_scale": 1.0}, None),
    ({"layer_types": SLIDING[:1] * 2, "sliding_window": 64, "use_sliding_window": True, "is_causal": True}, (64, 64)),
    ({"initializer_range": "-", "bos_token_id": "-"}, None),
]


def write_changed(directory, written: dict, changes: dict) -> None:
    changed = {key: value for key, value in (written | changes).items() if value != "-"}
    (directory / "config.json").write_text(json.dumps(changed))


@pytest.mark.parametrize(("changes", "windows"), PUBLISHED)
def test_published_drafts_are_read(changes, windows, tmp_path):
    config = derive({})
    write_changed(tmp_path, config.to_json(), changes)
    loaded = DraftConfig.load(tmp_path)
    assert loaded.windows == (windows or (None, None))
    assert replace(loaded, layer_types=config.layer_types, sliding_window=None) == config
    assert derive(asdict(loaded)) == loaded  # and training starts from them


def test_a_block_size_is_16_where_a_published_draft_says_none(tmp_path):
    written = derive({}).to_json()
    del written["block_size"], written["dflash_config"]["block_size"]
    write_changed(tmp_path, written, {})
    assert DraftConfig.load(tmp_path).block_size == 16


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["DFlash2DraftModel"]},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
        {"rope_scaling": [4.0]},
        {"rope_scaling": {"type": "linear"}},
        {"layer_types": SLIDING, "sliding_window": 64, "use_sliding_window": "-"},
        {"layer_types": SLIDING, "sliding_window": 64, "use_sliding_window": True, "causal": False},
        {"layer_types": SLIDING, "sliding_window": 64, "use_sliding_window": True, "is_causal": True},
        {"causal": True},
        {"input_embedding_scale": 8.0},
        {"output_multiplier": 0.5},
        {"final_logit_softcapping": 30.0},
        {"attention_sink_bias": True},
        {"input_embedding_scale": [1]},
    ],
    ids=str,
)
def test_drafts_that_compute_something_else_are_refused(changes, tmp_path):
    """By name of the key, also where the key stands in dflash_config."""
    written = derive({}).to_json()
    write_changed(tmp_path, written, changes)
    with pytest.raises(UserError, match=list(changes)[-1]) as fault:
        DraftConfig.load(tmp_path)
    assert "\n" not in str(fault.value)
    if not changes.keys() & written.keys():
        write_changed(tmp_path, written | {"dflash_config": written["dflash_config"] | changes}, {})
        with pytest.raises(UserError, match=list(changes)[-1]):
            DraftConfig.load(tmp_path)


SECTION_6 = """architectures model_type block_size dflash_config num_target_layers num_hidden_layers hidden_size
intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps
rope_theta rope_parameters rope_scaling max_position_embeddings vocab_size attention_bias
attention_dropout initializer_range layer_types sliding_window use_sliding_window max_window_layers
tie_word_embeddings bos_token_id eos_token_id dtype torch_dtype use_cache"""


@pytest.mark.parametrize("windows", [{}, {"layer_types": SLIDING, "sliding_window": 9}])
def test_every_key_that_servers_read_is_written(windows):
    written = derive(windows, taps=(1, 3)).to_json()
    assert written.keys() == set(SECTION_6.split())
    constants = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_act": "silu", "rope_scaling": None}
    constants |= {"attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    assert written.items() >= constants.items()
    assert written["block_size"] == written["dflash_config"]["block_size"] == 4
    assert written["dflash_config"] == {"mask_token_id": 259, "target_layer_ids": (1, 3), "block_size": 4}
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": written["rope_theta"]}
    assert (written["num_target_layers"], written["num_hidden_layers"]) == (6, 2)
    shapes = {key: written[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")}
    assert shapes == {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
