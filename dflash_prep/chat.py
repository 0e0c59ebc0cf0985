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
from dflash_prep.template import GENERATION, compiled, is_constant
from dflash_prep.tokenizer import ChatTokenizer
from dflash_prep.traced import Part, parts_of, plain, traced

REASONING = ("reasoning_content", "thinking", "reasoning")  # a message's reasoning, by the names that corpora give it
SPOKEN = ("content", "tool_calls", *REASONING)
TAKEN = ("messages", "tools", "documents", "add_generation_prompt")  # names that no further argument of a template may have
EXAMPLE = [{"role": role, "content": content} for role, content in zip(("user", "assistant") * 2, "abcd", strict=True)]
CHANGED = "the template changes an assistant turn, so its place in the text is unknown"


class Conversation(NamedTuple):
    """The rendered text and the character spans [start, end) of what the assistant said in it.

    `tagged`: the spans are the template's own generation tags, which hold all that is to be learnt; else a turn's end
    token is to be added.
    `contents`: where characters of messages stand, in the order of the text.
    `cut`: the last span was cut off before its end, so that no end-of-turn token is to be learnt there.
    `closing`: what the template writes after each answer, its end-of-turn token at the end; empty where that is not known.
    """

    text: str
    spans: list[tuple[int, int]]
    tagged: bool = False
    contents: tuple[tuple[int, int], ...] = ()
    cut: bool = False
    closing: str = ""


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
        self._sources = {True: tokenizer.template, False: tokenizer.tool_template or tokenizer.template}
        self._arguments = tokenizer.named_tokens | (arguments or {})
        self._specials = sorted(tokenizer.special_texts, key=len, reverse=True)

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
            spans = tagged_turns(text, parts_of(rendered), messages, turns, learnt)
        else:
            spans = self._turns(text, parts, messages, learnt, tools)
        return Conversation(text, spans, tagged, contents, closing=self._prompts[tools is None].closing)

    def _traced(self, messages: list[dict], tools: list | None, add_generation_prompt: bool = False) -> str:
        """The text of a conversation in which each message's parts are known by its number."""
        marked = [dict(message) for message in messages]
        for number, message in enumerate(marked):
            for key in SPOKEN:
                if key in message:
                    message[key] = marked_value(message[key], number, key)
        return self.render(marked, add_generation_prompt, tools)

    def _turns(
        self, text: str, parts: list[Part], messages: list[dict], turns: list[int], tools: list | None
    ) -> list[tuple[int, int]]:
        """Where turns are: from where the generation prompt ends to the end of the content, or of the tool calls."""
        groups = [(owner, list(group)) for owner, group in groupby(parts, key=lambda part: part[2][0])]
        places = {owner: place for place, (owner, _) in enumerate(groups)}
        if len(places) < len(groups) or any(number not in places and says_something(messages[number]) for number in turns):
            raise Reject(CHANGED)
        spans = []
        for number in filter(places.__contains__, turns):  # of an empty answer a template may leave no trace
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
        prompt = self._prompts[tools is None]
        asked = self._asked(header, before, messages[:number], tools, prompt)
        for asked_for in (asked, asked.removesuffix(prompt.opened)):
            if text.startswith(asked_for, begin):
                return begin + len(asked_for)
        raise Reject(CHANGED)

    def _asked(self, header: str, before: int | None, messages: list[dict], tools: list | None, prompt: "Prompt") -> str:
        """What stands between the part before a turn and the turn where it is still to be written.

        Where a template writes the same generation prompt after any conversation, it is looked for in the header; else, and
        where it writes none, these messages are rendered with it.
        """
        shared = prompt.text.removesuffix(prompt.opened)
        place = header.rfind(shared)
        if messages and not (prompt.constant and shared and place >= 0):
            rendered = self._traced(messages, tools, add_generation_prompt=True)
            _, end, (owner, _) = last_part(rendered)
            if owner == before:
                return plain(rendered)[end:]
        if place < 0:
            raise Reject(CHANGED)
        return header[:place] + prompt.text

    @cached_property
    def _prompts(self) -> dict[bool, "Prompt"]:
        """The generation prompt of each template; True: without tools."""
        return {bare: self._prompt(None if bare else []) for bare in (True, False)}

    def _prompt(self, tools: list | None) -> "Prompt":
        template = self._template_for(tools)
        try:
            bare, prompted = (self._traced(EXAMPLE[:1], tools, added) for added in (False, True))
            text = plain(prompted)[alike(bare, prompted) :]
            whole = self._traced(EXAMPLE, tools)
        except Reject:  # of a conversation that is as plain as can be: let each record say why
            return Prompt("", "", "", False)
        places = {owner: (start, end) for start, end, (owner, _) in parts_of(whole)}
        if not {0, 1, 2} <= places.keys():
            return Prompt(text, "", "", is_constant(template.environment, self._sources[tools is None]))
        asked, header = plain(prompted)[last_part(prompted)[1] :], plain(whole)[places[0][1] : places[1][0]]
        shared = alike(asked, header)
        if shared < min(len(asked), len(header)):  # inside of what is opened: back to where a line or a token begins
            ends = [asked.rfind(token, 0, shared) + len(token) for token in self._specials if token in asked[:shared]]
            shared = max([asked.rfind("\n", 0, shared) + 1, *ends])
        last, first = self._traced(EXAMPLE[:2], tools), plain(whole)[places[1][1] : places[2][0]]
        tail = plain(last)[last_part(last)[1] :]
        closing = first[: alike(tail, first)].rstrip()
        closing = closing if any(closing.endswith(token) for token in self._specials) else ""
        return Prompt(text, asked[shared:], closing, is_constant(template.environment, self._sources[tools is None]))

    def _end(self, text: str, own: list[Part], after: int, messages: list[dict], number: int, tools: list | None) -> int:
        """Where a turn with tool calls ends, its end-of-turn token left out; the next message's first part is at `after`.

        A rendering that ends with this message tells which of its parts is the turn's last (a template may name a function
        again in the header of its result) and what follows that.
        """
        alone = self._traced(messages[: number + 1], tools)
        _, begin, last = last_part(alone)
        written = next((end for _, end, origin in own if origin == last), None)
        if written is None:
            raise Reject("the template leaves out tool calls")
        rest = text[written:after]
        said = rest[: alike(plain(alone)[begin:], rest)].rstrip()
        ending = next((token for token in self._specials if said.endswith(token)), "")
        return written + len(said.removesuffix(ending).rstrip())


class Prompt(NamedTuple):
    """What a template writes around an answer: its generation prompt, and what of that not every turn begins with.

    `closing`: what follows an answer up to its end-of-turn token, empty where that differs between turns. `constant`: the
    prompt is the same after any conversation.
    """

    text: str
    opened: str
    closing: str
    constant: bool


def marked_value(value: object, number: int, key: str) -> object:
    """A part of a message traced to its number."""
    try:
        return traced(value, number, key)
    except RecursionError:
        raise Reject("nested too deeply") from None


def with_reasoning(message: dict) -> dict:
    """A message whose reasoning has the names that templates ask for, as transformers gives them."""
    if "reasoning_content" not in message and "thinking" not in message and "reasoning" not in message:
        return message
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning} | message | {"reasoning_content": reasoning}


def tagged_turns(text: str, parts: tuple[Part, ...], messages: list[dict], turns: list[int], learnt: list[int]):
    """The places of generation tags that hold what one of the turns `learnt` says.

    A tag belongs to the turn whose words are in it, or, with none in it (an end token alone), to that of the tag before.
    """
    tags = [(start, end) for start, end, (owner, _) in parts if owner == GENERATION]
    if not tags:
        raise Reject("nothing between the template's generation tags")
    said, owners, owner = [part for part in parts if part[2][0] in set(turns)], [], None
    for start, end in tags:
        owner = next((number for first, last, (number, _) in said if start <= first and last <= end), owner)
        owners.append(owner)
    if None in owners or (len(tags) == len(turns) and owners != turns):  # words that cannot be traced: one a turn, in order
        if len(tags) != len(turns) and learnt != turns:
            raise Reject("the template's generation tags cannot be told apart by turn")
        owners = turns if len(tags) == len(turns) else [learnt[0]] * len(tags)
    for number in turns if len(tags) == len(turns) else ():
        check_calls(text[slice(*tags[turns.index(number)])], messages[number])
    return [tag for tag, owner in zip(tags, owners, strict=True) if owner in learnt]


def says_something(message: dict) -> bool:
    """Whether a message has anything but white space to say."""
    return bool((message.get("content") or "").strip() or message.get("tool_calls"))


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
