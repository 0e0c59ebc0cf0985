"""From one record to its samples: rendered, encoded as a whole, the loss tokens marked, held against the options.

This is the work that is done in parallel: it depends on the record, the tokenizer and the options alone.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from dflash_prep.chat import ChatTemplate, Conversation, is_utf8
from dflash_prep.encoding import Encoded, PlainSpecials, affixes, loss_spans
from dflash_prep.errors import Reject
from dflash_prep.formats import Dialogue, Text, Tokens, parse
from dflash_prep.near_dedup import sketch
from dflash_prep.records import Lost, Record
from dflash_prep.sample import Outcome, Sample
from dflash_prep.tokenizer import ChatTokenizer

MOST_CHARACTERS = 1000  # of a token, where the vocabulary gives no bound
WORD = re.compile(r"\S{1,4096}")
LINE = re.compile(r"(?<=\S)\n(?=\S)")
SEGMENT = 1 << 20  # characters of plain text encoded at once: encoding takes a hundred times their memory


class Options(NamedTuple):
    """What decides which records are kept, how they are read and where they carry loss."""

    max_length: int = 8192
    max_reject_share: float = 0.05
    format: str | None = None  # of every file; None: detected
    columns: dict[str, str] = {}  # noqa: RUF012 - the corpus' names for ours; never changed
    loss: str = "assistant"
    min_loss_tokens: int = 1
    too_long: str = "drop"  # what becomes of a sample longer than max_length: or truncate, or (plain text) split
    keep_duplicates: bool = False
    near_dedup: float | None = None  # the share of words that makes two samples near-duplicates
    template_kwargs: dict[str, object] = {}  # noqa: RUF012 - arguments of the chat template; never changed
    special_text: str = "keep"  # what becomes of text that spells a special token: or plain, or its record is rejected
    limit: int | None = None  # records that are read
    shuffle_input: int | None = None  # the seed of the order in which records are taken; None: as they stand


Item = Conversation | Text | Tokens | Reject


class SampleMaker:
    """Turns records into samples."""

    def __init__(self, tokenizer: ChatTokenizer, options: Options, needs_template: bool = True):
        self._tokenizer, self._options = tokenizer, options
        self._template = ChatTemplate(tokenizer, options.template_kwargs) if needs_template else None
        texts = sorted(map(re.escape, tokenizer.special_texts), key=len, reverse=True)
        self._special = re.compile("|".join(texts)) if texts else None
        self._most = (options.max_length + 1) * (tokenizer.most_characters or MOST_CHARACTERS)

    def __call__(self, batch: list[tuple[Record, str | None]]) -> list[Outcome]:
        """What becomes of each record of a batch, given with its file's format; in order."""
        said = [self._said(record, form) for record, form in batch]
        spelled = [self._spells(item) for item in said]
        items = [self._item(item, spells) for item, spells in zip(said, spelled, strict=True)]
        encoded = self._encode(items, spelled)
        records = (record for record, _ in batch)
        outcomes = [self._outcome(*parts) for parts in zip(records, items, encoded, spelled, strict=True)]
        if self._options.near_dedup is not None:
            outcomes = [made._replace(sketch=sketch_of(item)) for made, item in zip(outcomes, said, strict=True)]
        return outcomes

    def _said(self, record: Record, form: str | None) -> Dialogue | Text | Tokens | Reject:
        try:
            return parse(record, form, self._options.columns)
        except Reject as reject:
            return reject

    def _spells(self, said: Dialogue | Text | Tokens | Reject) -> bool:
        """Whether a record's text spells a special token."""
        if self._special is None or not isinstance(said, Dialogue | Text):
            return False
        texts = [said.text] if isinstance(said, Text) else strings([*said.messages, said.tools])
        return any(map(self._special.search, texts))

    def _item(self, said: Dialogue | Text | Tokens | Reject, spelled: bool) -> Item:
        """A record as far as it gets without the tokenizer, or the reason why it gets nowhere."""
        try:
            if spelled and self._options.special_text == "reject":
                raise Reject("text that spells a special token")
            if isinstance(said, Dialogue):
                return self._fitting(self._template.conversation(*said[:2], self._options.loss, *said[2:]))
            if isinstance(said, Text) and not is_utf8(said.text):
                raise Reject("text with a lone surrogate")
            return said if isinstance(said, Reject | Tokens) or self._options.too_long == "split" else self._fitting(said)
        except Reject as reject:
            return reject

    def _fitting(self, item: Conversation | Text) -> Conversation | Text:
        """Refuse or cut a text that is too long whatever its tokens: encoding tens of megabytes takes minutes and gigabytes.

        White space does not count: tokens of any length of it are common. What is left of a cut text is still too long.
        """
        if len(item.text) <= self._most:
            return item
        seen = 0
        for word in WORD.finditer(item.text):
            seen += word.end() - word.start()
            if seen > self._most:
                if self._options.too_long == "truncate":
                    return item._replace(text=item.text[: word.end()])
                raise Reject(f"longer than --max-length: {sum(map(len, item.text.split()))} characters")
        return item

    def _encode(self, items: list[Item], spelled: list[bool]) -> Iterator[Encoded | Reject | None]:
        """The tokens of each conversation and each text, rendered ones with nothing added, since their template did that."""
        apart = [spells and self._options.special_text == "plain" for spells in spelled]
        whole = [item for item, plain in zip(items, apart, strict=True) if not plain and self._is_whole(item)]
        chats = self._batch(item.text for item in whole if isinstance(item, Conversation))
        texts = self._batch((item.text for item in whole if isinstance(item, Text)), plain=True)
        for item, plain in zip(items, apart, strict=True):
            if isinstance(item, Reject | Tokens):
                yield None
            elif plain:
                yield self._plain_specials.encode(item.text, item.contents if isinstance(item, Conversation) else None)
            elif not self._is_whole(item):
                yield self._segments(item.text)
            else:
                yield next(chats if isinstance(item, Conversation) else texts)

    def _is_whole(self, item: Item) -> bool:
        """Whether an item is encoded in one go."""
        return isinstance(item, Conversation) or (isinstance(item, Text) and len(item.text) <= SEGMENT)

    def _batch(self, texts: Iterable[str], plain: bool = False) -> Iterator[Encoded | Reject]:
        """Texts encoded together; where one makes the tokenizer fail, each by itself."""
        texts = list(texts)
        encoder = self._tokenizer.plain_encoder if plain else self._tokenizer.encoder
        try:
            encodings = encoder.encode_batch(texts, add_special_tokens=plain)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as fault:  # a panic of the library is no Exception
            if len(texts) == 1:
                return iter([Reject(f"tokenizer error: {fault}")])
            return chain.from_iterable(self._batch([text], plain) for text in texts)
        return map(Encoded.of, encodings)

    def _segments(self, text: str) -> Encoded:
        """A long plain text, encoded in parts that end with a line; what the tokenizer adds stands around the whole."""
        first, last = affixes(self._tokenizer)
        ids, start = [first], 0
        while start < len(text):
            border = LINE.search(text, start + SEGMENT) if self._lines_are_apart else None
            end = border.end() if border else len(text)
            ids.append(np.array(self._tokenizer.encoder.encode(text[start:end], add_special_tokens=False).ids, np.uint32))
            start = end
        return Encoded(np.concatenate([*ids, last]), None)

    @cached_property
    def _lines_are_apart(self) -> bool:
        """Whether lines that neither end nor begin with a space have the same tokens alone as together, by trying kinds."""
        encode = lambda text: self._tokenizer.encoder.encode(text, add_special_tokens=False).ids  # noqa: E731
        kinds = "aZ1.,(é漢Я🙂_-"
        return all(encode(f"{a}\n{b}") == encode(f"{a}\n") + encode(b) for a in kinds for b in kinds)

    @cached_property
    def _plain_specials(self) -> PlainSpecials:
        return PlainSpecials(self._tokenizer, self._special)

    def _outcome(self, record: Record, item: Item, encoded: Encoded | Reject | None, spelled: bool) -> Outcome:
        """The samples of one record."""
        if isinstance(item, Reject) or isinstance(encoded, Reject):
            reason = item if isinstance(item, Reject) else encoded
            lost = isinstance(record.data, Lost)
            return Outcome(record.source, record.line, (reason,), record.excerpt(), lost=lost)
        try:
            ids, spans = self._tokens(item, encoded)
        except Reject as reject:
            return Outcome(record.source, record.line, (reject,), record.excerpt(), spelled)
        pieces, truncated = self._pieces(item, ids, spans)
        samples = tuple(self._sample(*piece) for piece in pieces)
        return Outcome(record.source, record.line, samples, record.excerpt(), spelled, truncated)

    def _tokens(self, item: Conversation | Text | Tokens, encoded: Encoded | None) -> tuple[np.ndarray, np.ndarray]:
        """Ids and loss spans of a record, uint32."""
        if isinstance(item, Tokens):
            ids, spans = item.ids, runs(item.loss)
            if ids.max() >= self._tokenizer.vocabulary:
                raise Reject("a token number beyond the tokenizer's vocabulary")
        else:
            ids, whole = encoded.ids, np.array([0, len(encoded.ids)], np.uint32)
            spans = loss_spans(encoded, item, self._tokenizer.special_ids) if isinstance(item, Conversation) else whole
        if self._options.loss == "all":
            spans = np.array([0, len(ids)], np.uint32)
        elif self._options.loss == "last-assistant" and isinstance(item, Tokens):
            spans = spans[-2:]
        return ids, spans

    def _pieces(self, item: Conversation | Text | Tokens, ids: np.ndarray, spans: np.ndarray):
        """The record's samples as the options cut it, and whether something was cut off."""
        most, policy = self._options.max_length, self._options.too_long
        if len(ids) <= most or policy == "drop" or (policy == "split" and not isinstance(item, Text)):
            return [(ids, spans)], False
        borders = [*range(0, len(ids), most), len(ids)] if policy == "split" else [0, most]
        return [(ids[start:end], within(spans, start, end)) for start, end in pairwise(borders)], policy == "truncate"

    def _sample(self, ids: np.ndarray, spans: np.ndarray) -> Sample | Reject:
        """The sample, unless its length or its loss rules it out."""
        if len(ids) > self._options.max_length:
            return Reject(f"longer than --max-length: {len(ids)} tokens")
        loss = int(spans[1::2].sum()) - int(spans[0::2].sum())
        if not loss:
            return Reject("no loss token")
        if loss < self._options.min_loss_tokens:
            return Reject(f"fewer loss tokens than --min-loss-tokens: {loss}")
        return Sample.of(ids, spans)


def strings(value: object) -> Iterator[str]:
    """All strings of a JSON value, keys left out."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value


def sketch_of(said: Dialogue | Text | Tokens | Reject) -> bytes:
    """The sketch of what a record says; system messages are left out, since many conversations share them."""
    if isinstance(said, Reject):
        return b""
    if isinstance(said, Dialogue):
        return sketch(message.get("content") or "" for message in said.messages if message["role"] != "system")
    return sketch([said.text if isinstance(said, Text) else " ".join(map(str, said.ids))])


def runs(loss: np.ndarray) -> np.ndarray:
    """The half-open spans [start, end, …] in which a bool array is true, uint32."""
    edges = np.diff(np.concatenate([[0], loss.astype(np.int8), [0]]))
    return np.flatnonzero(edges).astype(np.uint32)


def within(spans: np.ndarray, start: int, end: int) -> np.ndarray:
    """What of some spans lies in [start, end), counted from start, uint32."""
    clipped = np.clip(spans.astype(np.int64).reshape(-1, 2), start, end) - start
    return clipped[clipped[:, 0] < clipped[:, 1]].ravel().astype(np.uint32)
