"""Speculative decoding at temperature 0: the draft proposes a block, the target verifies it in one pass.

Plain decoding is the same loop with an empty proposal, so the two are timed alike. Batch 1, KV caches for both models.
"""

import inspect
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache

from dflash_trainer.attention import KeyValue, block_attention
from dflash_trainer.draft import DraftModel
from dflash_trainer.target import Taps


class Response(NamedTuple):
    """New tokens, and how many of them each verification pass yielded (accepted + 1)."""

    tokens: list[int]
    steps: list[int]

    @property
    def acceptance_length(self) -> float:
        """τ: tokens a verification pass."""
        return sum(self.steps) / len(self.steps) if self.steps else 1.0


class TargetDecoder:
    """The whole target with its KV cache and taps."""

    def __init__(self, model: nn.Module, taps: tuple[int, ...]):
        self.model = model
        self.embedding = model.get_input_embeddings()
        self.head = model.get_output_embeddings().weight
        self._taps = Taps(model.get_decoder().layers, taps)
        self._cache = DynamicCache(config=model.config)
        # transformers renames this argument: `past_key_values` earlier, `cache` in newer releases
        named = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"

    def restart(self) -> None:
        """Forget everything."""
        self._cache = DynamicCache(config=self.model.config)

    @torch.no_grad()
    def read(self, tokens: list[int], last_only: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Read tokens: logits [tokens or 1, V] and tapped features [tokens, K·H]."""
        ids = torch.tensor([tokens], device=self.embedding.weight.device)
        keep = 1 if last_only else len(tokens)
        output = self.model(input_ids=ids, use_cache=True, logits_to_keep=keep, **{self._cache_name: self._cache})
        return output.logits[0], self._taps.take()

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        surplus = self._cache.get_seq_length() - length
        if surplus:
            self._cache.crop(-surplus)


class DraftDecoder:
    """A draft with the keys and values of the context it was given."""

    def __init__(self, draft: DraftModel, target: TargetDecoder):
        self._draft, self._target = draft.eval(), target
        self._context: list[KeyValue] | None = None

    def restart(self) -> None:
        """Forget everything."""
        self._context = None

    @torch.no_grad()
    def extend(self, features: torch.Tensor, start: int) -> None:
        """Append the features [n, K·H] of the verified tokens at positions start … start+n−1."""
        positions = torch.arange(start, start + len(features), device=features.device)
        new = self._draft.context(features.to(self._draft.fc.weight.dtype), positions)
        if self._context is not None:
            pairs = zip(self._context, new, strict=True)
            new = [KeyValue(torch.cat([a.key, b.key]), torch.cat([a.value, b.value])) for a, b in pairs]
        self._context = [newest(keys, window) for keys, window in zip(new, self._draft.config.windows, strict=True)]

    @torch.no_grad()
    def propose(self, token: int, position: int) -> list[int]:
        """Draft the B−1 tokens that follow `token` at `position`; the context must end just before it."""
        config = self._draft.config
        block = torch.tensor(
            [[token] + [config.mask_token_id] * (config.block_size - 1)], device=self._draft.fc.weight.device
        )
        hidden = self._draft.blocks(
            functional.embedding(block, self._target.embedding.weight),  # unscaled, as servers have it
            block.new_tensor([position]),
            self._context,
            lambda query, context, own, window: block_attention(query, context, own, None, window),
        )
        return (hidden[0, 1:].to(self._target.head.dtype) @ self._target.head.T).argmax(dim=-1).tolist()


def newest(context: KeyValue, window: int | None) -> KeyValue:
    """What a block behind this context can still see of it."""
    seen = slice(0 if window is None else max(0, len(context.key) - window + 1), None)
    return KeyValue(context.key[seen], context.value[seen])


def decode(
    target: TargetDecoder, draft: DraftDecoder | None, prompt: list[int], max_new_tokens: int, stop: frozenset[int]
) -> Response:
    """Continue a prompt greedily until a stop token or `max_new_tokens`; without a draft, token by token.

    Before each block the target has read all but the newest token, and the draft knows the features of just those.
    """
    target.restart()
    logits, features = target.read(prompt, last_only=True)
    if draft:
        draft.restart()
        draft.extend(features, 0)
    tokens, steps = [int(logits[-1].argmax())], []
    while len(tokens) < max_new_tokens and tokens[-1] not in stop:
        position = len(prompt) + len(tokens) - 1
        proposal = draft.propose(tokens[-1], position) if draft else []
        logits, features = target.read([tokens[-1], *proposal])
        verified = logits.argmax(dim=-1).tolist()
        accepted = 0
        while accepted < len(proposal) and proposal[accepted] == verified[accepted] and verified[accepted] not in stop:
            accepted += 1
        new = verified[: accepted + 1]
        target.truncate(position + accepted + 1)
        if draft:
            draft.extend(features[: accepted + 1], position)
        tokens += new
        steps.append(len(new))
    return Response(tokens[:max_new_tokens], steps)
