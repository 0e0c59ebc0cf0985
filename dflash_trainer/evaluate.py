"""`dflash-eval`: acceptance length and speed of a draft on prompts, and proof that its output is the target's own."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dflash_prep.chat import ChatTemplate, Reject
from dflash_prep.corpus import read_records
from dflash_prep.errors import UserError
from dflash_prep.tokenizer import ChatTokenizer, load_tokenizer
from dflash_trainer.checkpoint import load_draft
from dflash_trainer.decode import DraftDecoder, Response, TargetDecoder, decode
from dflash_trainer.draft import DraftModel
from dflash_trainer.target import load_target

TIE = 1e-3  # two best logits closer than this are a tie: rounding may pick either


@dataclass
class PromptResult:
    """One prompt: the acceptance length of each of its responses, and seconds of both ways of decoding."""

    acceptance: list[float] = field(default_factory=list)
    tokens: int = 0
    speculative_seconds: float = 0.0
    plain_seconds: float = 0.0
    ties: int = 0
    differences: int = 0


def read_prompts(path: Path, limit: int | None) -> list[list[dict]]:
    """Each prompt as messages of which the user's are to be answered in turn.

    A line has `turns` (user texts) or `messages`; the assistant's messages in those are dropped, the target writes its own.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; name JSONL with 'messages' or 'turns' by --prompts")
    prompts = []
    for record in read_records((str(path),)):
        if limit is not None and len(prompts) >= limit:
            break
        prompts.append(parse_prompt(record.data, f"{path}:{record.line}"))
    if not prompts:
        raise UserError(f"{path}: no prompts; give JSONL with 'messages' or 'turns'")
    return prompts


def parse_prompt(data: bytes, where: str) -> list[dict]:
    """The messages of one prompt, without the assistant's."""
    try:
        entry = json.loads(data)
        json.dumps(entry, ensure_ascii=False).encode()  # which refuses half a surrogate pair, as every tokenizer would
    except UnicodeEncodeError:
        raise UserError(f"{where}: holds a lone surrogate, which is no text; write the character whole") from None
    except (ValueError, RecursionError):
        raise UserError(f"{where}: not JSON; give one object a line with 'messages' or 'turns'") from None
    turns = entry.get("turns") if isinstance(entry, dict) else None
    if isinstance(turns, list):
        messages = [{"role": "user", "content": turn} for turn in turns]
    else:
        messages = entry.get("messages") if isinstance(entry, dict) else None
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    ):
        raise UserError(f"{where}: no 'turns' (texts) and no 'messages' (role and content) here; give one of them")
    messages = [message for message in messages if message["role"] != "assistant"]
    if not any(message["role"] == "user" for message in messages):
        raise UserError(f"{where}: no user turn to answer")
    return messages


class Evaluator:
    """A target and a draft that answer prompts together."""

    def __init__(self, model, draft: DraftModel, tokenizer: ChatTokenizer, max_new_tokens: int):
        self._target = TargetDecoder(model, draft.config.target_layer_ids)
        self._draft = DraftDecoder(draft, self._target)
        self._tokenizer, self._template = tokenizer, ChatTemplate(tokenizer)
        self._max_new_tokens = max_new_tokens
        self._stop = stop_tokens(model)

    def answer(self, messages: list[dict]) -> PromptResult:
        """Answer each user turn, speculatively and plainly; the conversation goes on with the plain answer."""
        result, history = PromptResult(), []
        for message in messages:
            history.append(message)
            if message["role"] != "user":
                continue
            try:
                text = self._template.render(history, add_generation_prompt=True)
            except Reject as fault:
                raise UserError(f"the chat template refuses a prompt: {fault}") from None
            prompt = self._tokenizer.encoder.encode(text, add_special_tokens=False).ids
            plain, seconds = self._timed(prompt, None)
            result.plain_seconds += seconds
            response, seconds = self._timed(prompt, self._draft)
            result.speculative_seconds += seconds
            result.tokens += len(response.tokens)
            if response.steps:
                result.acceptance.append(response.acceptance_length)
            self._compare(prompt, plain, response, result)
            history.append({"role": "assistant", "content": self._text(plain)})
        return result

    def _timed(self, prompt: list[int], draft: DraftDecoder | None) -> tuple[Response, float]:
        began = time.perf_counter()
        response = decode(self._target, draft, prompt, self._max_new_tokens, self._stop)
        return response, time.perf_counter() - began

    def _compare(self, prompt: list[int], plain: Response, response: Response, result: PromptResult) -> None:
        if plain.tokens == response.tokens:
            return
        same = 0
        while plain.tokens[same] == response.tokens[same]:
            same += 1
        self._target.restart()
        logits, _ = self._target.read(prompt + plain.tokens[:same], last_only=True)
        best = logits[-1].float().topk(2).values
        if best[0] - best[1] <= TIE:
            result.ties += 1
        else:
            result.differences += 1

    def _text(self, response: Response) -> str:
        kept = [token for token in response.tokens if token not in self._stop]
        return self._tokenizer.backend.decode(kept, skip_special_tokens=False)


def stop_tokens(model) -> frozenset[int]:
    """The target's end-of-sequence tokens."""
    ids = set()
    for config in (model.config.get_text_config(), model.generation_config):
        value = config.eos_token_id
        ids |= set(value) if isinstance(value, list) else {value}
    return frozenset(ids - {None})


def check_pair(model, draft: DraftModel, path: Path) -> None:
    """A draft serves only the target it was trained for."""
    config = model.config.get_text_config()
    claims = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_hidden_layers,
    }
    for name, value in claims.items():
        if getattr(draft.config, name) != value:
            raise UserError(
                f"{path}: the draft is for a target with {name} {getattr(draft.config, name)}, this one has {value}; "
                "name the right one with --target"
            )


def evaluate(
    draft_path: Path,
    target: str | None,
    prompts_path: Path,
    *,
    max_new_tokens: int,
    limit: int | None,
    dtype: torch.dtype,
    progress: Callable[[int], None] = lambda done: None,
) -> dict:
    """Evaluate a draft; returns the report that `--json` writes."""
    prompts = read_prompts(prompts_path, limit)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    draft = load_draft(draft_path, dtype).to(device)
    tokenizer = load_tokenizer(target)
    model = load_target(target, dtype, device)
    check_pair(model, draft, draft_path)
    evaluator = Evaluator(model, draft, tokenizer, max_new_tokens)
    results = []
    for messages in prompts:
        results.append(evaluator.answer(messages))
        progress(1)
    return summarise(results)


def summarise(results: list[PromptResult]) -> dict:
    """The report: acceptance length averaged a response and then over responses."""
    responses = [value for result in results for value in result.acceptance]
    tokens = sum(result.tokens for result in results)
    speculative = sum(result.speculative_seconds for result in results)
    plain = sum(result.plain_seconds for result in results)
    return {
        "acceptance_length": sum(responses) / len(responses) if responses else 1.0,
        "speedup": plain / speculative,
        "lossless": not any(result.differences for result in results),
        "ties": sum(result.ties for result in results),
        "tokens": tokens,
        "tokens_per_second": tokens / speculative,
        "plain_tokens_per_second": tokens / plain,
        "prompts": [
            {
                "acceptance_length": sum(result.acceptance) / len(result.acceptance) if result.acceptance else 1.0,
                "tokens": result.tokens,
            }
            for result in results
        ],
    }
