"""Formats: what each kind of record says, which kind a file is, and a reason for each refusal."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_prep.errors import Reject
from dflash_prep.formats import Dialogue, Text, detect, parse
from dflash_prep.records import Record
from tests.prep.support import chat

TEXT = st.text(max_size=20)


def read(value: object, form: str, columns: dict[str, str] | None = None):
    """What a value says."""
    return parse(record(value), form, columns)


def detected(*values: object, columns: dict[str, str] | None = None) -> str | None:
    """The format of a file of these records."""
    return detect(map(record, values), columns)


def record(value: object) -> Record:
    """A record that states a JSON value."""
    return Record("c", 1, value if isinstance(value, bytes | Reject) else json.dumps(value))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b'"text"', "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"{}", "no list of messages"),
        (b'{"messages": []}', "no list of messages"),
        (b'{"messages": {"role": "user"}}', "no list of messages"),
        (b'{"messages": [{"content": "a"}]}', "a message without a role"),
        (b'{"messages": [{"role": null, "content": "a"}]}', "a message without a role"),
        (b'{"messages": [{"role": "", "content": "a"}]}', "a message without a role"),
        (b'{"messages": [{"role": ["user"], "content": "a"}]}', "a message without a role"),
        (b'{"messages": [{"role": "user", "content": 7}]}', "a message whose content is not text"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "a message whose content is not text"),
        (b'{"messages": [{"role": "user", "content": []}]}', "a message whose content is not text"),
        (b'{"messages": [{"role": "assistant", "content": null}]}', "a message whose content is not text"),
        (b'{"messages": [], "messages": [{"role": "user", "content": "a"}]}', "a JSON object with a key twice"),
        (b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "a JSON object with a key twice"),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": 7}', "tools that are no list"),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": "x"}', "not JSON"),
        (b'{"messages": ["a"]}', "a message without a role"),
        (b'{"messages": [{"role": "user"}]}', "a message whose content is not text"),
        (b'{"messages": [{"role": "user", "content": null}]}', "a message whose content is not text"),
        (b'{"messages": [{"role": "user", "content": ["a", 1]}]}', "a message whose content is not text"),
    ],
)
def test_each_bad_record_has_its_reason(record, reason):
    with pytest.raises(Reject) as caught:
        parse(Record("c", 1, record), "messages")
    assert str(caught.value) == reason


@given(st.lists(TEXT, min_size=1, max_size=4), st.booleans(), st.booleans(), st.sampled_from([b"", b"\r", b" \t\r"]))
def test_messages_come_back_with_bom_and_crlf(contents, escaped, bom, ending):
    data = json.dumps({"id": 7, "messages": chat(*contents)}, ensure_ascii=escaped).encode()
    assert parse(Record("c", 1, b"\xef\xbb\xbf" * bom + data + ending), "messages") == Dialogue(chat(*contents))


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}


def test_messages_keep_what_templates_may_ask_for():
    tool = {"role": "tool", "name": "f", "tool_call_id": "1", "content": "2"}
    messages = [
        {"role": "system", "content": "s"},
        *chat("a"),
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        tool,
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for given_tools in (tools, json.dumps(tools)):
        assert read({"messages": messages, "tools": given_tools}, "messages") == Dialogue(messages, tools)


def test_nulls_are_left_out_and_parts_are_joined():
    """Columnar files fill in every key of every message with null."""
    user = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"text": "b"}, "c"],
        "tool_calls": None,
    }
    called = {"role": "assistant", "content": None, "tool_calls": [CALL], "name": None}
    assert read({"messages": [user, called], "tools": None}, "messages").messages == [
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "tool_calls": [CALL]},
    ]


@pytest.mark.parametrize("names", [("human", "gpt"), ("user", "assistant"), ("Human", "GPT"), ("prompter", "bot")])
def test_sharegpt_turns_are_messages(names):
    turns = [{"from": names[i % 2], "value": text} for i, text in enumerate("abcd")]
    assert read({"conversations": turns}, "sharegpt") == Dialogue(chat(*"abcd"))
    system = [{"role": "system", "content": "s"}]
    assert read({"conversations": turns, "system": "s"}, "sharegpt") == Dialogue(system + chat(*"abcd"))
    assert (
        read({"conversations": [{"from": "system", "value": "s"}, *turns], "system": "t"}, "sharegpt").messages[0]
        == system[0]
    )


def test_sharegpt_tool_turns():
    turns = [
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "b"},
    ]
    messages = read({"conversations": turns, "tools": "[]"}, "sharegpt").messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


@pytest.mark.parametrize(
    "turn", [{"from": "nobody", "value": "a"}, {"value": "a"}, {"from": "gpt"}, 7, {"from": "gpt", "value": 1}]
)
def test_a_bad_sharegpt_turn_has_a_reason(turn):
    with pytest.raises(Reject, match=r"unknown role: nobody|without a role|not text"):
        read({"conversations": [turn]}, "sharegpt")


def test_instructions_and_prompts():
    expected = Dialogue(chat("a", "b"))
    assert read({"prompt": "a", "response": "b"}, "prompt") == expected
    assert read({"prompt": "a", "completion": "b"}, "prompt") == expected
    for answer in ("output", "response"):
        assert read({"instruction": "a", "input": "", answer: "b"}, "instruction") == expected
        assert read({"instruction": "a", answer: "b"}, "instruction") == expected
        assert read({"instruction": "a", "input": "c", answer: "b"}, "instruction") == Dialogue(chat("a\n\nc", "b"))
    for bad in ({"prompt": "a"}, {"prompt": 1, "response": "b"}, {"prompt": "a", "response": None}):
        with pytest.raises(Reject, match="no text in"):
            read(bad, "prompt")


def test_plain_text():
    assert read({"text": "a"}, "text") == Text("a")
    for bad in ({"text": ""}, {"text": None}, {"text": 5}, {}):
        with pytest.raises(Reject, match=r"empty text|no text in text"):
            read(bad, "text")


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.booleans()), min_size=1, max_size=30))
def test_tokens_with_a_mask_or_with_spans(tokens):
    ids, mask = map(list, zip(*tokens, strict=True))
    spans = [edge for place, flag in enumerate(mask) if flag for edge in (place, place + 1)]
    for row in ({"loss_mask": mask}, {"loss_mask": list(map(int, mask))}, {"loss_spans": spans}):
        said = read({"input_ids": ids} | row, "tokens")
        assert said.ids.tolist() == ids
        assert said.loss.tolist() == mask
        assert said.loss.dtype == np.bool_


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": []},
        {"input_ids": [1.5], "loss_mask": [1]},
        {"input_ids": [-1], "loss_mask": [1]},
        {"input_ids": [2**32], "loss_mask": [1]},
        {"input_ids": "1 2", "loss_mask": [1]},
        {"input_ids": [1, 2]},
        {"input_ids": [1, 2], "loss_mask": [1]},
        {"input_ids": [1, 2], "loss_mask": [1, 2]},
        {"input_ids": [1, 2], "loss_spans": [0]},
        {"input_ids": [1, 2], "loss_spans": [1, 3]},
        {"input_ids": [1, 2], "loss_spans": [1, 0]},
        {"input_ids": [1, 2], "loss_spans": [[0, 1]]},
    ],
)
def test_bad_tokens_have_a_reason(row):
    with pytest.raises(Reject):
        read(row, "tokens")


ROWS = {
    "messages": {"messages": chat("a", "b"), "prompt": "a", "response": "b", "text": "c"},
    "sharegpt": {"id": 1, "conversations": [{"from": "gpt", "value": "a"}], "text": "b"},
    "instruction": {"instruction": "a", "input": "", "output": "b", "text": "the whole of it"},
    "prompt": {"prompt": "a", "completion": "b"},
    "text": {"text": "a", "prompt": "b"},
    "tokens": {"input_ids": [1], "loss_mask": [1], "text": "a"},
}


@pytest.mark.parametrize("name", ROWS)
def test_a_file_is_what_its_first_usable_record_is(name):
    others = [row for other, row in ROWS.items() if other != name]
    assert detected(b"{", [1], Reject("lost"), {"other": 1, "text": None}, json.dumps(ROWS[name]).encode(), *others) == name
    renamed = {f"my_{key}": value for key, value in ROWS[name].items()}
    assert detected(renamed) is None
    columns = {key: f"my_{key}" for key in ROWS[name]}
    assert detected(renamed, columns=columns) == name
    assert repr(read(renamed, name, columns)) == repr(read(ROWS[name], name))


def test_names_inside_messages_are_mapped_too():
    row = {"dialog": [{"speaker": "user", "said": "a"}, {"speaker": "assistant", "said": "b"}]}
    columns = {"messages": "dialog", "role": "speaker", "content": "said"}
    found = [(message["role"], message["content"]) for message in read(row, "messages", columns).messages]
    assert found == [("user", "a"), ("assistant", "b")]


def test_a_record_of_no_known_format_names_its_columns():
    with pytest.raises(Reject, match="no columns of a known format: a, b"):
        read({"a": 1, "b": 2}, None)
