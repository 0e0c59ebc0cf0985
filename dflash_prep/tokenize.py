"""From records to a token store: render, encode whole conversations, mark the loss tokens, write."""

import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dflash_prep.chat import ChatTemplate, Conversation, Reject, parse_messages
from dflash_prep.corpus import Record, check_input, read_records
from dflash_prep.errors import UserError
from dflash_prep.files import file_digest, is_taken, new_directory, resolved
from dflash_prep.store import Store, StoreWriter
from dflash_prep.tokenizer import ChatTokenizer

BATCH = 512  # conversations encoded at once: enough to fill every core, little enough to stay small in memory


class Options(NamedTuple):
    """What decides which records are kept."""

    max_length: int = 8192
    max_reject_share: float = 0.05


def tokenize(
    inputs: tuple[str, ...],
    tokenizer: ChatTokenizer,
    output: Path,
    options: Options,
    progress: Callable[[int], None] = lambda records: None,
) -> tuple[dict, bool]:
    """Write the store `output` from JSONL files; returns its manifest and whether it was there already.

    A store is immutable: one made from the same inputs, tokenizer and options is kept, any other is an error.
    """
    template = ChatTemplate(tokenizer)
    origin = describe(inputs, tokenizer, options)
    if is_taken(output):
        if not (output / "store.json").is_file():
            raise UserError(f"{output}: is there already and is no store; remove it or choose another with -o")
        store = Store(output)
        if any(store.manifest.get(key) != value for key, value in origin.items()):
            raise UserError(f"{output}: holds a store of other inputs or options; remove it or choose another with -o")
        store.check_files()
        return store.manifest, True
    with new_directory(output, replace=False) as directory:
        writer = StoreWriter(directory)
        records = read_records(inputs)
        while batch := list(islice(records, BATCH)):
            encode_batch(batch, tokenizer, template, options, writer)
            progress(len(batch))
        check_rejects(writer, directory, inputs, output, options)
        manifest = writer.finish(origin)
    return manifest, False


def describe(inputs: tuple[str, ...], tokenizer: ChatTokenizer, options: Options) -> dict:
    """What a store was made from, as `store.json` states it."""
    for name in inputs:
        check_input(Path(name))
    try:
        sources = [{"name": name, "checksum": file_digest(Path(name))} for name in inputs]
    except OSError as fault:
        raise UserError(f"{fault.filename}: cannot read the corpus: {fault.strerror}") from None
    return {
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
        "chat_template": {"fingerprint": tokenizer.template_fingerprint},
        "options": options._asdict(),
        "inputs": sources,
    }


def encode_batch(
    batch: list[Record], tokenizer: ChatTokenizer, template: ChatTemplate, options: Options, writer: StoreWriter
) -> None:
    """Encode one batch of records and hand each, in order, to the writer as a sample or as a reject."""
    conversations = list(map_conversations(batch, template))
    texts = [item.text for item in conversations if isinstance(item, Conversation)]
    encodings = iter(tokenizer.encoder.encode_batch(texts, add_special_tokens=False))
    special = np.fromiter(tokenizer.special_ids, np.uint32)
    for record, item in zip(batch, conversations, strict=True):
        try:
            if isinstance(item, Reject):
                raise item
            ids, spans = loss_spans(next(encodings), item, tokenizer.special_ids)
            if len(ids) > options.max_length:
                raise Reject(f"longer than --max-length: {len(ids)} tokens")
            if not len(spans):
                raise Reject("no loss token")
            writer.add(ids, spans, record.source, record.line, special)
        except Reject as reject:
            writer.reject(record.source, record.line, str(reject), record.data)


def map_conversations(batch: list[Record], template: ChatTemplate) -> Iterator[Conversation | Reject]:
    """Each record rendered, or the reason why it cannot be."""
    for record in batch:
        try:
            yield template.conversation(parse_messages(record.data))
        except Reject as reject:
            yield reject


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
    """Refuse a corpus of which nothing, or too little, was kept; its rejects then stay beside the store's place."""
    rejected = writer.reasons.total()
    records = rejected + writer.kept
    if not records:
        raise UserError(f"{', '.join(inputs)}: no records; name a JSONL file with one conversation a line")
    if writer.kept and rejected <= options.max_reject_share * records:
        return
    writer.close_rejects()
    place = resolved(output)
    beside = place.with_name(f"{place.name}.rejects.jsonl.zst")
    os.replace(directory / "rejects.jsonl.zst", beside)
    reasons = ", ".join(f"{count} {reason}" for reason, count in writer.reasons.most_common(3))
    allowed = f"more than --max-reject-share {options.max_reject_share:g} allows" if writer.kept else "nothing was kept"
    raise UserError(f"{rejected} of {records} records rejected ({reasons}): {allowed}; see {beside}")
