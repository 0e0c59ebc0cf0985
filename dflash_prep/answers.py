"""A conversation whose answers are asked for anew, turn by turn, each after the new ones before it.

What is recorded stays where something recorded depends on it: a tool's result answers the recorded call and no other. What
nothing recorded answers, the target's own tool call or an answer that was cut short, ends the conversation.
"""

import json
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

from dflash_prep.chat import REASONING
from dflash_prep.endpoint import Answer
from dflash_prep.errors import Reject
from dflash_prep.formats import Dialogue

RESULTS = ("tool", "function", "ipython")  # roles in which a tool's result comes back
SENT = ("role", "content", "name", "tool_calls", "tool_call_id")  # what servers know of a message
ANSWERS, TOKENS, CUT = "answers", "answer tokens", "answers cut at --max-tokens"
KEPT_CALLS, OWN_CALLS = "tool-call turns kept as recorded", "answers that call a tool"
MERGED, OPENINGS = "assistant turns merged into the one before", "assistant turns before any question, left out"
ENDED = "conversations ended early, by a cut answer or a tool call of the target's own"
COUNTED = (ANSWERS, TOKENS, CUT, OWN_CALLS, ENDED, KEPT_CALLS, MERGED, OPENINGS)  # as reports list them


class Regenerated(NamedTuple):
    """A conversation with the target's own answers, what it came to, and why the last answer ended."""

    messages: list[dict]
    tools: list | None
    counts: Counter
    finish: str


def regenerated(said: Dialogue, ask: Callable[[list[dict], list | None, int], Answer]) -> Regenerated:
    """Ask for each answer of a conversation; `ask` gets the messages before it, the tools, and its number from 0."""
    tools = [offered(tool) for tool in said.tools] if said.tools else None
    counts: Counter = Counter()
    turns = script(said.messages, counts)
    if None not in turns:
        raise Reject("no question to answer")
    messages, finish = [], ""
    for place, turn in enumerate(turns):
        if turn is not None:
            messages.append(turn)
            continue
        answer = ask(as_sent(messages), tools, counts[ANSWERS])
        messages.append(answer.message)
        finish = answer.finish
        calls, cut = bool(answer.message.get("tool_calls")), finish == "length"
        counts += Counter({ANSWERS: 1, TOKENS: answer.tokens, CUT: cut, OWN_CALLS: calls})
        if (calls or cut) and None in turns[place:][1:]:
            counts[ENDED] += 1
        if calls or cut:
            break
    return Regenerated(messages, tools, counts, finish)


def script(messages: list[dict], counts: Counter) -> list[dict | None]:
    """The turns of a conversation, None where the target is to answer; `counts` notes what else becomes of the recorded.

    Assistant turns in a row are one answer. They stay as recorded where a tool's result follows them. An answer is added
    where the conversation ends without one.
    """
    turns: list[dict | None] = []
    unanswered = False
    groups = [(speaks, list(group)) for speaks, group in groupby(messages, lambda turn: turn["role"] == "assistant")]
    followers = [group[0]["role"] for _, group in groups[1:]] + [""]
    for (speaks, group), follower in zip(groups, followers, strict=True):
        if not speaks:
            turns += group
            unanswered = unanswered or any(turn["role"] in ("user", *RESULTS) for turn in group)
        elif follower in RESULTS:
            turns += [turn | {"weight": 0} for turn in group]  # not the target's words: nothing to learn
            counts[KEPT_CALLS] += len(group)
        elif unanswered:
            turns.append(None)
            counts[MERGED] += len(group) - 1
            unanswered = False
        else:
            counts[OPENINGS] += len(group)
    return [*turns, None] if unanswered else turns


def as_sent(messages: list[dict]) -> list[dict]:
    """Messages as a request has them: OpenAI's keys alone, and an id for each tool call and its result.

    Corpora often lack the ids, but servers insist on them.
    """
    sent, open_calls, number = [], [], 0
    for message in messages:
        thought = next((message[name] for name in REASONING if message.get(name) is not None), None)
        message = {key: message[key] for key in SENT if key in message}
        message |= {} if thought is None else {"reasoning_content": thought}
        if isinstance(message.get("tool_calls"), list):
            calls = [sendable(call) for call in message["tool_calls"]]
            for call in calls:
                number += 1
                if isinstance(call, dict) and not call.get("id"):
                    call["id"] = f"call{number:05d}"  # nine letters and digits, as Mistral's templates want them
            message["tool_calls"] = calls
            open_calls = [call["id"] for call in calls if isinstance(call, dict)]
        elif message["role"] in RESULTS and open_calls:
            answered = open_calls.pop(0)
            message.setdefault("tool_call_id", answered)
        sent.append(message)
    return sent


def sendable(call: object) -> object:
    """A tool call in OpenAI's form: its function in an object of its own, the arguments as JSON text."""
    if not isinstance(call, dict):
        return call
    function = call.get("function", {key: call[key] for key in ("name", "arguments") if key in call})
    if isinstance(function, dict) and not isinstance(function.get("arguments", ""), str):
        function = function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False, default=str)}
    return ({"id": call["id"]} if call.get("id") else {}) | {"type": "function", "function": function}


def offered(tool: object) -> object:
    """A tool in OpenAI's form: corpora often list the bare functions."""
    bare = isinstance(tool, dict) and "function" not in tool and "name" in tool and "type" not in tool
    return {"type": "function", "function": tool} if bare else tool
