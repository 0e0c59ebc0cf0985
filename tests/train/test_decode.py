"""Decoding: the output is the target's own, and the cached draft drafts what the plain reference drafts."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import block_hidden, sample_features
from transformers import AutoModelForCausalLM

from dflash_trainer.checkpoint import save_draft
from dflash_trainer.cli import evaluate
from dflash_trainer.config import derive_config
from dflash_trainer.decode import DraftDecoder, TargetDecoder, decode
from dflash_trainer.draft import DraftModel

TAPS = (1, 4)


@pytest.fixture(scope="module")
def model(target_dir):
    return AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float64)


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}


@pytest.fixture(scope="module", params=[{}, SLIDING], ids=["full", "sliding"])
def loud_draft(model, request) -> DraftModel:
    """Random weights loud enough that every input shows in the drafted tokens."""
    overrides = {"num_hidden_layers": 2, "initializer_range": 0.6} | request.param
    config = derive_config(model.config, block_size=5, mask_token_id=259, overrides=overrides, taps=TAPS)
    return DraftModel(config).initialise(0).double()


def reference_proposal(draft, model, ids: list[int], anchor: int) -> list[int]:
    weights = {name: value.detach() for name, value in draft.named_parameters()}
    block = torch.tensor([ids[anchor]] + [draft.config.mask_token_id] * (draft.config.block_size - 1))
    embeddings = model.get_input_embeddings()(block).detach()
    hidden = block_hidden(draft, weights, sample_features(model, ids, TAPS), embeddings, anchor)
    return (hidden[1:] @ model.get_output_embeddings().weight.T).argmax(-1).tolist()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 255), min_size=3, max_size=40), st.data())
def test_cached_draft_equals_the_plain_reference(model, loud_draft, ids, data):
    target = TargetDecoder(model, TAPS)
    drafter = DraftDecoder(loud_draft, target)
    position = data.draw(st.integers(1, len(ids) - 2))
    _, features = target.read(ids[:position])
    drafter.extend(features, 0)
    while position < len(ids) - 1:  # the context grows in uneven pieces, as verified tokens come in
        assert drafter.propose(ids[position], position) == reference_proposal(loud_draft, model, ids, position)
        piece = data.draw(st.integers(1, len(ids) - position))
        _, features = target.read(ids[position : position + piece])
        drafter.extend(features, position)
        position += piece


class Oracle:
    """Proposes what the target will say, right up to a chosen slot of each block."""

    def __init__(self, continuation: list[int], prompt: int, right: list[int], size: int):
        self.continuation, self.prompt, self.right, self.size = continuation, prompt, right, size
        self.calls = 0

    def restart(self) -> None:
        self.calls = 0

    def extend(self, features, start) -> None:
        pass

    def propose(self, token: int, position: int) -> list[int]:
        at = position - self.prompt + 1
        tokens = (self.continuation[at:] + [0] * self.size)[: self.size - 1]
        right = self.right[self.calls % len(self.right)]
        self.calls += 1
        return tokens[:right] + [(token + 1) % 256 for token in tokens[right:]]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 255), min_size=1, max_size=20), st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_output_is_the_targets_and_acceptance_is_counted(model, prompt, right):
    length = 24
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=length, do_sample=False, pad_token_id=256)
    expected = expected[0, len(prompt) :].tolist()
    target = TargetDecoder(model, TAPS)
    plain = decode(target, None, prompt, length, frozenset({258}))
    assert plain.tokens == expected
    assert set(plain.steps) <= {1}
    longer = decode(target, None, prompt, length + 8, frozenset({258})).tokens
    response = decode(target, Oracle(longer, len(prompt), right, 5), prompt, length, frozenset({258}))
    assert response.tokens == expected
    if len(expected) == length:
        whole = response.steps[:-1]
        assert whole == [right[i % len(right)] + 1 for i in range(len(whole))]


def test_loud_draft_is_lossless_and_accepts_next_to_nothing(model, loud_draft):
    target = TargetDecoder(model, TAPS)
    prompt = list(range(65, 85))
    plain = decode(target, None, prompt, 40, frozenset({258}))
    response = decode(target, DraftDecoder(loud_draft, target), prompt, 40, frozenset({258}))
    assert response.tokens == plain.tokens
    assert response.acceptance_length < 1.5


class TestCommand:
    """`dflash-eval` from files to report."""

    @pytest.fixture
    def draft_dir(self, loud_draft, tmp_path) -> Path:
        (tmp_path / "draft").mkdir()
        save_draft(loud_draft, tmp_path / "draft")
        return tmp_path / "draft"

    def evaluate(self, *arguments):
        return CliRunner().invoke(evaluate, [str(argument) for argument in arguments])

    def test_report(self, draft_dir, target_dir, tmp_path):
        prompts = [
            {"turns": ["abc", "def"]},
            {"messages": [{"role": "user", "content": "xyz"}, {"role": "assistant", "content": "dropped"}]},
            {"turns": ["beyond the limit"]},
        ]
        (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
        done = self.evaluate(
            *("--draft", draft_dir, "--target", target_dir, "--prompts", tmp_path / "prompts.jsonl"),
            *("--limit", 2, "--max-new-tokens", 12, "--json", tmp_path / "report.json"),
        )
        assert done.exit_code == 0, done.output
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["lossless"] is True
        assert report["speedup"] > 0
        assert len(report["prompts"]) == 2
        assert all(prompt["acceptance_length"] >= 1 for prompt in report["prompts"])
        assert report["prompts"][0]["tokens"] <= 24

    def test_faults_of_the_input(self, draft_dir, target_dir, tmp_path):
        (tmp_path / "ok.jsonl").write_text('{"turns": ["abc"]}')
        (tmp_path / "broken.jsonl").write_text('{"turns": ["abc"]}\n{"turns": [')
        (tmp_path / "other.jsonl").write_text('{"text": "abc"}')
        (tmp_path / "empty.jsonl").write_text("\n")
        (tmp_path / "nothing").mkdir()
        cases = [
            (draft_dir, tmp_path / "broken.jsonl", "broken.jsonl:2"),
            (draft_dir, tmp_path / "other.jsonl", "no 'turns'"),
            (draft_dir, tmp_path / "empty.jsonl", "no prompts"),
            (draft_dir, tmp_path / "missing.jsonl", "no such file"),
            (tmp_path / "nothing", tmp_path / "ok.jsonl", "no draft"),
            (target_dir, tmp_path / "ok.jsonl", "not a DFlash draft"),
        ]
        for draft, prompts, message in cases:
            done = self.evaluate("--draft", draft, "--target", target_dir, "--prompts", prompts)
            assert done.exit_code == 1, message
            assert isinstance(done.exception, SystemExit), message
            assert len(done.stderr.strip().splitlines()) == 1
            assert message in done.stderr

    def test_a_draft_of_another_target(self, draft_dir, target_dir, tmp_path):
        config = json.loads((draft_dir / "config.json").read_text())
        (draft_dir / "config.json").write_text(json.dumps(config | {"num_target_layers": 36}))
        (tmp_path / "ok.jsonl").write_text('{"turns": ["abc"]}')
        done = self.evaluate("--draft", draft_dir, "--target", target_dir, "--prompts", tmp_path / "ok.jsonl")
        assert done.exit_code == 1
        assert "num_target_layers 36" in done.stderr
