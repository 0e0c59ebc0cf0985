"""A conversation as its chat template renders it, and where in that text the assistant speaks.

The template is rendered as transformers renders it: in jinja2's immutable sandbox, with the same globals. The assistant's
parts are found by character offsets in the one full rendering, so the ids are those of the whole text, never of pieces.
"""

import json
from datetime import datetime
from typing import NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_prep.errors import UserError
from dflash_prep.tokenizer import ChatTokenizer


class Reject(Exception):
    """A record that is not kept; its text is the reason that reports count by."""


class Conversation(NamedTuple):
    """The rendered text and the character spans [start, end) of what the assistant said in it."""

    text: str
    spans: list[tuple[int, int]]


class Generation(Extension):
    """The block {% generation %} that transformers adds to jinja2 around what the assistant says: rendered as its body."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> nodes.Node:
        """Replace the block by a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """A tokenizer's chat template, compiled."""

    def __init__(self, tokenizer: ChatTokenizer):
        if tokenizer.template is None:
            raise UserError(f"{tokenizer.name}: this tokenizer has no chat template; name one that has (--tokenizer)")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(tokenizer.template)
        except Exception as fault:  # jinja2's own, and Python's where blocks are nested too deeply
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
        except Exception as fault:  # a template is a program of the user's: it may raise anything
            raise Reject(f"template error: {fault}") from None

    def conversation(self, messages: list[dict]) -> Conversation:
        """Render messages and find each assistant turn: from where its generation prompt ends to its content's end."""
        text = self.render(messages)
        if not is_utf8(text):
            raise Reject("text with a lone surrogate")
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise Reject("no assistant turn")
        spans = []
        for index, end in zip(turns, self._content_ends(text, messages, turns), strict=True):
            prompt = self.render(messages[:index], add_generation_prompt=True)
            content, start = messages[index]["content"], len(prompt)
            if end is None and text.startswith(content, start):
                end = start + len(content)
            if end is None or end < start or not text.startswith(prompt):
                raise Reject("the template changes an assistant turn, so its place in the text is unknown")
            spans.append((start, end))
        return Conversation(text, spans)

    def _content_ends(self, text: str, messages: list[dict], turns: list[int]) -> list[int | None]:
        """Where each assistant content ends in `text`, by a second rendering with marks in the place of the contents.

        Searching for a content could find it in what the template puts around it or in a later turn. All are None where
        the two renderings differ in more than the contents (thinking that the template takes out of one, say).
        """
        mark = "\ue000"
        while mark in text:
            mark += "\ue001"
        marked = [message | {"content": mark} if index in turns else message for index, message in enumerate(messages)]
        first, *pieces = self.render(marked).split(mark)
        unknown: list[int | None] = [None] * len(turns)
        if len(pieces) != len(turns) or not text.startswith(first):
            return unknown
        ends, position = [], len(first)
        for index, piece in zip(turns, pieces, strict=True):
            fitting = (form for form in trimmed_forms(messages[index]["content"]) if text.startswith(form + piece, position))
            form = next(fitting, None)
            if form is None:
                return unknown
            ends.append(position + len(form))
            position = ends[-1] + len(piece)
        return ends if position == len(text) else unknown


def trimmed_forms(content: str) -> list[str]:
    """A content as it is, and as templates trim it."""
    whole = [content, content.strip(), content.lstrip(), content.rstrip()]
    return [*whole, content.strip("\n"), content.lstrip("\n"), content.rstrip("\n")]


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
