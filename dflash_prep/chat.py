"""A conversation as its chat template renders it, and where in that text the assistant speaks.

The template is rendered as transformers renders it: in jinja2's immutable sandbox, with the same globals. The assistant's
parts are found by character offsets in the one full rendering, so the ids are those of the whole text, never of pieces.
"""

import json
from datetime import datetime
from typing import NamedTuple

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_prep.errors import Reject, UserError
from dflash_prep.tokenizer import ChatTokenizer


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


TAKEN = ("messages", "tools", "documents", "add_generation_prompt")  # names that no further argument of a template may have


class ChatTemplate:
    """A tokenizer's chat template, compiled, with the arguments that each rendering gives it."""

    def __init__(self, tokenizer: ChatTokenizer, arguments: dict[str, object] | None = None):
        if tokenizer.template is None:
            raise UserError(
                f"{tokenizer.name}: this tokenizer has no chat template; name one that has (--tokenizer), or a file with "
                "a template (--chat-template)"
            )
        self._template = compiled(tokenizer.template, tokenizer.name)
        self._with_tools = compiled(tokenizer.tool_template, tokenizer.name) if tokenizer.tool_template else self._template
        self._arguments = tokenizer.named_tokens | (arguments or {})
        self._specials = sorted(tokenizer.special_texts, key=len, reverse=True)

    def render(self, messages: list[dict], add_generation_prompt: bool = False, tools: list | None = None) -> str:
        """The text of a conversation; raises Reject where the template refuses it."""
        try:
            template = self._template if tools is None else self._with_tools
            return template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._arguments,
            )
        except Exception as fault:  # a template is a program of the user's: it may raise anything
            raise Reject(f"template error: {fault}") from None

    def conversation(self, messages: list[dict], tools: list | None = None, loss: str = "assistant") -> Conversation:
        """Render messages and find what the assistant said, in every turn or in its last one; with `all` it is everything.

        A turn reaches from where its generation prompt ends to its content's end, or to its tool calls' end.
        """
        text = self.render(messages, tools=tools)
        if not is_utf8(text):
            raise Reject("text with a lone surrogate")
        if loss == "all":
            return Conversation(text, [(0, len(text))])
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise Reject("no assistant turn")
        if loss == "last-assistant":
            turns = turns[-1:]
        spans = []
        for index, end in zip(turns, self._content_ends(text, messages, turns, tools), strict=True):
            prompt = self.render(messages[:index], add_generation_prompt=True, tools=tools)
            content, start = messages[index]["content"], len(prompt)
            if messages[index].get("tool_calls"):
                end = self._turn_end(text, start, messages[: index + 1], tools)
            elif end is None and text.startswith(content, start):
                end = start + len(content)
            if end is None or end < start or not text.startswith(prompt):
                raise Reject("the template changes an assistant turn, so its place in the text is unknown")
            spans.append((start, end))
        return Conversation(text, spans)

    def _content_ends(self, text: str, messages: list[dict], turns: list[int], tools: list | None) -> list[int | None]:
        """Where each assistant content ends in `text`, by a second rendering with marks in the place of the contents.

        Searching for a content could find it in what the template puts around it or in a later turn. All are None where
        the two renderings differ in more than the contents (thinking that the template takes out of one, say).
        """
        plain = [index for index in turns if not messages[index].get("tool_calls")]
        unknown: list[int | None] = [None] * len(turns)
        if not plain:
            return unknown
        mark = "\ue000"
        while mark in text:
            mark += "\ue001"
        marked = [message | {"content": mark} if index in plain else message for index, message in enumerate(messages)]
        first, *pieces = self.render(marked, tools=tools).split(mark)
        if len(pieces) != len(plain) or not text.startswith(first):
            return unknown
        ends, position = {}, len(first)
        for index, piece in zip(plain, pieces, strict=True):
            fitting = (form for form in trimmed_forms(messages[index]["content"]) if text.startswith(form + piece, position))
            form = next(fitting, None)
            if form is None:
                return unknown
            ends[index] = position + len(form)
            position = ends[index] + len(piece)
        return [ends.get(index) for index in turns] if position == len(text) else unknown

    def _turn_end(self, text: str, start: int, messages: list[dict], tools: list | None) -> int | None:
        """Where the last of these messages ends in `text` if `start` is where it begins, its end-of-turn token left out.

        The messages alone are rendered again. What a template puts before the last of all turns only (an empty thinking
        block, say) is not in `text`: the longest ending that fits is the turn.
        """
        alone = self.render(messages, tools=tools).rstrip()
        first = min(start, len(alone))
        for begin in range(first, len(alone)):
            if text.startswith(alone[begin:], start):
                break
        else:
            return None
        said = alone[begin:]
        if not all(name in said for name in called_names(messages[-1])):
            raise Reject("the template leaves out tool calls")
        ending = next((token for token in self._specials if said.endswith(token)), "")
        return start + len(said.removesuffix(ending).rstrip())


def compiled(template: str, name: str) -> Template:
    """A template as transformers compiles it; `name` is the tokenizer's, for the error."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except Exception as fault:  # jinja2's own, and Python's where blocks are nested too deeply
        raise UserError(f"{name}: the chat template does not compile: {fault}") from None


def called_names(message: dict) -> list[str]:
    """The names of the functions that a message calls."""
    calls = message["tool_calls"] if isinstance(message["tool_calls"], list) else []
    functions = [call.get("function", call) for call in calls if isinstance(call, dict)]
    return [str(function.get("name", "")) for function in functions if isinstance(function, dict)]


def trimmed_forms(content: str) -> list[str]:
    """A content as it is, and as templates trim it."""
    whole = [content, content.strip(), content.lstrip(), content.rstrip()]
    return [*whole, content.strip("\n"), content.lstrip("\n"), content.rstrip("\n")]


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
