"""The cost model: integers against the formula, reading, refusing."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_prep import cost
from dflash_prep.cost import CostModel, price, read_cost
from dflash_prep.errors import UserError

COEFFICIENT = st.one_of(st.just(0.0), st.floats(1e-12, 1e3))
MODELS = st.builds(CostModel, COEFFICIENT, st.floats(1e-9, 1e3), COEFFICIENT, COEFFICIENT, COEFFICIENT)


@given(MODELS, st.integers(1, 2**20), st.integers(1, 2**10), st.integers(1, 2**24), st.data())
def test_rounded_costs_are_the_formula_to_a_small_share_of_a_full_micro_batch(model, tokens, anchors, samples, data):
    longest = data.draw(st.integers(1, tokens))
    rounded = price(model, tokens, longest, anchors, anchors, samples)
    rows, held = data.draw(st.integers(1, tokens // longest)), data.draw(st.integers(0, anchors))
    exact = model.c0 + rows * (model.a * longest + model.b * longest**2) + held * (model.d + model.e * longest)
    full = model.c0 + tokens * (model.a + model.b * longest + model.e * anchors) + anchors * model.d
    found = rounded.fixed + rounded.rows(rows, longest) + rounded.blocks(held, longest)
    # each coefficient is off by at most half a unit
    units = 1 + rows * (longest + longest**2) + held * (1 + longest)
    assert abs(float(rounded.seconds(found)) - exact) <= units * 2.0**-rounded.bits + 1e-9 * full
    assert found < 2**51 and found * samples < 2**62


def test_token_counts_are_exact():
    tokens = CostModel(0, 1, 0, 0, 0)
    rounded = price(tokens, 32_768, 8_192, 10, 10, 902_000)
    assert rounded.seconds(rounded.rows(3, 777)) == 3 * 777
    assert rounded.model == tokens


@pytest.mark.parametrize("longest", [8_192, 131_072, 1_048_576])
def test_one_long_sample_does_not_distort_the_cost(longest):
    """A budget as large as the longest sample must leave the coefficients true."""
    for model in (CostModel(), CostModel(0.01, 2e-6, 2e-12, 1e-5, 1e-10)):
        rounded = price(model, max(longest, 32_768), longest, max(longest, 32_768), 512, 20_000).model
        for name, value in model.as_dict().items():
            assert rounded.as_dict()[name] == pytest.approx(value, rel=0.03)


def test_the_built_in_cost_is_that_of_the_default_target_and_draft():
    """Weights counted from transformers' own model on the meta device."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=28,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=8,
    )
    with torch.device("meta"):
        layers = transformers.LlamaModel(config).layers
    matrices = sum(weight.numel() for weight in layers.parameters() if weight.dim() == 2)
    assert matrices == cost.TARGET_LAYERS * cost.LAYER
    assert CostModel().a == pytest.approx((2 * matrices + 6 * 5 * (576 * 576 + 576 * 384)) / 1e12)
    # 16 positions in 5 layers there and back, 15 logits forward and back to the inputs
    assert CostModel().d == pytest.approx((6 * 16 * 5 * matrices / 28 + 4 * 15 * 49_152 * 576) / 1e12)


def test_a_cost_model_is_read_with_whatever_else_its_file_states(tmp_path):
    stated = {"c0": 0.5, "a": 1e-4, "b": 2e-9, "d": 0, "e": 3e-7, "device": "cpu", "block_size": 16}
    (tmp_path / "cost.json").write_text(json.dumps(stated))
    assert read_cost(tmp_path / "cost.json", 16) == CostModel(0.5, 1e-4, 2e-9, 0.0, 3e-7)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": None}, "no valid a"),
        ({"b": -1e-9}, "no valid b"),
        ({"c0": "1"}, "no valid c0"),
        ({"d": float("nan")}, "no valid d"),
        ({"e": float("inf")}, "no valid e"),
        ({"a": True}, "no valid a"),
        ({"a": 0, "b": 0}, "tokens cost nothing"),
        ({"a": 1e-300}, "tokens cost nothing"),
        ({"a": 1.1e6}, "more than 1,000,000 seconds"),
        ({"block_size": 8}, "blocks of 8, not of 16"),
        ({"block_size": "16"}, "no valid block_size"),
    ],
)
def test_a_cost_model_that_is_none_is_refused(tmp_path, change, words):
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"c0": 0, "a": 1, "b": 0, "d": 0, "e": 0} | change))
    with pytest.raises(UserError, match=words):
        read_cost(path, 16)


def test_a_file_that_is_no_cost_model_is_refused(tmp_path):
    for content in ("", "[]", "{}", "{"):
        (tmp_path / "cost.json").write_text(content)
        with pytest.raises(UserError, match="cost"):
            read_cost(tmp_path / "cost.json", 16)
    with pytest.raises(UserError, match=r"cost model"):
        read_cost(tmp_path / "nothing.json", 16)
