"""Targets of many families: the taps are what transformers' own model computes for each sample alone, packed or padded."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.mistral import modeling_mistral

from dflash_prep.errors import UserError
from dflash_trainer import shapes as shapes_module
from dflash_trainer.config import derive_config
from dflash_trainer.decode import DraftDecoder, TargetDecoder
from dflash_trainer.draft import DraftModel
from dflash_trainer.fidelity import settle_attention, why_not_ours
from dflash_trainer.flex import TILE, Runs
from dflash_trainer.isolation import check_isolation, leak
from dflash_trainer.micro_batch import MicroBatch, Sample, assemble
from dflash_trainer.shapes import Shapes
from dflash_trainer.target import FrozenTarget, load_target

CPU, WORDS, LAYERS, TAPS = torch.device("cpu"), 97, 4, (0, 2)
COMMON = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
DELTA |= {"layer_types": ["linear_attention", "full_attention"] * 2}
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma3": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "Mistral": {"sliding_window": 6},
    "Qwen3Moe": EXPERTS,
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3_5": DELTA,
}

STRANGE = {  # what our attention does not compute, and the words that say so
    "Gemma2": ({"sliding_window": 6, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}, "capped scores"),
    "GptOss": ({"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}, "attention sinks"),
}


def make(family: str) -> torch.nn.Module:
    """A tiny random model."""
    torch.manual_seed(0)
    kind = "Gemma3Text" if family == "Gemma3" else f"{family}Text" if family == "Qwen3_5" else family
    sizes = FAMILIES[family] if family in FAMILIES else STRANGE[family][0]
    config = getattr(transformers, f"{kind}Config")(**COMMON | sizes)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)


def batch(lengths: list[int], packed: bool):
    """A micro-batch of random samples, and the samples."""
    draw = np.random.default_rng(1)
    samples = [draw.integers(0, WORDS, length).astype(np.uint32) for length in lengths]
    parts = [Sample(ids, np.empty(0, np.uint32), np.empty(0, np.int64)) for ids in samples]
    width = sum(lengths) if packed else max(lengths)
    numbers = tuple(range(len(lengths)))
    return assemble(parts, packed=packed, width=width, block_size=4, epoch=0, step=0, slot=0, numbers=numbers), samples


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_taps_are_those_of_each_sample_alone(family, packed):
    if packed and family == "Qwen3_5":
        pytest.skip("packed plans are refused for it on a CPU, as the next test shows")
    model, reference = make(family), make(family)
    micro_batch, samples = batch([3, 17, 9, 12], packed)
    found = FrozenTarget(model, TAPS).features(micro_batch)
    torch.testing.assert_close(found, taps_alone(reference, samples), rtol=2e-4, atol=2e-4)


def taps_alone(model: torch.nn.Module, samples: list[np.ndarray]) -> torch.Tensor:
    """The taps of each sample alone, as transformers' own eager code computes them."""
    model.set_attn_implementation("eager")
    found = []
    for ids in samples:
        hidden = model(torch.tensor(ids.astype(np.int64))[None], output_hidden_states=True).hidden_states
        found.append(torch.cat([hidden[tap + 1][0] for tap in TAPS], dim=1))
    return torch.cat(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_our_attention_is_taken_where_it_is_exact(family):
    assert why_not_ours(FrozenTarget(make(family), TAPS), WORDS, torch.float32, CPU) is None


@pytest.mark.parametrize("family", STRANGE)
def test_attention_that_is_not_ours_is_seen(family):
    """Packed plans are refused with the reason; in padded ones transformers' own code is used, exactly."""
    model, reference, reason = make(family), make(family), STRANGE[family][1]
    micro_batch, samples = batch([3, 17, 9, 12], packed=False)
    target = FrozenTarget(model, TAPS)
    with pytest.raises(UserError, match=f"^x: cannot be given packed samples .*{reason}.*--strategy bucketed"):
        settle_attention(target, WORDS, torch.float32, CPU, "x", packed=True)
    assert reason in settle_attention(target, WORDS, torch.float32, CPU, "x", packed=False)
    torch.testing.assert_close(target.features(micro_batch), taps_alone(reference, samples), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("fault", ["scores", "window", "kind"])
def test_what_a_layer_does_not_tell_our_attention_is_seen(fault, monkeypatch):
    """Whatever a family hands over in a way of its own."""
    model = make("Gemma3" if fault == "window" else "Mistral")
    if fault == "scores":
        plain = modeling_mistral.eager_attention_forward
        monkeypatch.setattr(modeling_mistral, "eager_attention_forward", lambda m, q, *r, **k: plain(m, 2 * q, *r, **k))
    elif fault == "window":
        model.get_decoder().layers[0].self_attn.sliding_window = None
    else:
        model.config.layer_types = ["chunked_attention"] * LAYERS
    words = {"scores": "taps differ by", "window": "has a sliding window of 6 and asks", "kind": "chunked_attention"}
    assert words[fault] in why_not_ours(FrozenTarget(model, TAPS), WORDS, torch.float32, CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_isolation_is_proven_or_refused(family):
    """What is refused are just the targets in which packed samples do see each other."""
    target = FrozenTarget(make(family), TAPS)
    together, apart = (batch([17, 9], packed)[0] for packed in (True, False))
    try:
        holds = torch.allclose(target.features(together), target.features(apart), rtol=1e-3, atol=1e-3)
    except ValueError:  # transformers itself refuses where a kernel is missing
        holds = False
    if holds:
        check_isolation(target, WORDS, torch.float32, CPU, "x")
    else:
        with pytest.raises(UserError, match=r"packed samples.*--strategy bucketed"):
            check_isolation(target, WORDS, torch.float32, CPU, "x")
    assert holds or family == "Qwen3_5"


def test_a_leak_is_seen(monkeypatch):
    """The proof can fail: here attention looks over the samples' borders."""
    target = FrozenTarget(make("Qwen3"), TAPS)
    assert leak(target, WORDS, CPU) < 1e-5
    monkeypatch.setattr(MicroBatch, "stretches", None)
    assert leak(target, WORDS, CPU) > 0.01
    with pytest.raises(UserError, match="leak into each other"):
        check_isolation(target, WORDS, torch.float32, CPU, "x")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "Qwen3_5"])
def test_both_proofs_try_the_attention_by_tiles_where_a_run_has_it(family, monkeypatch):
    """As on GPUs: they hold there, and tiles that are wrong are found out."""
    target = FrozenTarget(make(family), TAPS)
    shapes = Shapes(2 * TILE, 2 * TILE, target_windows=target.windows)
    assert why_not_ours(target, WORDS, torch.float32, CPU, shapes) is None
    assert leak(target, WORDS, CPU, shapes) < 1e-5
    runs = shapes_module.target_runs
    with monkeypatch.context() as patch:
        patch.setattr(shapes_module, "target_runs", lambda stretches, window: runs([sum(stretches)], window))
        assert leak(target, WORDS, CPU, shapes) > 0.01
    with monkeypatch.context() as patch:  # a token does not see itself: only the other proof can tell
        patch.setattr(shapes_module, "target_runs", lambda stretches, window: late(runs(stretches, window)))
        assert "taps differ by" in why_not_ours(target, WORDS, torch.float32, CPU, shapes)
    without = replace(shapes, target_windows=frozenset({99}))
    assert "which its configuration does not name" in why_not_ours(target, WORDS, torch.float32, CPU, without)


def late(runs: Runs) -> Runs:
    """Runs that end one key early, where they are longer than one."""
    return runs._replace(first_end=np.maximum(runs.first_end - 1, runs.first + 1))


@pytest.mark.parametrize("family", ["Gemma3", "Qwen3_5"])
def test_the_text_part_of_a_multimodal_target(family, tmp_path):
    """Loaded from a checkpoint with a vision tower, it has the taps of the text model alone, and no more of it is needed."""
    text = make(family)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "image_size": 28, "patch_size": 14}
    if family == "Gemma3":
        vision = sizes | {"num_hidden_layers": 1, "num_attention_heads": 2}
    else:
        vision = sizes | {"depth": 1, "num_heads": 2, "out_hidden_size": COMMON["hidden_size"]}
    config = getattr(transformers, f"{family}Config")(text_config=text.config.to_dict(), vision_config=vision)
    whole = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    whole.get_decoder().load_state_dict(text.get_decoder().state_dict())
    whole.get_output_embeddings().weight.data.copy_(text.get_output_embeddings().weight)
    whole.save_pretrained(tmp_path)
    loaded = load_target(str(tmp_path), torch.float32, CPU)
    micro_batch, _ = batch([3, 17, 9], packed=False)
    found, expected = FrozenTarget(loaded, TAPS), FrozenTarget(text, TAPS)
    assert torch.equal(found.features(micro_batch), expected.features(micro_batch))
    assert torch.equal(found.head, expected.head)
    assert torch.equal(found.embed(micro_batch.input_ids), expected.embed(micro_batch.input_ids))
    weights = load_file(tmp_path / "model.safetensors")
    weights |= {key.replace("layers.0.", "layers.9."): value.clone() for key, value in weights.items() if "language" in key}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"does not know model\..*layers\.9\."):
        load_target(str(tmp_path), torch.float32, CPU)


def test_a_draft_reads_embeddings_as_they_are_stored(monkeypatch):
    """Gemma scales its own; servers hand a draft the rows themselves, in training and in decoding alike."""
    model, read = make("Gemma3"), []
    tokens = torch.tensor([5, 9, 9])
    stored = model.get_input_embeddings().weight[tokens]
    assert not torch.allclose(model.get_input_embeddings()(tokens), stored)
    config = derive_config(model.config, block_size=3, mask_token_id=9, overrides={"num_hidden_layers": 2}, taps=TAPS)
    draft = DraftModel(config).initialise(0)
    blocks = draft.blocks
    monkeypatch.setattr(draft, "blocks", lambda x, *others: read.append(x) or blocks(x, *others))
    target = TargetDecoder(model, TAPS)
    drafter = DraftDecoder(draft, target)
    drafter.extend(target.read([1, 2])[1], 0)
    drafter.propose(5, 2)
    assert torch.equal(read[0][0], stored)
    assert torch.equal(FrozenTarget(model, TAPS).embed(tokens), stored)
