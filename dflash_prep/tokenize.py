"""From records to a token store: render, encode whole conversations, mark the loss tokens, write."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dflash_prep.chat import ChatTemplate, Conversation, is_utf8
from dflash_prep.errors import Reject, UserError
from dflash_prep.files import file_digest, is_taken, new_directory, resolved
from dflash_prep.formats import COLUMNS, Dialogue, Text, Tokens, detect, parse
from dflash_prep.inputs import Corpus, open_corpus
from dflash_prep.records import CorpusFile, Record, read_records
from dflash_prep.store import Store, StoreWriter
from dflash_prep.tokenizer import ChatTokenizer

BATCH = 512  # conversations encoded at once: enough to fill every core, little enough to stay small in memory
DUPLICATE = "duplicate"


class Options(NamedTuple):
    """What decides which records are kept, how they are read and where they carry loss."""

    max_length: int = 8192
    max_reject_share: float = 0.05
    format: str | None = None  # of every file; None: detected
    columns: dict[str, str] = {}  # noqa: RUF012 - the corpus' names for ours; never changed
    loss: str = "assistant"
    min_loss_tokens: int = 1
    keep_duplicates: bool = False
    template_kwargs: dict[str, object] = {}  # noqa: RUF012 - arguments of the chat template; never changed
    special_text: str = "keep"  # what becomes of a record whose text spells a special token
    limit: int | None = None  # records that are read


def tokenize(
    inputs: tuple[str, ...],
    tokenizer: ChatTokenizer,
    output: Path,
    options: Options,
    progress: Callable[[int], None] = lambda records: None,
) -> tuple[dict, bool]:
    """Write the store `output` from a corpus; returns its manifest and whether it was there already.

    A store is immutable: one made from the same inputs, tokenizer and options is kept, any other is an error.
    """
    with open_corpus(inputs) as corpus:
        origin = describe(corpus, tokenizer, options)
        if is_taken(output):
            return finished_store(output, origin).manifest, True
        formats = {file: options.format or detect(records_of(file, options), options.columns) for file in corpus.files}
        maker = SampleMaker(tokenizer, options, needs_template=not set(formats.values()) <= {"text", "tokens"})
        with new_directory(output, replace=False) as directory:
            writer = StoreWriter(directory)
            records = ((record, form) for file, form in formats.items() for record in records_of(file, options))
            records = islice(records, options.limit)
            while batch := list(islice(records, BATCH)):
                maker.write(batch, writer)
                progress(len(batch))
            check_rejects(writer, directory, inputs, output, options)
            used = dict(sorted(Counter(form or "unknown" for form in formats.values()).items()))
            manifest = writer.finish(
                origin
                | {
                    "formats": used,
                    "other_files": corpus.others,
                    "lost_files": maker.lost,
                    "special_texts": maker.special_texts,
                }
            )
    return manifest, False


def describe(corpus: Corpus, tokenizer: ChatTokenizer, options: Options) -> dict:
    """What a store was made from, as `store.json` states it."""
    return {
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
        "chat_template": {"fingerprint": tokenizer.template_fingerprint},
        "options": options._asdict(),
        "inputs": [{"name": file.name, "checksum": checksum(file)} for file in corpus.files],
    }


def checksum(file: CorpusFile) -> str | None:
    """Of a file's bytes; None for one that cannot be read, which will count as a reject."""
    try:
        return file_digest(file.path)
    except OSError:
        return None


def finished_store(output: Path, origin: dict) -> Store:
    """The store that is at `output`, if it was made from just this."""
    if not (output / "store.json").is_file():
        raise UserError(f"{output}: is there already and is no store; remove it or choose another with -o")
    store = Store(output)
    if any(store.manifest.get(key) != value for key, value in origin.items()):
        raise UserError(f"{output}: holds a store of other inputs or options; remove it or choose another with -o")
    store.check_files()
    return store


def records_of(file: CorpusFile, options: Options) -> Iterator[Record]:
    """A file's records; of a columnar file what any format or `--columns` names."""
    return read_records(file, {*COLUMNS, *options.columns.values()})


class SampleMaker:
    """Turns records into samples: what they say is rendered, encoded and held against the options."""

    def __init__(self, tokenizer: ChatTokenizer, options: Options, needs_template: bool = True):
        self._tokenizer, self._options = tokenizer, options
        self._template = ChatTemplate(tokenizer, options.template_kwargs) if needs_template else None
        self._special = np.fromiter(tokenizer.special_ids, np.uint32)
        texts = sorted(map(re.escape, tokenizer.special_texts))
        self._spelled = re.compile("|".join(texts)) if texts else None
        self.special_texts = 0  # records that spell a special token
        self.lost: list[str] = []  # files that could not be read to their end, and from which record on

    def write(self, batch: list[tuple[Record, str | None]], writer: StoreWriter) -> None:
        """Hand each record of a batch, given with its file's format, to the writer as a sample or as a reject, in order."""
        items = [self._prepare(record, form) for record, form in batch]
        chats = self._encode(item.text for item in items if isinstance(item, Conversation))
        texts = self._encode((item.text for item in items if isinstance(item, Text)), plain=True)
        for (record, _), item in zip(batch, items, strict=True):
            try:
                if isinstance(item, Reject):
                    raise item
                encoding = next(chats) if isinstance(item, Conversation) else next(texts) if isinstance(item, Text) else None
                ids, spans = self._sample(item, encoding)
                if not self._options.keep_duplicates and (first := writer.first_equal(ids, spans)):
                    raise Reject(f"{DUPLICATE}: of {first}")
                writer.add(ids, spans, record.source, record.line, self._special)
            except Reject as reject:
                if reject is record.data:
                    self.lost.append(f"{record.source} from record {record.line} on: {reject}")
                writer.reject(record.source, record.line, str(reject), record.excerpt())

    def _prepare(self, record: Record, form: str | None) -> Conversation | Text | Tokens | Reject:
        """A record as far as it gets without the tokenizer, or the reason why it gets nowhere."""
        try:
            said = parse(record, form, self._options.columns)
            self._check_special_text(said)
            if isinstance(said, Dialogue):
                said = self._template.conversation(said.messages, said.tools, self._options.loss)
            elif isinstance(said, Text) and not is_utf8(said.text):
                raise Reject("text with a lone surrogate")
            if not isinstance(said, Tokens):
                self._check_size(said.text)
            return said
        except Reject as reject:
            return reject

    def _check_special_text(self, said: Dialogue | Text | Tokens) -> None:
        """Count a record whose text spells a special token, which becomes that token as at serving, or refuse it."""
        texts = (message["content"] for message in said.messages) if isinstance(said, Dialogue) else ()
        texts = (said.text,) if isinstance(said, Text) else texts
        if self._spelled is None or not any(map(self._spelled.search, texts)):
            return
        if self._options.special_text == "reject":
            raise Reject("text that spells a special token")
        self.special_texts += 1

    def _check_size(self, text: str) -> None:
        """Refuse a text that is too long whatever its tokens: encoding tens of megabytes takes minutes and gigabytes."""
        most = self._tokenizer.most_characters
        if most is not None and len(text) > (limit := most * self._options.max_length):
            characters = sum(map(len, text.split()))
            if characters > limit:
                raise Reject(f"longer than --max-length: {characters} characters")

    def _encode(self, texts: Iterable[str], plain: bool = False) -> Iterator:
        """The encodings of texts; plain ones with what the tokenizer adds, rendered ones have it from their template."""
        encoder = self._tokenizer.plain_encoder if plain else self._tokenizer.encoder
        return iter(encoder.encode_batch(list(texts), add_special_tokens=plain))

    def _sample(self, item: Conversation | Text | Tokens, encoding) -> tuple[np.ndarray, np.ndarray]:
        """Ids and loss spans, uint32, if they are what the options want."""
        if isinstance(item, Conversation):
            ids, spans = loss_spans(encoding, item, self._tokenizer.special_ids)
        elif isinstance(item, Text):
            ids, spans = np.array(encoding.ids, np.uint32), np.array([0, len(encoding.ids)], np.uint32)
        else:
            ids, spans = item.ids.astype(np.uint32), runs(item.loss)
            if ids.max() >= self._tokenizer.vocabulary:
                raise Reject("a token number beyond the tokenizer's vocabulary")
        if self._options.loss == "all":
            spans = np.array([0, len(ids)], np.uint32)
        elif self._options.loss == "last-assistant":
            spans = spans[-2:]
        return self._fitting(ids, spans)

    def _fitting(self, ids: np.ndarray, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The sample itself, unless its length or its loss rules it out."""
        if len(ids) > self._options.max_length:
            raise Reject(f"longer than --max-length: {len(ids)} tokens")
        loss = int(spans[1::2].sum()) - int(spans[0::2].sum())
        if not loss:
            raise Reject("no loss token")
        if loss < self._options.min_loss_tokens:
            raise Reject(f"fewer loss tokens than --min-loss-tokens: {loss}")
        return ids, spans


def runs(loss: np.ndarray) -> np.ndarray:
    """The half-open spans [start, end, …] in which a bool array is true, uint32."""
    edges = np.diff(np.concatenate([[0], loss.astype(np.int8), [0]]))
    return np.flatnonzero(edges).astype(np.uint32)


def loss_spans(encoding, conversation: Conversation, special_ids: frozenset[int]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and loss spans of one encoded conversation, both uint32.

    A token carries loss if it lies within what the assistant said; the special token that ends the turn does too. A token
    that straddles the start belongs to the prompt, since at serving the prompt is encoded on its own.
    """
    ids = np.array(encoding.ids, np.uint32)
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    spans: list[int] = []
    for start, end in conversation.spans:
        first = int(np.searchsorted(offsets[:, 0], start, "left"))
        last = int(np.searchsorted(offsets[:, 1], end, "right"))
        last = end_of_turn(ids, offsets, last, conversation.text, special_ids)
        if spans and first <= spans[-1] < last:
            spans[-1] = last
        elif first < last:
            spans += [first, last]
    return ids, np.array(spans, np.uint32)


def end_of_turn(ids: np.ndarray, offsets: np.ndarray, last: int, text: str, special_ids: frozenset[int]) -> int:
    """Where a turn's loss ends: past the special token that follows its content, whitespace between them included."""
    after = last
    while after < len(ids) and ids[after] not in special_ids:
        if text[offsets[after, 0] : offsets[after, 1]].strip():
            return last
        after += 1
    return after + 1 if after < len(ids) else last


def check_rejects(writer: StoreWriter, directory: Path, inputs: tuple[str, ...], output: Path, options: Options) -> None:
    """Refuse a corpus of which nothing, or too little, was kept; its rejects then stay beside the store's place.

    Duplicates do not count as lost: what they say is kept.
    """
    records = writer.reasons.total() + writer.kept
    rejected = writer.reasons.total() - writer.reasons[DUPLICATE]
    if not records:
        raise UserError(f"{', '.join(inputs)}: no records; name a JSONL file with one conversation a line")
    if writer.kept and rejected <= options.max_reject_share * records:
        return
    writer.close_rejects()
    place = resolved(output)
    beside = place.with_name(f"{place.name}.rejects.jsonl.zst")
    os.replace(directory / "rejects.jsonl.zst", beside)
    named = ", ".join(f"{count} {reason}" for reason, count in writer.reasons.most_common(3) if reason != DUPLICATE)
    allowed = f"more than --max-reject-share {options.max_reject_share:g} allows" if writer.kept else "nothing was kept"
    raise UserError(f"{rejected} of {records} records rejected ({named}): {allowed}; see {beside}")
