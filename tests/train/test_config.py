"""A draft's configuration: what is given wrongly is refused by name, and what the command line says wins."""

import json

import pytest
from transformers import LlamaConfig

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
    "layer_types": [["sliding_attention"] * 2],
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
