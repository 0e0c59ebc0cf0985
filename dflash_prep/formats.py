"""What a record says, whatever the columns: a conversation, plain text, or tokens.

A file's format is detected from its first records, so that every later record is held to it: one that lacks the columns is
rejected with a reason and not taken for something else.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

import numpy as np

from dflash_prep.errors import Reject
from dflash_prep.jsontext import from_json
from dflash_prep.records import Record, Row

LOOKED_AT = 1000  # records of a file among which one must show its format
ROLES = {
    "system": ("system",),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "model", "bot", "chatgpt", "bing", "bard", "function_call"),
    "tool": ("tool", "function", "observation", "function_response"),
}
ALIASES = {alias: role for role, aliases in ROLES.items() for alias in aliases}


class Dialogue(NamedTuple):
    """Messages as a chat template takes them, each with a role and text as content; tools as the record lists them.

    `silent`: the numbers of the assistant's messages that are not to be learnt (`weight` 0, as OpenAI has it).
    `cut`: the last answer was cut off before its end (`finish_reason` "length"), so that its end is not to be learnt.
    """

    messages: list[dict]
    tools: list | None = None
    silent: frozenset[int] = frozenset()
    cut: bool = False


class Text(NamedTuple):
    """Plain text, of which every token carries loss."""

    text: str


class Tokens(NamedTuple):
    """Token ids [length], and where they carry loss, bool [length]."""

    ids: np.ndarray
    loss: np.ndarray


Content = Dialogue | Text | Tokens


def from_messages(row: dict) -> Dialogue:
    """OpenAI's `messages`, with `tools` beside them."""
    messages = [message(entry) for entry in entries(row, "messages")]
    silent = frozenset(number for number, said in enumerate(messages) if "weight" in said and weight(said) == 0)
    return Dialogue(messages, tools(row), silent, row.get("finish_reason") == "length")


def from_sharegpt(row: dict) -> Dialogue:
    """ShareGPT's `conversations`; `system` and `tools` may be columns of their own."""
    messages = [turn(entry) for entry in entries(row, "conversations")]
    if isinstance(row.get("system"), str) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": row["system"]})
    return Dialogue(messages, tools(row))


def from_instruction(row: dict) -> Dialogue:
    """Alpaca's `instruction`, `input` (may be empty) and `output` or `response`: the input follows after a blank line."""
    asked = text_of(row, "instruction")
    if row.get("input"):
        asked += "\n\n" + text_of(row, "input")
    return exchange(row, asked, "output", "response")


def from_prompt(row: dict) -> Dialogue:
    """`prompt` and `response` or `completion`."""
    return exchange(row, text_of(row, "prompt"), "response", "completion")


def exchange(row: dict, asked: str, *answers: str) -> Dialogue:
    """One question and its answer, after a `system` column where there is one."""
    system = [{"role": "system", "content": text_of(row, "system")}] if row.get("system") else []
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": text_of(row, *answers)}]
    return Dialogue(system + turns, tools(row))


def from_text(row: dict) -> Text:
    """Plain `text`."""
    text = text_of(row, "text")
    if not text:
        raise Reject("empty text")
    return Text(text)


def from_tokens(row: dict) -> Tokens:
    """`input_ids` with `loss_mask` (a flag a token) or `loss_spans` (start, end, …; half-open)."""
    ids = numbers(row.get("input_ids"), "input_ids")
    if not len(ids):
        raise Reject("no tokens")
    if row.get("loss_mask") is not None:
        loss = numbers(row["loss_mask"], "loss_mask")
        if len(loss) != len(ids) or not np.isin(loss, (0, 1)).all():
            raise Reject("a loss_mask that is not a 0 or 1 a token")
        return Tokens(ids, loss.astype(bool))
    if row.get("loss_spans") is None:
        raise Reject("input_ids without loss_mask or loss_spans")
    spans = numbers(row["loss_spans"], "loss_spans")
    if len(spans) % 2 or (np.diff(spans) < 0).any() or (len(spans) and not 0 <= spans[0] <= spans[-1] <= len(ids)):
        raise Reject("loss_spans that are no spans of the tokens")
    loss = np.zeros(len(ids), bool)
    for start, end in spans.reshape(-1, 2):
        loss[start:end] = True
    return Tokens(ids, loss)


class Format(NamedTuple):
    """How records of one format are told and read: a column of each group must be there."""

    columns: tuple[tuple[str, ...], ...]
    read: Callable[[dict], Content]


# In the order in which they are tried: a corpus of conversations often has its first prompt as a column too.
FORMATS = {
    "messages": Format((("messages",),), from_messages),
    "sharegpt": Format((("conversations",),), from_sharegpt),
    "tokens": Format((("input_ids",), ("loss_mask", "loss_spans")), from_tokens),
    "instruction": Format((("instruction",), ("output", "response")), from_instruction),
    "prompt": Format((("prompt",), ("response", "completion")), from_prompt),
    "text": Format((("text",),), from_text),
}
OPTIONAL = ("system", "tools", "input", "role", "content", "from", "value")
COLUMNS = tuple(dict.fromkeys([name for form in FORMATS.values() for group in form.columns for name in group])) + OPTIONAL


def parse(record: Record, form: str | None, columns: dict[str, str] | None = None) -> Content:
    """What a record says; `columns` names the corpus' own for ours. Raises Reject with the reason if it says nothing."""
    row = row_of(record, columns)
    if form is None:
        raise Reject(f"no columns of a known format: {', '.join(map(str, row)) or 'none at all'}")
    if form in ("messages", "sharegpt") and columns:
        key = FORMATS[form].columns[0][0]
        if isinstance(row.get(key), list):
            row[key] = [renamed(entry, columns) if isinstance(entry, dict) else entry for entry in row[key]]
    return FORMATS[form].read(row)


def detect(records: Iterable[Record], columns: dict[str, str] | None = None) -> str | None:
    """The format of the first record that has one; None if none has."""
    for record in islice(records, LOOKED_AT):
        try:
            row = row_of(record, columns)
        except Reject:
            continue
        for name, form in FORMATS.items():
            if all(any(row.get(column) is not None for column in group) for group in form.columns):
                return name
    return None


def row_of(record: Record, columns: dict[str, str] | None) -> dict:
    """A record's columns under our names."""
    if isinstance(record.data, Reject):
        raise record.data
    value = record.data.value() if isinstance(record.data, Row) else from_json(record.data)
    if not isinstance(value, dict):
        raise Reject("not a JSON object")
    return renamed(value, columns) if columns else value


def renamed(entry: dict, columns: dict[str, str]) -> dict:
    """An object with its values under our names too."""
    return entry | {ours: entry[theirs] for ours, theirs in columns.items() if theirs in entry}


def entries(row: dict, column: str) -> list[dict]:
    """A column that must be a list of something."""
    value = row.get(column)
    if not isinstance(value, list) or not value:
        raise Reject(f"no list of {column}")
    return value


def message(entry: object) -> dict:
    """A message as templates take it: without nulls (columnar files fill in every key), its content as one string.

    An assistant's message that calls tools may have no content.
    """
    if not isinstance(entry, dict) or not isinstance(entry.get("role"), str) or not entry["role"]:
        raise Reject("a message without a role")
    if isinstance(entry.get("content"), str) and None not in entry.values() and "weight" not in entry:
        return entry
    stated = {key: value for key, value in entry.items() if value is not None}
    if "content" not in stated and entry["role"] == "assistant" and entry.get("tool_calls"):
        return stated
    return stated | {"content": content(entry)}


def weight(said: dict) -> int:
    """A message's `weight`, taken out of it: no template asks for it."""
    value = said.pop("weight")
    if value not in (0, 1):
        raise Reject("a message whose weight is neither 0 nor 1")
    return value


def content(entry: dict) -> str:
    """A message's content as servers hand it to a template: parts joined by newlines."""
    value = entry.get("content")
    if isinstance(value, list) and value:
        parts = [part.get("text") if isinstance(part, dict) else part for part in value]
        if all(isinstance(part, str) for part in parts):
            return "\n".join(parts)
    if not isinstance(value, str):
        raise Reject("a message whose content is not text")
    return value


def turn(entry: object) -> dict:
    """A ShareGPT turn as a message; a `function_call` is the tool call that its JSON states."""
    if isinstance(entry, dict):
        entry = {"role": entry.get("from"), "content": entry.get("value")} | entry
    said = message(entry)
    role = ALIASES.get(said["role"].lower())
    if role is None:
        raise Reject(f"unknown role: {said['role']}")
    extra = {key: value for key, value in said.items() if key not in ("from", "value")}
    return extra | {"role": role} | (called(said["content"]) if said["role"] == "function_call" else {})


def called(text: str) -> dict:
    """A `function_call` turn's tool call."""
    call = from_json(text.encode(errors="surrogatepass"))
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise Reject("a function_call that is not JSON with a name")
    return {"content": "", "tool_calls": [{"type": "function", "function": call}]}


def tools(row: dict) -> list | None:
    """The tools a record offers: a list, or a list as JSON text."""
    value = row.get("tools")
    if isinstance(value, str) and value.strip():
        value = from_json(value.encode(errors="surrogatepass"))
    if value is None or value == "":
        return None
    if not isinstance(value, list):
        raise Reject("tools that are no list")
    return value


def text_of(row: dict, *columns: str) -> str:
    """The first of some columns that is there; it must be text."""
    name = next((column for column in columns if row.get(column) is not None), None)
    if name is None or not isinstance(row[name], str):
        raise Reject(f"no text in {' or '.join(columns)}")
    return row[name]


def numbers(value: object, column: str) -> np.ndarray:
    """A list of whole numbers or flags as int64."""
    whole = isinstance(value, list) and all(isinstance(number, int) and 0 <= number < 2**32 for number in value)
    if not whole:
        raise Reject(f"{column} that is no list of token numbers")
    return np.array(value, np.int64)
