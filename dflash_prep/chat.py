"""A conversation as its chat template renders it, and where in that text the assistant speaks.

The template is rendered as transformers renders it: in jinja2's immutable sandbox, with the same globals, once for the whole
conversation. The contents are traced through it, so the assistant's parts are places in that one text, and the ids are
those of the whole text, never of pieces.
"""

import json
from datetime import datetime
from itertools import groupby
from typing import NamedTuple

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_prep.errors import Reject, UserError
from dflash_prep.tokenizer import ChatTokenizer
from dflash_prep.traced import Part, Traced, joined, origins, parts_of, plain, traced

GENERATION = "generation"  # the origin of what stands between generation tags; that of a message's parts is its number
REASONING = ("reasoning_content", "thinking", "reasoning")  # a message's reasoning, by the names that corpora give it
SPOKEN = ("content", "tool_calls", *REASONING)
TAKEN = ("messages", "tools", "documents", "add_generation_prompt")  # names that no further argument of a template may have
REMEMBERED = 200  # characters: what a template writes between two messages is seldom longer
CHANGED = "the template changes an assistant turn, so its place in the text is unknown"


class Conversation(NamedTuple):
    """The rendered text and the character spans [start, end) of what the assistant said in it.

    `tagged`: the spans are the template's own generation tags, which hold all that is to be learnt; else a turn's end
    token is to be added.
    `contents`: where characters of messages stand, in the order of the text.
    """

    text: str
    spans: list[tuple[int, int]]
    tagged: bool = False
    contents: tuple[tuple[int, int], ...] = ()


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
        self._offsets: dict[tuple, int] = {}

    def render(self, messages: list[dict], add_generation_prompt: bool = False, tools: list | None = None) -> str:
        """The text of a conversation; raises Reject where the template refuses it."""
        try:
            return self._template_for(tools).render(
                messages=[with_reasoning(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._arguments,
            )
        except Exception as fault:  # a template is a program of the user's: it may raise anything
            raise Reject(f"template error: {fault}") from None

    def _template_for(self, tools: list | None) -> Template:
        return self._template if tools is None else self._with_tools

    def conversation(self, messages: list[dict], tools: list | None = None, loss: str = "assistant") -> Conversation:
        """Render messages and find what the assistant said, in every turn or in its last one; with `all` it is everything.

        A message without content, which only calls tools, is rendered as transformers has it, or else as servers do: with
        an empty content, or null.
        """
        if loss != "all" and all(message["role"] != "assistant" for message in messages):
            raise Reject("no assistant turn")
        if all("content" in message for message in messages):
            return self._conversation(messages, tools, loss)
        faults = []
        for stated in ({}, {"content": ""}, {"content": None}):
            try:
                return self._conversation([stated | message for message in messages], tools, loss)
            except Reject as fault:
                faults.append(fault)
        raise min(faults, key=lambda fault: str(fault).startswith("template error"))

    def _conversation(self, messages: list[dict], tools: list | None, loss: str) -> Conversation:
        rendered = self._traced(messages, tools)
        text, parts = plain(rendered), [part for part in parts_of(rendered) if part[2] != GENERATION]
        if not is_utf8(text):
            raise Reject("text with a lone surrogate")
        contents, tagged = tuple((start, end) for start, end, _ in parts), self._template_for(tools).environment.has_tags
        if loss == "all":
            return Conversation(text, [(0, len(text))], contents=contents)
        if tagged:
            spans = [(start, end) for start, end, origin in parts_of(rendered) if origin == GENERATION]
            if not spans:
                raise Reject("nothing between the template's generation tags")
        else:
            turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
            spans = self._turns(text, parts, messages, turns[-1:] if loss == "last-assistant" else turns, tools)
        return Conversation(text, spans[-1:] if loss == "last-assistant" else spans, tagged, contents)

    def _traced(self, messages: list[dict], tools: list | None, add_generation_prompt: bool = False) -> str:
        """The text of a conversation in which each message's parts are known by its number."""
        marked = [
            message | {key: traced(message[key], number) for key in SPOKEN if key in message}
            for number, message in enumerate(messages)
        ]
        return self.render(marked, add_generation_prompt, tools)

    def _turns(
        self, text: str, parts: list[Part], messages: list[dict], turns: list[int], tools: list | None
    ) -> list[tuple[int, int]]:
        """Where turns are: from where the generation prompt ends to the end of the content, or of the tool calls."""
        groups = [(origin, list(group)) for origin, group in groupby(parts, key=lambda part: part[2])]
        places = {origin: place for place, (origin, _) in enumerate(groups)}
        if len(places) < len(groups) or any(number not in places for number in turns):
            raise Reject(CHANGED)
        spans = []
        for number in turns:
            place = places[number]
            before, begin = (groups[place - 1][0], groups[place - 1][1][-1][1]) if place else (None, 0)
            start, end = groups[place][1][0][0], groups[place][1][-1][1]
            start = begin + self._start(text[begin:start], before, messages, number, tools)
            if messages[number].get("tool_calls"):
                after = groups[place + 1][1][0][0] if place + 1 < len(groups) else len(text)
                end += self._end(text[end:after], messages, number, tools)
                if not all(name in text[start:end] for name in called_names(messages[number])):
                    raise Reject("the template leaves out tool calls")
            spans.append((start, end))
        return spans

    def _start(self, header: str, before: int | None, messages: list[dict], number: int, tools: list | None) -> int:
        """How many characters of a turn's header are its generation prompt's; the assistant says the rest itself.

        `header` stands between the part before, of message `before`, and the turn's first part. What follows that part in a
        rendering that ends in the generation prompt is compared with it, once for each header that occurs.
        """
        role = messages[number - 1]["role"] if number else None
        key = (header, role, before is not None and number - before, tools is None)
        if key not in self._offsets:
            prompt = self._traced(messages[:number], tools, add_generation_prompt=True)
            _, begin, origin = last_part(prompt)
            asked = plain(prompt)[begin:]
            shared = alike(asked, header)
            if origin != before or shared < min(len(asked), len(header)):
                raise Reject(CHANGED)
            return self._remember(key, shared)
        return self._offsets[key]

    def _end(self, rest: str, messages: list[dict], number: int, tools: list | None) -> int:
        """How many characters after its last part belong to a turn with tool calls, its end-of-turn token left out.

        `rest` reaches to the next message's first part; it is compared with a rendering that ends after this message.
        """
        key = (rest, tools is None)
        if key not in self._offsets:
            alone = self._traced(messages[: number + 1], tools)
            _, end, origin = last_part(alone)
            if origin != number:
                raise Reject("the template leaves out tool calls")
            said = rest[: alike(plain(alone)[end:], rest)].rstrip()
            ending = next((token for token in self._specials if said.endswith(token)), "")
            return self._remember(key, len(said.removesuffix(ending).rstrip()))
        return self._offsets[key]

    def _remember(self, key: tuple, offset: int) -> int:
        if len(key[0]) <= REMEMBERED:
            self._offsets[key] = offset
        return offset


class TracingEnvironment(ImmutableSandboxedEnvironment):
    """jinja2 as transformers sets it up, in which traced strings stay traced."""

    has_tags = False

    def __init__(self):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = refuse
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.concat = joined
        self.code_generator_class = TracingGenerator


class Generation(Extension):
    """The block {% generation %} that transformers adds to jinja2 around what the assistant says."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> nodes.Node:
        """Hand the block's text to `spoken`."""
        line = next(parser.stream).lineno
        self.environment.has_tags = True
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("spoken"), [], [], body).set_lineno(line)

    def spoken(self, caller: Macro) -> str:
        """The block's text, traced to the tags."""
        text = caller()
        return Traced(text, (*parts_of(text), (0, len(text), GENERATION)))


class TracingGenerator(CodeGenerator):
    """jinja2's compiler; the operator ~ joins as the rest of a template does."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.write("str(")
            self.visit(part, frame)
            self.write("), ")
        self.write("))")


def compiled(template: str, name: str) -> Template:
    """A template as transformers compiles it; `name` is the tokenizer's, for the error."""
    try:
        return TracingEnvironment().from_string(template)
    except Exception as fault:  # jinja2's own, and Python's where blocks are nested too deeply
        raise UserError(f"{name}: the chat template does not compile: {fault}") from None


def with_reasoning(message: dict) -> dict:
    """A message whose reasoning has the names that templates ask for, as transformers gives them."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning} | message | {"reasoning_content": reasoning}


def last_part(text: str) -> Part:
    """The last part of a text that is a message's; where there is none, its beginning."""
    return next((part for part in reversed(parts_of(text)) if part[2] != GENERATION), (0, 0, None))


def alike(one: str, other: str) -> int:
    """How many characters two strings begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def called_names(message: dict) -> list[str]:
    """The names of the functions that a message calls."""
    calls = message["tool_calls"] if isinstance(message["tool_calls"], list) else []
    functions = [call.get("function", call) for call in calls if isinstance(call, dict)]
    return [str(function.get("name", "")) for function in functions if isinstance(function, dict)]


def is_utf8(text: str) -> bool:
    """Whether a string can be encoded; JSON escapes can smuggle lone surrogates in."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def to_json(value: object, indent: int | None = None, ensure_ascii: bool = False, **options) -> str:
    """The templates' `tojson`: jinja2's own would escape HTML. What one message says stays traced to it."""
    text, found = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options), origins(value)
    return traced(text, found.pop()) if len(found) == 1 else text


def refuse(message: str):
    """The templates' `raise_exception`."""
    raise TemplateError(message)
