"""A conversation as its chat template renders it, and where in that text the assistant speaks.

The template is rendered as transformers renders it: in jinja2's immutable sandbox, with the same globals, once for the whole
conversation. The contents are traced through it, so the assistant's parts are places in that one text, and the ids are
those of the whole text, never of pieces.
"""

from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from jinja2 import Template

from dflash_prep.errors import Reject, UserError
from dflash_prep.template import GENERATION, compiled
from dflash_prep.tokenizer import ChatTokenizer
from dflash_prep.traced import Part, parts_of, plain, traced

REASONING = ("reasoning_content", "thinking", "reasoning")  # a message's reasoning, by the names that corpora give it
SPOKEN = ("content", "tool_calls", *REASONING)
TAKEN = ("messages", "tools", "documents", "add_generation_prompt")  # names that no further argument of a template may have
# What a template writes between two messages is looked into once: it is seldom longer, and seldom of more kinds.
REMEMBERED, MOST_REMEMBERED = 200, 4096
EXAMPLE = [{"role": role, "content": content} for role, content in zip(("user", "assistant") * 2, "abcd", strict=True)]
CHANGED = "the template changes an assistant turn, so its place in the text is unknown"


class Conversation(NamedTuple):
    """The rendered text and the character spans [start, end) of what the assistant said in it.

    `tagged`: the spans are the template's own generation tags, which hold all that is to be learnt; else a turn's end
    token is to be added.
    `contents`: where characters of messages stand, in the order of the text.
    `cut`: the last span was cut off before its end, so that no end-of-turn token is to be learnt there.
    """

    text: str
    spans: list[tuple[int, int]]
    tagged: bool = False
    contents: tuple[tuple[int, int], ...] = ()
    cut: bool = False


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
        self._headers: dict[tuple, str] = {}  # of each header that occurred the generation prompt in its place
        self._endings: dict[tuple, tuple[int, int]] = {}

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

    def conversation(
        self,
        messages: list[dict],
        tools: list | None = None,
        loss: str = "assistant",
        silent: frozenset[int] = frozenset(),
        cut: bool = False,
    ) -> Conversation:
        """Render messages and find what the assistant said, in every turn or in its last one; with `all` it is everything.

        The turns numbered in `silent` are left out; `cut`: the last one was cut off before its end (see formats.Dialogue).
        A message without content, which only calls tools, is rendered as transformers has it, or else as servers do: with
        an empty content, or null.
        """
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if loss != "all" and not turns:
            raise Reject("no assistant turn")
        learnt = [number for number in turns if number not in silent]
        if loss != "all" and not learnt:
            raise Reject("no assistant turn of weight 1")
        learnt = learnt[-1:] if loss == "last-assistant" else learnt
        cut = cut and turns[-1:] == learnt[-1:]
        if all("content" in message for message in messages):
            return self._conversation(messages, tools, loss, turns, learnt)._replace(cut=cut)
        faults = []
        for stated in ({}, {"content": ""}, {"content": None}):
            try:
                stated_messages = [stated | message for message in messages]
                return self._conversation(stated_messages, tools, loss, turns, learnt)._replace(cut=cut)
            except Reject as fault:
                faults.append(fault)
        raise min(faults, key=lambda fault: str(fault).startswith("template error"))

    def _conversation(self, messages: list[dict], tools: list | None, loss: str, turns: list[int], learnt: list[int]):
        rendered = self._traced(messages, tools)
        text, parts = plain(rendered), [part for part in parts_of(rendered) if part[2][0] != GENERATION]
        if not is_utf8(text):
            raise Reject("text with a lone surrogate")
        contents, tagged = tuple((start, end) for start, end, _ in parts), self._template_for(tools).environment.has_tags
        if loss == "all":
            return Conversation(text, [(0, len(text))], contents=contents)
        if tagged:
            spans = [(start, end) for start, end, (owner, _) in parts_of(rendered) if owner == GENERATION]
            if not spans:
                raise Reject("nothing between the template's generation tags")
            spans = tagged_turns(text, spans, messages, turns, learnt)
        else:
            spans = self._turns(text, parts, messages, learnt, tools)
        return Conversation(text, spans[-1:] if loss == "last-assistant" else spans, tagged, contents)

    def _traced(self, messages: list[dict], tools: list | None, add_generation_prompt: bool = False) -> str:
        """The text of a conversation in which each message's parts are known by its number."""
        marked = [dict(message) for message in messages]
        for number, message in enumerate(marked):
            for key in SPOKEN:
                if key in message:
                    message[key] = traced(message[key], number, key)
        return self.render(marked, add_generation_prompt, tools)

    def _turns(
        self, text: str, parts: list[Part], messages: list[dict], turns: list[int], tools: list | None
    ) -> list[tuple[int, int]]:
        """Where turns are: from where the generation prompt ends to the end of the content, or of the tool calls."""
        groups = [(owner, list(group)) for owner, group in groupby(parts, key=lambda part: part[2][0])]
        places = {owner: place for place, (owner, _) in enumerate(groups)}
        if len(places) < len(groups) or any(number not in places for number in turns):
            raise Reject(CHANGED)
        spans = []
        for number in turns:
            place = places[number]
            before, begin = (groups[place - 1][0], groups[place - 1][1][-1][1]) if place else (None, 0)
            own = groups[place][1]
            start = self._start(text, begin, text[begin : own[0][0]], before, messages, number, tools)
            end = own[-1][1]
            if messages[number].get("tool_calls"):
                after = groups[place + 1][1][0][0] if place + 1 < len(groups) else len(text)
                end = self._end(text, own, after, messages, number, tools)
                check_calls(text[start:end], messages[number])
            spans.append((start, end))
        return spans

    def _start(
        self, text: str, begin: int, header: str, before: int | None, messages: list[dict], number: int, tools
    ) -> int:
        """Where the assistant begins to speak: after its generation prompt, if the turn goes on with all of that.

        If not (a template may strip the thinking that the prompt opens), after what the prompt shares with every turn.
        `header` stands between the part before, which ends at `begin` and is of message `before`, and the turn's first part.
        """
        role = messages[number - 1]["role"] if number else None
        key = (header, role, before is not None and number - before, tools is None)
        asked = self._headers.get(key)
        if asked is None:
            asked = self._asked(header, before, messages[:number], tools)
            if len(header) <= REMEMBERED and len(self._headers) < MOST_REMEMBERED:
                self._headers[key] = asked
        return self._after(text, begin, asked)

    def _after(self, text: str, begin: int, asked: str) -> int:
        """The end of a prompt that begins somewhere in a text, or of the part of it that every turn has."""
        for prompt in (asked, asked.removesuffix(self._opened)):
            if text.startswith(prompt, begin):
                return begin + len(prompt)
        raise Reject(CHANGED)

    def _asked(self, header: str, before: int | None, messages: list[dict], tools: list | None) -> str:
        """What stands between the part before a turn and the turn where it is still to be written."""
        if messages:  # else the template may refuse, or leave out the system prompt that it puts before a first turn
            prompt = self._traced(messages, tools, add_generation_prompt=True)
            _, end, (owner, _) = last_part(prompt)
            if owner == before:
                return plain(prompt)[end:]
        shared = self._prompt.removesuffix(self._opened)
        if shared not in header:
            raise Reject(CHANGED)
        return header[: header.rindex(shared)] + self._prompt

    @cached_property
    def _prompt(self) -> str:
        """The generation prompt: what it adds to a conversation."""
        asked, with_prompt = (plain(self.render(EXAMPLE[:1], added)) for added in (False, True))
        return with_prompt[alike(asked, with_prompt) :]

    @cached_property
    def _opened(self) -> str:
        """What the generation prompt says that not every turn begins with: an empty thinking block, say."""
        try:
            text, prompt = self._traced(EXAMPLE, None), self._traced(EXAMPLE[:1], None, add_generation_prompt=True)
        except Reject:
            return ""
        places = [(start, end) for start, end, (owner, _) in parts_of(text) if owner in (0, 1)]
        asked, begin = plain(prompt)[last_part(prompt)[1] :], places[0][1]
        header = plain(text)[begin : places[1][0]] if len(places) > 1 else asked
        return asked[alike(asked, header) :] if asked.startswith(header) else ""

    def _end(self, text: str, own: list[Part], after: int, messages: list[dict], number: int, tools: list | None) -> int:
        """Where a turn with tool calls ends, its end-of-turn token left out; the next message's first part is at `after`.

        A rendering that ends with this message tells which of its parts is the turn's last (a template may name a function
        again in the header of its result) and what follows that. That is looked at once for each way to write a turn.
        """
        borders = [*[border for start, end, _ in own for border in (start, end)][1:], after]
        written = tuple(text[end:start] for end, start in zip(borders[::2], borders[1::2], strict=True))
        known = self._endings.get(written)
        if known is None:
            alone = self._traced(messages[: number + 1], tools)
            _, begin, last = last_part(alone)
            count = next((place for place, part in enumerate(own, start=1) if part[2] == last), 0)
            if not count:
                raise Reject("the template leaves out tool calls")
            rest = text[own[count - 1][1] : after]
            said = rest[: alike(plain(alone)[begin:], rest)].rstrip()
            ending = next((token for token in self._specials if said.endswith(token)), "")
            known = count, len(said.removesuffix(ending).rstrip())
            if sum(map(len, written)) <= REMEMBERED and len(self._endings) < MOST_REMEMBERED:
                self._endings[written] = known
        count, length = known
        return own[count - 1][1] + length


def with_reasoning(message: dict) -> dict:
    """A message whose reasoning has the names that templates ask for, as transformers gives them."""
    if "reasoning_content" not in message and "thinking" not in message and "reasoning" not in message:
        return message
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning} | message | {"reasoning_content": reasoning}


def tagged_turns(text: str, spans: list[tuple[int, int]], messages: list[dict], turns: list[int], learnt: list[int]):
    """Of the places of generation tags those of the turns that are learnt; a tag may stand for several turns."""
    if len(spans) == len(turns):
        for (start, end), number in zip(spans, turns, strict=True):
            check_calls(text[start:end], messages[number])
        return [span for span, number in zip(spans, turns, strict=True) if number in learnt]
    if learnt not in (turns, turns[-1:]):
        raise Reject("the template's generation tags are not one a turn, so that a turn of weight 0 cannot be left out")
    return spans


def last_part(text: str) -> Part:
    """The last part of a text that is a message's; where there is none, its beginning."""
    return next((part for part in reversed(parts_of(text)) if part[2][0] != GENERATION), (0, 0, (None, "")))


def alike(one: str, other: str) -> int:
    """How many characters two strings begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def check_calls(said: str, message: dict) -> None:
    """Refuse a turn that does not name each function as often as its message calls it."""
    calls = message["tool_calls"] if isinstance(message.get("tool_calls"), list) else []
    functions = [call.get("function", call) for call in calls if isinstance(call, dict)]
    names = [str(function.get("name", "")) for function in functions if isinstance(function, dict)]
    if any(said.count(name) < names.count(name) for name in names):
        raise Reject("the template leaves out tool calls")


def is_utf8(text: str) -> bool:
    """Whether a string can be encoded; JSON escapes can smuggle lone surrogates in."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
