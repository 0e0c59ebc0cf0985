"""Tokens as parts of their sample's text: whole characters, nothing lost, loss where the spans say."""

from itertools import accumulate
from os.path import commonprefix

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dflash_prep.pieces import decode, loss_mask, runs, token_texts
from dflash_prep.tokenizer import ChatTokenizer, load_tokenizer
from tests.prep.support import BOS, END, TURN

SCRIPTS = "the answer 12 \n\t éü e\u0301 漢字かな한국 नमस्ते שלום مرحبا ไทย 👩‍👩‍👧‍👦🇩🇪✨ \x1b\x00\r\u2028\ufffd"
TEXT = st.lists(st.sampled_from([*SCRIPTS, BOS, TURN, END]), max_size=40).map("".join) | st.text(max_size=20)


def named(backend: Tokenizer) -> ChatTokenizer:
    """A tokenizer with one special token, as this project holds it."""
    backend.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return ChatTokenizer("made", backend, None, {})


def byte_fallback() -> ChatTokenizer:
    """As SentencePiece models have it: spaces as ▁, one put before the text; what is not in the vocabulary as bytes."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: number for number, token in enumerate(["<unk>", *bytes_, "▁", *"theanswr12", "th", "▁th"])}
    merges = [("t", "h"), ("▁", "th")]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return named(backend)


def suffixes() -> ChatTokenizer:
    """A vocabulary whose tokens say where a word ends: what a token is depends on whether it is the last."""
    letters = [*"theanswr12漢é"]
    vocabulary = {token: number for number, token in enumerate(["<unk>", *letters, *(f"{one}</w>" for one in letters)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder(suffix="</w>")
    return named(backend)


@pytest.fixture(scope="module")
def kinds(tiny, target_directory) -> dict[str, ChatTokenizer]:
    """Tokenizers that decode in different ways."""
    target = load_tokenizer(str(target_directory))
    return {"bytes": tiny, "target": target, "fallback": byte_fallback(), "suffixes": suffixes()}


KIND = st.sampled_from(["bytes", "target", "fallback", "suffixes"])


def ends_by_prefixes(ids: list[int], tokenizer: ChatTokenizer) -> list[int]:
    """Where each token's part ends, by decoding every prefix: as far as what is said by then stays so."""
    text = decode(ids, tokenizer)
    agreed = [len(commonprefix([decode(ids[:end], tokenizer), text])) for end in range(1, len(ids))]  # noqa: RUF071 - texts
    return [*accumulate(agreed, max), len(text)] if ids else []


def check(ids: list[int], tokenizer: ChatTokenizer) -> None:
    texts = token_texts(np.array(ids, np.uint32), tokenizer)
    assert "".join(texts) == decode(ids, tokenizer)
    assert list(accumulate(map(len, texts))) == ends_by_prefixes(ids, tokenizer)


@given(kind=KIND, text=TEXT)
@example(kind="bytes", text="漢👩‍👩‍👧e\u0301")
@example(kind="fallback", text=" the漢 ▁ é")
def test_tokens_have_what_they_add_to_the_text(kinds, kind, text):
    check(kinds[kind].backend.encode(text, add_special_tokens=False).ids, kinds[kind])


@given(kind=KIND, data=st.data())
def test_so_do_tokens_that_no_text_gives(kinds, kind, data):
    """Broken characters included."""
    check(data.draw(st.lists(st.integers(0, kinds[kind].vocabulary + 2), max_size=30)), kinds[kind])


@given(kind=st.sampled_from(["bytes", "target", "fallback"]), text=TEXT)
def test_no_whole_text_shows_a_broken_character(kinds, kind, text):
    text = text.replace("\ufffd", "").strip()
    ids = kinds[kind].backend.encode(text, add_special_tokens=False).ids
    if decode(ids, kinds[kind]) == text:
        assert "\ufffd" not in "".join(token_texts(np.array(ids, np.uint32), kinds[kind]))


@st.composite
def marked(draw, most: int = 60) -> tuple[str, list[int]]:
    """A text and numbers that become loss spans."""
    return draw(TEXT), draw(st.lists(st.integers(0, most), max_size=8))


def spans_within(numbers: list[int], length: int) -> np.ndarray:
    """Rising, disjoint, not touching spans in a sample."""
    borders = sorted({number % (length + 1) for number in numbers})
    return np.array(borders[: len(borders) // 2 * 2], np.uint32)


@given(drawn=marked())
def test_runs_are_the_text_and_the_loss(tiny, drawn):
    text, numbers = drawn
    ids = tiny.backend.encode(text, add_special_tokens=False).ids
    spans = spans_within(numbers, len(ids))
    found = list(runs(np.array(ids, np.uint32), spans, tiny))
    assert "".join(run.text for run in found) == decode(ids, tiny)
    shown = "".join(run.text for run in found if run.loss)
    whole = decode(ids, tiny)
    clean = all(decode(ids[:at], tiny) + decode(ids[at:], tiny) == whole for at in spans.tolist())
    if clean:
        assert shown == "".join(decode(ids[a:b], tiny) for a, b in spans.reshape(-1, 2).tolist())
    assert all(run.text in tiny.special_texts for run in found if run.special)
    assert sum(run.special for run in found) == sum(token in tiny.special_ids for token in ids)


@pytest.mark.parametrize("border", range(1, 3))
def test_a_border_inside_a_character_gives_it_to_the_later_side(tiny, border):
    ids = np.array(tiny.backend.encode("漢", add_special_tokens=False).ids, np.uint32)
    assert len(ids) == 3
    before, after = runs(ids, np.array([0, border], np.uint32), tiny)
    assert (before.text, before.loss, before.split) == ("", True, True)
    assert (after.text, after.loss, after.split) == ("漢", False, False)


def test_a_number_that_is_no_token_is_seen(tiny):
    ids = np.array([tiny.vocabulary + 5, *tiny.backend.encode("a", add_special_tokens=False).ids], np.uint32)
    first, second = runs(ids, np.array([0, 1], np.uint32), tiny)
    assert first.special and first.loss and str(tiny.vocabulary + 5) in first.text
    assert second.text == "a"


@given(numbers=st.lists(st.integers(0, 30), max_size=8), length=st.integers(0, 30))
def test_the_mask_is_the_spans(numbers, length):
    spans = spans_within(numbers, length)
    inside = [any(a <= at < b for a, b in spans.reshape(-1, 2).tolist()) for at in range(length)]
    assert loss_mask(spans, length).tolist() == inside
