"""Which turns are asked for, with which messages before them, and what stays as recorded."""

from collections import Counter

import pytest

from dflash_prep.answers import (
    ANSWERS,
    CUT,
    ENDED,
    KEPT_CALLS,
    MERGED,
    OPENINGS,
    OWN_CALLS,
    TOKENS,
    as_sent,
    offered,
    regenerated,
)
from dflash_prep.endpoint import Answer
from dflash_prep.errors import Reject
from dflash_prep.formats import Dialogue

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "c": "assistant"}


def conversation(letters: str) -> list[dict]:
    """Messages by their roles' letters, numbered in their contents; c is an assistant's turn with a tool call."""
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    return [
        {"role": ROLES[letter], "content": f"{letter}{place}"} | ({"tool_calls": [call]} if letter == "c" else {})
        for place, letter in enumerate(letters)
    ]


def play(letters: str, answers=()) -> tuple[str, list[str], Counter]:
    """The contents of what comes of a conversation, those of each request, and the counts.

    `answers` are the target's: by default plain ones, "cut" or "call"; each is named by its number.
    """
    requests = []

    def ask(messages, tools, number):
        requests.append(" ".join(message["content"] for message in messages))
        kind = answers[number] if number < len(answers) else ""
        call = {"type": "function", "function": {"name": "own", "arguments": "{}"}}
        message = {"role": "assistant", "content": f"new{number}"} | ({"tool_calls": [call]} if kind == "call" else {})
        return Answer(message, {"cut": "length", "call": "tool_calls"}.get(kind, "stop"), 5)

    new = regenerated(Dialogue(conversation(letters)), ask)
    return " ".join(message["content"] for message in new.messages), requests, +new.counts


CASES = {
    "one turn": ("ua", "u0 new0", ["u0"], {}),
    "with a system turn": ("sua", "s0 u1 new0", ["s0 u1"], {}),
    "each with the new ones before it": (
        "uauaua",
        "u0 new0 u2 new1 u4 new2",
        ["u0", "u0 new0 u2", "u0 new0 u2 new1 u4"],
        {},
    ),
    "a missing last answer": ("uau", "u0 new0 u2 new1", ["u0", "u0 new0 u2"], {}),
    "no answer at all": ("u", "u0 new0", ["u0"], {}),
    "questions in a row": ("uuau", "u0 u1 new0 u3 new1", ["u0 u1", "u0 u1 new0 u3"], {}),
    "answers in a row": ("uaaua", "u0 new0 u3 new1", ["u0", "u0 new0 u3"], {MERGED: 1}),
    "an opening": ("aua", "u1 new0", ["u1"], {OPENINGS: 1}),
    "an opening after a system turn": ("saaua", "s0 u3 new0", ["s0 u3"], {OPENINGS: 2}),
    "a call and its result": ("ucta", "u0 c1 t2 new0", ["u0 c1 t2"], {KEPT_CALLS: 1}),
    "two calls": (
        "uctcttaua",
        "u0 c1 t2 c3 t4 t5 new0 u7 new1",
        ["u0 c1 t2 c3 t4 t5", "u0 c1 t2 c3 t4 t5 new0 u7"],
        {KEPT_CALLS: 2},
    ),
    "text before a call": ("uact", "u0 a1 c2 t3 new0", ["u0 a1 c2 t3"], {KEPT_CALLS: 2}),
    "a call written as text": ("uata", "u0 a1 t2 new0", ["u0 a1 t2"], {KEPT_CALLS: 1}),
    "a call without a result": ("ucua", "u0 new0 u2 new1", ["u0", "u0 new0 u2"], {}),
    "a last call": ("uauc", "u0 new0 u2 new1", ["u0", "u0 new0 u2"], {}),
    "a system turn at the end": ("uas", "u0 new0 s2", ["u0"], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_asked_and_kept(name):
    letters, expected, asked, noted = CASES[name]
    contents, requests, counts = play(letters)
    assert (contents, requests) == (expected, asked)
    assert counts == Counter({ANSWERS: len(asked), TOKENS: 5 * len(asked)} | noted)


@pytest.mark.parametrize(("kind", "name"), [("cut", CUT), ("call", OWN_CALLS)])
def test_a_cut_answer_or_an_own_call_ends_the_conversation(kind, name):
    contents, requests, counts = play("uauaua", ["", kind])
    assert contents == "u0 new0 u2 new1" and len(requests) == 2
    assert counts == Counter({ANSWERS: 2, TOKENS: 10, name: 1, ENDED: 1})


@pytest.mark.parametrize("kind", ["cut", "call"])
def test_a_last_one_ends_nothing(kind):
    assert ENDED not in play("uaua", ["", kind])[2]


@pytest.mark.parametrize("letters", ["s", "a", "saa"])
def test_nothing_to_answer(letters):
    with pytest.raises(Reject, match="no question to answer"):
        play(letters)


def test_requests_have_ids_text_arguments_and_no_other_keys():
    messages = [
        {"role": "user", "content": "?", "weight": 0, "name": "eve"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "tool_calls": [{"function": {"name": "f", "arguments": {"x": "é"}}}, {"name": "g"}],
        },
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2", "tool_call_id": "given"},
        {"role": "tool", "content": "surplus"},
    ]
    before = repr(messages)
    assert as_sent(messages) == [
        {"role": "user", "content": "?", "name": "eve"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}, "id": "call00001"},
                {"type": "function", "function": {"name": "g"}, "id": "call00002"},
            ],
        },
        {"role": "tool", "content": "1", "tool_call_id": "call00001"},
        {"role": "tool", "content": "2", "tool_call_id": "given"},
        {"role": "tool", "content": "surplus"},
    ]
    assert repr(messages) == before


@pytest.mark.parametrize("calls", [[None], ["f"], [{"function": None}], [{}], {}, "f", 5])
def test_odd_tool_calls_are_left_to_the_server(calls):
    assert as_sent([{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": ""}])


def test_bare_functions_are_wrapped():
    assert offered({"name": "f", "parameters": {}}) == {"type": "function", "function": {"name": "f", "parameters": {}}}
    for tool in ({"type": "function", "function": {"name": "f"}}, {"type": "web", "name": "x"}, "f", None):
        assert offered(tool) == tool


def test_recorded_calls_stay_but_are_not_to_be_learnt():
    """Loss belongs on the target's own words; a recorded call is there because its recorded result follows."""
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    recorded = [
        {"role": "user", "content": "q"},
        call,
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "old"},
    ]
    seen = []

    def ask(messages, tools, turn):
        seen.extend(messages)
        return Answer({"role": "assistant", "content": "new"}, "stop", 1)

    new = regenerated(Dialogue(recorded), ask)
    assert new.messages == [recorded[0], call | {"weight": 0}, recorded[2], {"role": "assistant", "content": "new"}]
    assert all("weight" not in message for message in seen)
