"""Tokens and the characters they stand for: where the loss lies, found by offsets in the one text that was encoded."""

import re
from array import array
from typing import NamedTuple, Protocol

import numpy as np

from dflash_prep.chat import Conversation
from dflash_prep.errors import UserError
from dflash_prep.tokenizer import ChatTokenizer


class Offsets(Protocol):
    """Which token stands for a character, and for which characters [start, end) a token stands; as tokenizers have it."""

    def char_to_token(self, position: int) -> int | None: ...

    def token_to_chars(self, token: int) -> tuple[int, int] | None: ...


class Encoded(NamedTuple):
    """Token ids, uint32 [length], and their characters; offsets are None where nobody needs them."""

    ids: np.ndarray
    offsets: Offsets | None

    @classmethod
    def of(cls, encoding) -> "Encoded":
        """What `tokenizers` returned."""
        return cls(np.frombuffer(array("I", encoding.ids), np.uint32), encoding)

    def first_from(self, position: int) -> int:
        """The first token that starts at a character or after it."""
        token = self.first_beyond(position)
        while token < len(self.ids) and self.offsets.token_to_chars(token)[0] < position:
            token += 1
        return token

    def first_beyond(self, position: int) -> int:
        """The first token that ends beyond a character's start, which holds it unless the tokenizer drops it."""
        token = self.offsets.char_to_token(position)
        if token is not None:
            return token
        low, high = 0, len(self.ids)  # offsets ascend
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.offsets.token_to_chars(middle)[1] > position else (middle + 1, high)
        return low


def loss_spans(encoded: Encoded, conversation: Conversation, special_ids: frozenset[int]) -> np.ndarray:
    """Loss spans [start, end, …] of an encoded conversation, uint32.

    A token carries loss if it lies within what the assistant said; the special token that ends the turn does too. A token
    that straddles the start belongs to the prompt, since at serving the prompt is encoded on its own. Where a template tags
    what it wants learnt, each token that overlaps a tag carries loss, as in transformers.
    """
    spans: list[int] = []
    for number, (start, end) in enumerate(conversation.spans, start=1):
        ends = not (conversation.cut and number == len(conversation.spans))
        if conversation.tagged:
            first, last = encoded.first_beyond(start), encoded.first_from(end)
            last = last if ends else without_end(encoded, first, last, conversation.text, special_ids)
        else:
            first, last = encoded.first_from(start), encoded.first_beyond(end)
            if ends and conversation.closing and conversation.text.startswith(conversation.closing, end):
                last = encoded.first_beyond(end + len(conversation.closing))
            elif ends:
                last = end_of_turn(encoded, last, conversation.text, special_ids)
        if spans and first <= spans[-1] < last:
            spans[-1] = last
        elif first < last and not (spans and last <= spans[-1]):
            spans += [first, last]
    return np.array(spans, np.uint32)


def end_of_turn(encoded: Encoded, last: int, text: str, special_ids: frozenset[int]) -> int:
    """Where a turn's loss ends: past the special token that follows its content, whitespace between them included."""
    after = last
    while after < len(encoded.ids) and encoded.ids[after] not in special_ids:
        start, end = encoded.offsets.token_to_chars(after)
        if text[start:end].strip():
            return last
        after += 1
    return after + 1 if after < len(encoded.ids) else last


def without_end(encoded: Encoded, first: int, last: int, text: str, special_ids: frozenset[int]) -> int:
    """Where a tagged turn ends without its end token and the whitespace around that."""
    while last > first:
        start, end = encoded.offsets.token_to_chars(last - 1)
        if encoded.ids[last - 1] not in special_ids and text[start:end].strip():
            break
        last -= 1
    return last


def affixes(tokenizer: ChatTokenizer) -> tuple[np.ndarray, np.ndarray]:
    """The ids that a tokenizer puts before and after plain text, uint32."""
    plain, bare = (tokenizer.plain_encoder.encode("a", add_special_tokens=added).ids for added in (True, False))
    place = next(at for at in range(len(plain)) if plain[at : at + len(bare)] == bare)
    return np.array(plain[:place], np.uint32), np.array(plain[place + len(bare) :], np.uint32)


class PlainSpecials:
    """Encodes texts so that special tokens stand only where the template wrote them; contents that spell one stay text."""

    def __init__(self, tokenizer: ChatTokenizer, special: re.Pattern):
        self._tokenizer, self._special = tokenizer, special
        self._encoder = type(tokenizer.encoder).from_str(tokenizer.encoder.to_str())
        self._encoder.encode_special_tokens = True
        self._check()

    def encode(self, text: str, contents: list[tuple[int, int]] | None) -> Encoded:
        """The tokens of a text; `contents` are the characters in which nothing is special, None: all."""
        if contents is None:
            first, last = affixes(self._tokenizer)
            ids = np.array(self._encoder.encode(text, add_special_tokens=False).ids, np.uint32)
            return Encoded(np.concatenate([first, ids, last]), None)
        written = [
            found.span()
            for found in self._special.finditer(text)
            if not any(start <= found.start() and found.end() <= end for start, end in contents)
        ]
        return self._between(text, written)

    def _between(self, text: str, written: list[tuple[int, int]]) -> Encoded:
        """The tokens of a text of which just these characters are special tokens."""
        ids, offsets, position = [], [], 0
        for start, end in [*written, (len(text), len(text))]:
            piece = self._encoder.encode(text[position:start], add_special_tokens=False)
            ids += piece.ids
            offsets += [(position + first, position + last) for first, last in piece.offsets]
            if start < end:
                ids.append(self._tokenizer.backend.token_to_id(text[start:end]))
                offsets.append((start, end))
            position = end
        return Encoded(np.array(ids, np.uint32), ListedOffsets(offsets))

    def _check(self) -> None:
        """Refuse a tokenizer that encodes a text differently where it is taken apart at its special tokens."""
        mark = min(self._tokenizer.special_texts)
        for text in (f"{mark}a b{mark}", f" a{mark} b {mark}\n{mark}c"):
            written = [found.span() for found in self._special.finditer(text)]
            usual = self._tokenizer.encoder.encode(text, add_special_tokens=False).ids
            if self._between(text, written).ids.tolist() != usual:
                raise UserError(
                    f"{self._tokenizer.name}: its special tokens change the text beside them, so that --special-text plain "
                    "is not to be had; choose keep or reject"
                )


class ListedOffsets(NamedTuple):
    """Offsets of tokens that were encoded piece by piece."""

    offsets: list[tuple[int, int]]

    def char_to_token(self, position: int) -> int | None:
        """The first token that holds a character; None if there is none."""
        found = (token for token, (start, end) in enumerate(self.offsets) if start <= position < end)
        return next(found, None)

    def token_to_chars(self, token: int) -> tuple[int, int]:
        """The characters of a token."""
        return self.offsets[token]
