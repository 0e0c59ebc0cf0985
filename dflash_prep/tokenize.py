"""From a corpus to a token store: records in order, their samples made on all cores, written shard by shard."""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from dflash_prep.errors import UserError
from dflash_prep.files import file_digest, is_taken, read_json, resolved, write_json
from dflash_prep.formats import COLUMNS, detect
from dflash_prep.inputs import Corpus, open_corpus
from dflash_prep.records import CorpusFile, Record, read_records
from dflash_prep.sample_maker import Options, SampleMaker
from dflash_prep.shuffle import shuffled
from dflash_prep.store import VERSION, Store
from dflash_prep.store_writer import DUPLICATE, NEAR_DUPLICATE, PARTS, PROGRESS, SHARD_BYTES, StoreWriter
from dflash_prep.tokenizer import ChatTokenizer
from dflash_prep.unfinished import unfinished
from dflash_prep.workers import cores, in_order

# Records, or as many as hold so much, that are made into samples at once. Lots of a sixteenth are a fifth slower: the
# tokenizer's allocations then fill the gaps that the last lot left, all over the memory. Small ones end at the same time.
BATCH, MOST_BYTES, LEAST_BYTES = 4096, 4 << 20, 1 << 18
SMALL = 1 << 20  # bytes of a corpus' files, compressed as they are
ORIGIN = "origin.json"
REPEATED = DUPLICATE, NEAR_DUPLICATE

Batch = list[tuple[Record, str | None]]  # records with their files' formats


class Status(NamedTuple):
    """How far a run is: bytes of the corpus' files read and in all, records done, tokens kept."""

    read: int
    total: int
    records: int
    tokens: int


class Made(NamedTuple):
    """A store's manifest; whether the store was there already, and at which record an earlier run was taken up."""

    manifest: dict
    existed: bool
    resumed: int = 0


def tokenize(
    inputs: tuple[str, ...],
    tokenizer: ChatTokenizer,
    output: Path,
    options: Options,
    progress: Callable[[Status], None] = lambda status: None,
    workers: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Made:
    """Write the store `output` from a corpus.

    A store is immutable: one made from the same inputs, tokenizer and options is kept, any other is an error. A run that was
    killed is taken up after its last finished shard. The bytes are the same for any number of workers; by default there is
    one a core, or none but this process where the corpus is so small that it would be done before they have started.
    """
    with open_corpus(inputs) as corpus:
        before = [state(file) for file in corpus.files]
        origin = describe(corpus, tokenizer, options)
        if is_taken(output):
            return Made(finished_store(output, origin).manifest, True)
        formats = {file: options.format or detect(records_of(file, options), options.columns) for file in corpus.files}
        make = partial(SampleMaker, tokenizer, options, not set(formats.values()) <= {"text", "tokens", None})
        make()  # a template that does not compile, say, is found before anything is written
        with unfinished(output, worth_keeping) as directory:
            if (directory / "store.json").exists():  # an earlier run was killed just before the end
                shutil.rmtree(directory / PARTS, ignore_errors=True)
                return Made(finished_store(directory, origin).manifest, False)
            check_origin(directory, origin)
            writer = StoreWriter(
                directory, tokenizer.special_ids, not options.keep_duplicates, options.near_dedup, shard_bytes
            )
            resumed = writer.tally.records
            read, total = Counter(), sum(then[0] for then in before if then)
            seen = lambda count: read.update(bytes=count)  # noqa: E731
            records = ((record, form) for file, form in formats.items() for record in records_of(file, options, seen))
            if options.shuffle_input is not None:
                records = shuffled(records, options.shuffle_input, directory / PARTS / "shuffled.jsonl")
            remaining = islice(records, resumed, options.limit)
            workers = workers or (cores() if total > SMALL else 1)
            ahead = lambda: (total - read["bytes"]) // (4 * workers)  # noqa: E731
            for outcomes in in_order(make, batches(remaining, ahead), batch_bytes, workers):
                for outcome in outcomes:
                    writer.take(outcome)
                progress(Status(read["bytes"], total, writer.tally.records, writer.tokens))
            if changed := [file.name for file, then in zip(corpus.files, before, strict=True) if state(file) != then]:
                shutil.rmtree(directory / PARTS)
                raise UserError(f"{changed[0]}: changed while it was read; run again once it is whole")
            check_rejects(writer, directory, inputs, output, options)
            used = dict(sorted(Counter(form or "unknown" for form in formats.values()).items()))
            manifest = writer.finish(origin | {"formats": used, "other_files": corpus.others})
    return Made(manifest, False, resumed)


def worth_keeping(directory: Path) -> bool:
    """Whether a shard is finished, or the whole store."""
    return (directory / PARTS / PROGRESS).exists() or (directory / "store.json").exists()


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


def state(file: CorpusFile) -> tuple[int, int] | None:
    """A file's size and when it was last changed; None for one that cannot be looked at."""
    try:
        found = file.path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def finished_store(output: Path, origin: dict) -> Store:
    """The store that is at `output`, if it was made from just this."""
    if not (output / "store.json").is_file():
        raise UserError(f"{output}: is there already and is no store; remove it or choose another with -o")
    store = Store(output)
    if any(store.manifest.get(key) != value for key, value in origin.items()):
        raise UserError(f"{output}: holds a store of other inputs or options; remove it or choose another with -o")
    store.check_files()
    return store


def check_origin(directory: Path, origin: dict) -> None:
    """State what an unfinished store is made from, or refuse one that is made from something else."""
    path = directory / PARTS / ORIGIN
    origin = origin | {"version": VERSION}
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_json(path, origin)
    elif read_json(path, "origin of this unfinished store") != origin:
        raise UserError(
            f"{directory}: holds an unfinished store of other inputs or options; remove it or choose another with -o"
        )


def records_of(file: CorpusFile, options: Options, seen: Callable[[int], None] = lambda count: None) -> Iterator[Record]:
    """A file's records; of a columnar file what any format or `--columns` names."""
    return read_records(file, {*COLUMNS, *options.columns.values()}, seen)


def batches(records: Iterable[tuple[Record, str | None]], ahead: Callable[[], int]) -> Iterator[Batch]:
    """Records in lots, towards the end smaller ones: of about as many bytes as `ahead` says, within bounds."""
    batch, held, enough = [], 0, LEAST_BYTES
    for record, form in records:
        batch.append((record, form))
        held += record.size()
        if len(batch) == BATCH or held >= enough:
            yield batch
            batch, held, enough = [], 0, min(max(ahead(), LEAST_BYTES), MOST_BYTES)
    if batch:
        yield batch


def batch_bytes(batch: Batch) -> int:
    """About how many bytes a batch holds."""
    return sum(record.size() for record, _ in batch)


def check_rejects(writer: StoreWriter, directory: Path, inputs: tuple[str, ...], output: Path, options: Options) -> None:
    """Refuse a corpus of which nothing, or too little, was kept; its rejects then stay beside the store's place.

    Duplicates do not count as lost: what they say is kept.
    """
    tally = writer.tally
    reasons = Counter({reason: count for reason, count in tally.rejected.items() if reason not in REPEATED})
    rejected = reasons.total()
    if not tally.records:
        raise UserError(f"{', '.join(inputs)}: no records; name a JSONL file with one conversation a line")
    if tally.samples and rejected <= options.max_reject_share * (tally.records + tally.pieces):
        return
    place = resolved(output)
    beside = place.with_name(f"{place.name}.rejects.jsonl.zst")
    os.replace(writer.rejects(), beside)
    shutil.rmtree(directory / PARTS)  # of a store that is not to be, nothing is worth keeping
    named = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(3))
    allowed = f"more than --max-reject-share {options.max_reject_share:g} allows" if tally.samples else "nothing was kept"
    raise UserError(f"{rejected} of {tally.records} records rejected ({named}): {allowed}; see {beside}")
