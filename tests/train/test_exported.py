"""Our drafts in other people's programs: z-lab's own and llama.cpp draft the same tokens, one by one.

Acceptance would hide a fault: a draft that was trained hard is accepted with its taps off by one. Random weights, loud
enough that every input shows in the drafted tokens, hide nothing.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from reference import block_hidden, sample_features
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config, Qwen3ForCausalLM

from dflash_trainer.attention import Segment, segment_attention
from dflash_trainer.checkpoint import load_draft, save_draft
from dflash_trainer.config import derive_config
from dflash_trainer.decode import DraftDecoder, TargetDecoder, decode
from dflash_trainer.draft import DraftModel
from tests.prep import models

TAPS, BLOCK, MASK, STOP = (1, 3, 4), 8, 5, 2
PROMPT, NEW = list(range(65, 100)), 40
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 6}
KINDS = {"loud": {}, "loud sliding": SLIDING, "trained": {}, "trained sliding": SLIDING}
STEPS = {"trained": 32, "trained sliding": 20}  # far enough for some drafted tokens to be accepted, and not all
CONVERTED = ["loud", "loud sliding", "trained"]


class Drafted(NamedTuple):
    """Each block's drafted tokens, and how many tokens each verification yielded."""

    blocks: list[list[int]]
    steps: list[int]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A tiny Qwen3 with random weights, exact in bfloat16, and a tokenizer that llama.cpp knows."""
    directory = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=STOP,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(models.model("smollm2") / name, directory / name)
    return directory


@pytest.fixture(scope="module")
def model(target):
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)


@pytest.fixture(scope="module")
def continuation(model) -> list[int]:
    """The prompt and what the target says after it."""
    return PROMPT + decode(TargetDecoder(model, TAPS), None, PROMPT, NEW + BLOCK, frozenset()).tokens


@pytest.fixture(scope="module")
def drafts(model, continuation, tmp_path_factory) -> dict[str, Path]:
    """Exported drafts of each kind."""
    directories = {kind: tmp_path_factory.mktemp("draft") for kind in KINDS}
    for kind, directory in directories.items():
        overrides = {"num_hidden_layers": 3, "initializer_range": 0.6 if "loud" in kind else 0.1} | KINDS[kind]
        config = derive_config(model.config, block_size=BLOCK, mask_token_id=MASK, overrides=overrides, taps=TAPS)
        draft = DraftModel(config).initialise(0)
        if "trained" in kind:
            memorise(draft, model, continuation, STEPS[kind])
        else:
            for name, parameter in draft.named_parameters():
                if name.endswith("norm.weight"):  # norms that are not 1 show whether each is applied where it should be
                    parameter.data.mul_(torch.linspace(0.5, 1.5, len(parameter)))
        save_draft(draft, directory)
    return directories


def memorise(draft: DraftModel, model, ids: list[int], steps: int) -> None:
    """Train a draft on one continuation."""
    features = sample_features(model, ids, TAPS)
    anchors = torch.arange(len(PROMPT), len(ids) - BLOCK)
    tokens, positions = torch.tensor(ids), torch.arange(len(ids))
    blocks = torch.full((len(anchors), BLOCK), MASK)
    blocks[:, 0] = tokens[anchors]
    x = model.get_input_embeddings()(blocks).detach()
    labels = tokens[anchors[:, None] + torch.arange(1, BLOCK)]
    head = model.get_output_embeddings().weight.detach()[known := labels.unique()]
    labels = torch.searchsorted(known, labels)
    optimizer = torch.optim.Adam(draft.parameters(), lr=3e-3)
    segments = [Segment(slice(0, len(ids)), slice(0, len(anchors)))]
    attend = lambda query, context, block, window: segment_attention(query, context, block, anchors, segments, window)  # noqa: E731
    for _ in range(steps):
        hidden = draft(features, positions, x, anchors, attend)
        loss = torch.nn.functional.cross_entropy((hidden[:, 1:] @ head.T).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.fixture(scope="module")
def ours(drafts, model, continuation) -> dict[str, Drafted]:
    """What each draft drafts here."""
    found = {}
    for kind, directory in drafts.items():
        target = TargetDecoder(model, TAPS)
        drafter, blocks = DraftDecoder(load_draft(directory, torch.float32), target), []
        propose = drafter.propose
        drafter.propose = lambda *at, propose=propose, blocks=blocks: blocks.append(propose(*at)) or blocks[-1]
        response = decode(target, drafter, PROMPT, NEW, frozenset({STOP}))
        assert response.tokens == continuation[len(PROMPT) :][:NEW], "the target's own output, whatever was drafted"
        found[kind] = Drafted(blocks, response.steps)
        assert len({tuple(block) for block in blocks}) > len(blocks) // 2, "the drafts hardly depend on their context"
        assert "loud" in kind or len(set(response.steps)) > 2, "nothing was learnt, or all"
    return found


@pytest.fixture(scope="module")
def zlab():
    """z-lab's model code."""
    if not hasattr(DynamicCache, "activate_past_recording"):
        pytest.skip("z-lab's code needs a newer transformers")
    path = models.model("dflash") / "model.py"
    spec = importlib.util.spec_from_file_location("zlab_dflash_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_zlab_drafts_the_same_tokens(kind, zlab, drafts, ours, model, continuation):
    draft, report = zlab.DFlashDraftModel.from_pretrained(drafts[kind], dtype=torch.float32, output_loading_info=True)
    assert not any(report[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (draft.block_size, draft.mask_token_id, tuple(draft.target_layer_ids)) == (BLOCK, MASK, TAPS)
    blocks, logits_of = [], draft.compute_logits

    def compute_logits(hidden, head):
        logits = logits_of(hidden, head)
        blocks.append(logits[0].argmax(-1).tolist())
        return logits

    draft.compute_logits = compute_logits
    tokens = zlab.dflash_generate(draft.eval(), model, torch.tensor([PROMPT]), NEW, [STOP])
    assert tokens[0].tolist() == continuation[: len(PROMPT) + NEW]
    whole = [block for block in blocks if len(block) == BLOCK - 1]  # near the end it drafts shorter blocks
    assert len(whole) >= NEW // BLOCK - 1
    assert whole == ours[kind].blocks[: len(whole)]


CONVERT = """
import runpy, sys
converter, target = sys.argv[1:3]
for model in sys.argv[2:]:
    extra = [] if model == target else ["--target-model-dir", target]
    sys.argv = [converter, model, "--outtype", "f32", "--outfile", model + ".gguf", *extra]
    runpy.run_path(converter, run_name="__main__")
"""
SERVER = """
import json, sys, xllamacpp as llama
params = llama.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.cache_prompt, params.warmup = sys.argv[1], 512, 1, False, False
params.verbosity = 5  # which prints what is drafted
params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
draft = params.speculative.draft
params.speculative.types = [llama.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH]
draft.mparams.path, draft.n_max = sys.argv[2], int(sys.argv[3])
for part in (params, draft):
    part.cache_type_k = part.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    part.cpuparams.n_threads = part.cpuparams_batch.n_threads = 1
server = llama.Server(params)
server.handle_completions(json.loads(sys.argv[4]))
"""


@pytest.fixture(scope="module")
def converted(target, drafts, tmp_path_factory) -> Path:
    """The target and the drafts as GGUF, beside their directories with the suffix .gguf."""
    converter = models.model("convert_hf_to_gguf")
    pytest.importorskip("xllamacpp", reason="llama.cpp's server is not installed")
    stub = tmp_path_factory.mktemp("stub")  # the converter imports it for tokenizers of a kind that this one is not
    (stub / "sentencepiece.py").write_text("SentencePieceProcessor = None\n")
    environment = os.environ | {"PYTHONPATH": f"{converter}:{stub}", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-c",
        CONVERT,
        converter / "convert_hf_to_gguf.py",
        target,
        *(drafts[kind] for kind in CONVERTED),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(f"{target}.gguf")


def llama_cpp(converted: Path, draft: Path) -> Drafted:
    """What llama.cpp's server drafts, from its log."""
    request = json.dumps({"prompt": PROMPT, "n_predict": NEW, "temperature": 0, "ignore_eos": True})
    command = [sys.executable, "-c", SERVER, converted, f"{draft}.gguf", str(BLOCK - 1), request]
    done = subprocess.run(command, capture_output=True, timeout=120)
    log = done.stderr.decode(errors="replace")
    assert done.returncode == 0, log[-2000:]
    best = re.findall(r"draft candidate +0, pos +(\d+): +(\d+) ", log)
    blocks = [[int(token) for _, token in best[start : start + BLOCK - 1]] for start in range(0, len(best), BLOCK - 1)]
    assert [int(slot) for slot, _ in best] == list(range(BLOCK - 1)) * len(blocks)
    accepted = re.findall(r"accepted +(\d+)/ *(\d+) draft tokens", log)
    return Drafted(blocks, [int(count) + 1 for count, _ in accepted])


@pytest.mark.parametrize("kind", ["loud", "trained"])
def test_llama_cpp_drafts_the_same_tokens(kind, converted, drafts, ours):
    theirs = llama_cpp(converted, drafts[kind])
    whole = len(theirs.blocks) - 1  # the last may be cut where the answer ends
    assert whole >= len(ours[kind].blocks) - 3
    assert theirs.blocks[:whole] == ours[kind].blocks[:whole]
    assert theirs.steps[:whole] == ours[kind].steps[:whole]


def test_llama_cpp_slides_as_we_do_but_for_the_order_inside_a_block(converted, drafts, model, continuation):
    """Its sliding layers see the whole block, later slots too, where z-lab's and ours do not: nothing else differs."""
    draft = load_draft(drafts["loud sliding"], torch.float32)
    weights = {name: value.detach() for name, value in draft.named_parameters()}
    features = sample_features(model, continuation, TAPS)
    head = model.get_output_embeddings().weight
    theirs = llama_cpp(converted, drafts["loud sliding"])
    assert set(theirs.steps) == {1}
    for anchor, block in enumerate(theirs.blocks[:10], start=len(PROMPT)):
        tokens = torch.tensor([continuation[anchor]] + [MASK] * (BLOCK - 1))
        embeddings = model.get_input_embeddings()(tokens).detach()
        hidden = block_hidden(draft, weights, features, embeddings, anchor, causal=False)
        assert block == (hidden[1:] @ head.T).argmax(-1).tolist()
