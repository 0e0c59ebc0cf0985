"""A conversation as its chat template renders it, and where in that text the assistant speaks.

The template is rendered as transformers renders it: in jinja2's immutable sandbox, with the same globals. The assistant's
parts are found by character offsets in the one full rendering, so the ids are those of the whole text, never of pieces.
"""

import json
from datetime import datetime
from typing import NamedTuple

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_prep.errors import UserError
from dflash_prep.tokenizer import ChatTokenizer


class Reject(Exception):
    """A record that is not kept; its text is the reason that reports count by."""


class Conversation(NamedTuple):
    """The rendered text and the character spans [start, end) of what the assistant said in it."""

    text: str
    spans: list[tuple[int, int]]


class ChatTemplate:
    """A tokenizer's chat template, compiled."""

    def __init__(self, tokenizer: ChatTokenizer):
        if tokenizer.template is None:
            raise UserError(f"{tokenizer.name}: this tokenizer has no chat template; name one that has (--tokenizer)")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(tokenizer.template)
        except TemplateError as fault:
            raise UserError(f"{tokenizer.name}: the chat template does not compile: {fault}") from None
        self._tokens = tokenizer.named_tokens

    def render(self, messages: list[dict], add_generation_prompt: bool = False) -> str:
        """The text of a conversation; raises Reject where the template refuses it."""
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as fault:
            raise Reject(f"template error: {fault}") from None

    def conversation(self, messages: list[dict]) -> Conversation:
        """Render messages and find each assistant turn: from where its generation prompt ends to its content's end."""
        text = self.render(messages)
        if not is_utf8(text):
            raise Reject("text with a lone surrogate")
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self.render(messages[:index], add_generation_prompt=True)
                spans.append(self._locate(text, prompt, message["content"]))
        if not spans:
            raise Reject("no assistant turn")
        return Conversation(text, spans)

    @staticmethod
    def _locate(text: str, prompt: str, content: str) -> tuple[int, int]:
        start = len(prompt)
        if text.startswith(prompt):
            for form in (content, content.strip()):  # some templates trim what they are given
                found = text.find(form, start)
                if found >= 0:
                    return start, found + len(form)
        raise Reject("the template changes an assistant turn, so its place in the text is unknown")


def parse_messages(data: bytes) -> list[dict]:
    """The messages of one JSONL record; raises Reject with the reason if it is not a conversation."""
    try:
        record = json.loads(data.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError):
        raise Reject("not JSON") from None
    if not isinstance(record, dict):
        raise Reject("not a JSON object")
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Reject("no list of messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
            raise Reject("a message without a role")
        if not isinstance(message.get("content"), str):
            raise Reject("a message whose content is not text")
    return messages


def is_utf8(text: str) -> bool:
    """Whether a string can be encoded; JSON escapes can smuggle lone surrogates in."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def to_json(value: object, indent: int | None = None, ensure_ascii: bool = False, **options) -> str:
    """The templates' `tojson`: jinja2's own would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def refuse(message: str):
    """The templates' `raise_exception`."""
    raise TemplateError(message)
