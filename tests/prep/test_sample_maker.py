"""From a record to its samples: cut, split, kept plain or refused, and the loss still where it was."""

import json
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_prep import sample_maker
from dflash_prep.chat import ChatTemplate, Conversation
from dflash_prep.encoding import Encoded, ListedOffsets, loss_spans
from dflash_prep.errors import Reject, UserError
from dflash_prep.records import Record
from dflash_prep.sample import Sample
from dflash_prep.sample_maker import Options, SampleMaker
from dflash_prep.tokenizer import ChatTokenizer, load_tokenizer
from tests.prep.support import END, TURN, chat

WIDE = Options(max_length=10**6)
WORDS = st.lists(st.sampled_from(["the", " user", "\n", "12", "é漢", "🙂", "  ", "one line"]), min_size=1, max_size=12)
CONTENTS = st.lists(WORDS.map("".join), min_size=2, max_size=6)


def made(tokenizer: ChatTokenizer, value: dict, form: str, options: Options) -> tuple[Sample | Reject, ...]:
    """The samples of one record."""
    (outcome,) = SampleMaker(tokenizer, options)([(Record("c", 1, json.dumps(value)), form)])
    return outcome.samples


def unpacked(sample: Sample) -> tuple[list[int], list[bool]]:
    """Ids, and whether each carries loss."""
    ids, spans = (np.frombuffer(part, "<u4") for part in (sample.ids, sample.spans))
    loss = np.zeros(len(ids), bool)
    for start, end in spans.reshape(-1, 2):
        loss[start:end] = True
    return ids.tolist(), loss.tolist()


@given(CONTENTS, st.integers(2, 60))
def test_a_truncated_sample_is_the_beginning_of_the_whole_one(tiny, contents, most):
    value = {"messages": chat(*contents)}
    (whole,) = made(tiny, value, "messages", WIDE)
    (cut,) = made(tiny, value, "messages", Options(max_length=most, too_long="truncate"))
    ids, loss = unpacked(whole)
    if not any(loss[:most]):
        assert str(cut) == "no loss token"
    else:
        assert unpacked(cut) == (ids[:most], loss[:most])


@given(WORDS.map("".join), st.integers(2, 30), st.integers(1, 40))
def test_the_pieces_of_a_text_are_the_whole_text(tiny, text, most, segment):
    """Whether it was encoded in one go or, as a long one, line by line."""
    (whole,) = made(tiny, {"text": text}, "text", WIDE)
    ids, _ = unpacked(whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_maker, "SEGMENT", segment)
        pieces = made(tiny, {"text": text}, "text", Options(max_length=most, too_long="split"))
    found = [unpacked(piece) for piece in pieces]
    assert [token for part, _ in found for token in part] == ids
    assert all(len(part) == most for part, _ in found[:-1])
    assert 0 < len(found[-1][0]) <= most
    assert all(all(loss) for _, loss in found)


def test_only_plain_text_is_split(tiny):
    options = Options(max_length=8, too_long="split")
    (sample,) = made(tiny, {"messages": chat("a", "b " * 50)}, "messages", options)
    assert str(sample).startswith("longer than --max-length")


@pytest.mark.parametrize("policy", ["drop", "truncate"])
def test_a_text_too_long_whatever_its_tokens_is_not_encoded(tiny, policy, monkeypatch):
    """Twenty megabytes would take gigabytes; what is encoded is in proportion to the longest sample that is wanted."""
    seen = []
    encode = SampleMaker._batch
    monkeypatch.setattr(SampleMaker, "_batch", lambda self, texts, plain=False: encode(self, keep(seen, texts), plain))
    value = {"messages": chat("a", "word " * 4_000_000)}
    (sample,) = made(tiny, value, "messages", Options(max_length=50, too_long=policy))
    assert sum(map(len, seen)) < 100_000
    assert isinstance(sample, Reject) if policy == "drop" else len(unpacked(sample)[0]) == 50


def keep(seen: list, texts) -> list[str]:
    """Note texts on their way."""
    texts = list(texts)
    seen += texts
    return texts


SPELLED = st.sampled_from([END, TURN, "a", "the user", "\n", f"{END}\n{TURN}user", "<|im_", "end|>"])


@given(st.lists(st.lists(SPELLED, min_size=1, max_size=4).map("".join), min_size=2, max_size=4))
def test_plain_special_text_gives_no_special_token(tiny, contents):
    """The special tokens are as many as with contents that spell none, and every character is still there."""
    (sample,) = made(tiny, {"messages": chat(*contents)}, "messages", WIDE._replace(special_text="plain"))
    (other,) = made(tiny, {"messages": chat(*("x" for _ in contents))}, "messages", WIDE)
    specials = [[token for token in unpacked(one)[0] if token in tiny.special_ids] for one in (sample, other)]
    assert specials[0] == specials[1]
    ids, loss = unpacked(sample)
    text = tiny.backend.decode(ids, skip_special_tokens=False)
    assert text == ChatTemplate(tiny).render(chat(*contents))
    said = tiny.backend.decode(
        [token for token, carries in zip(ids, loss, strict=True) if carries], skip_special_tokens=False
    )
    assert said == "".join(f"{content}{END}" for content in contents[1::2])
    plain = [content for content in contents if not any(special in content for special in tiny.special_texts)]
    if len(plain) == len(contents):
        assert made(tiny, {"messages": chat(*contents)}, "messages", WIDE) == (sample,)


def test_plain_text_may_spell_special_tokens_too(tiny):
    text = f"a{END}b"
    (kept,) = made(tiny, {"text": text}, "text", WIDE)
    (plain,) = made(tiny, {"text": text}, "text", WIDE._replace(special_text="plain"))
    end = tiny.backend.token_to_id(END)
    assert end in unpacked(kept)[0] and end not in unpacked(plain)[0]
    for sample in (kept, plain):
        assert tiny.backend.decode(unpacked(sample)[0], skip_special_tokens=True).replace(END, "") in ("ab", " ab")


def test_plain_is_refused_where_special_tokens_change_their_surroundings(tiny):
    from tokenizers import AddedToken

    backend = type(tiny.backend).from_str(tiny.backend.to_str())
    backend.add_special_tokens([AddedToken("<|a|>", rstrip=True, lstrip=True)])
    other = replace(tiny, backend=backend)
    with pytest.raises(UserError, match="choose keep or reject"):
        made(other, {"messages": chat(END, "b")}, "messages", WIDE._replace(special_text="plain"))


class Panicking:
    """A tokenizer that fails on some texts, as libraries do on what their authors did not think of."""

    def __init__(self, encoder, word: str):
        self._encoder, self._word = encoder, word

    def encode_batch(self, texts: list[str], **options):
        """Encode, unless a text holds the word."""
        if any(self._word in text for text in texts):
            raise BaseException("panicked")
        return self._encoder.encode_batch(texts, **options)


def test_a_text_on_which_the_tokenizer_fails_costs_itself_alone(tiny):
    other = replace(tiny)
    other.__dict__["encoder"] = Panicking(tiny.encoder, "bad")
    records = [
        Record("c", line, json.dumps({"messages": chat("a", answer)})) for line, answer in enumerate(["x", "bad", "y"])
    ]
    outcomes = SampleMaker(other, WIDE)([(record, "messages") for record in records])
    assert [isinstance(outcome.samples[0], Reject) for outcome in outcomes] == [False, True, False]
    assert str(outcomes[1].samples[0]) == "tokenizer error: panicked"


BORDERS = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@given(BORDERS, st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=4), st.booleans())
def test_loss_spans_are_those_found_by_looking_at_every_token(steps, drawn, tagged):
    """Tokens of no, one or several characters; several tokens of one character; characters of no token."""
    offsets, position = [], 0
    for step in steps:
        offsets.append((position, position + max(step, 1)))
        position += step  # none: the next token stands for the same characters
    position = offsets[-1][1]
    spans, last = [], 0
    for start, length in sorted(drawn):
        if start >= last and start + length <= position:
            spans.append((start, start + length))
            last = start + length
    encoded = Encoded(np.zeros(len(offsets), np.uint32), ListedOffsets(offsets))
    found = loss_spans(encoded, Conversation("x" * position, spans, tagged), frozenset())
    mask = np.zeros(len(offsets), bool)
    for start, end in found.reshape(-1, 2):
        mask[start:end] = True
    expected = [any((b > s and a < e) if tagged else (s <= a and b <= e) for s, e in spans) for a, b in offsets]
    if all(end >= start for (_, end), (start, _) in pairwise(offsets)):
        assert mask.tolist() == expected


@pytest.mark.parametrize("segment", [1, 7, 40])
def test_a_long_text_of_any_kind_has_the_tokens_of_the_whole(target_directory, segment, monkeypatch):
    """The default target's: its pre-tokenizer joins spaces, newlines and what follows them in many ways."""
    tokenizer = load_tokenizer(str(target_directory))
    draw = Random(segment)
    pieces = ["a", "word", " ", "  ", "\n", "\n\n", " \n", "\n ", ".", "12", "é漢", "🙂", "\t", "\r\n", "<|im_end|>", "_"]
    for _ in range(60):
        text = "".join(draw.choices(pieces, k=draw.randrange(1, 60)))
        (whole,) = made(tokenizer, {"text": text}, "text", WIDE)
        monkeypatch.setattr(sample_maker, "SEGMENT", segment)
        assert made(tokenizer, {"text": text}, "text", WIDE) == (whole,), repr(text)
        monkeypatch.undo()


def test_specials_are_looked_for_in_all_that_is_said(tiny):
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": [f"a{END}"]}}}
    for message in ({"content": "x", "reasoning_content": END}, {"content": "", "tool_calls": [call]}, {"content": END}):
        value = {"messages": [*chat("a"), {"role": "assistant"} | message]}
        (outcome,) = SampleMaker(tiny, WIDE._replace(special_text="reject"))(
            [(Record("c", 1, json.dumps(value)), "messages")]
        )
        assert str(outcome.samples[0]) == "text that spells a special token"


def test_what_is_nested_too_deeply_costs_itself_alone(tiny):
    deep = json.loads("[" * 900 + "]" * 900)
    good = {"messages": chat("a", "b")}
    for key in ("tool_calls", "reasoning_content"):
        bad = {"messages": [*chat("a"), {"role": "assistant", "content": "x", key: deep}]}
        records = [(Record("c", 1, json.dumps(value)), "messages") for value in (good, bad, good)]
        outcomes = SampleMaker(tiny, WIDE)(records)
        assert [isinstance(outcome.samples[0], Reject) for outcome in outcomes] == [False, True, False]
