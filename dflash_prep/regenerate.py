"""A chat corpus with every answer asked for anew, of the target itself: what a draft is to learn from.

Records are asked for in parallel and noted in a journal as they are finished; the output is written from it at the end, in
the order of the input. So memory holds the records in flight and eight bytes for each other.
"""

import json
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from dflash_prep.answers import TOKENS, regenerated
from dflash_prep.endpoint import Answer, Endpoint, NoAnswer, Refused
from dflash_prep.errors import Reject, UserError
from dflash_prep.files import resolved
from dflash_prep.formats import Dialogue, detect, parse
from dflash_prep.inputs import open_corpus
from dflash_prep.journal import Entry, Journal
from dflash_prep.outcome import beside, check_place, is_finished, taken, write
from dflash_prep.records import CorpusFile, Lost, Record
from dflash_prep.tokenize import checksum, records_of
from dflash_prep.unfinished import reason_of

UNANSWERED = 16  # records in a row without an answer, and at least twice those in flight: the server is gone


class Options(NamedTuple):
    """What decides the answers."""

    format: str | None = None  # of every file; None: detected
    columns: dict[str, str] = {}  # noqa: RUF012 - the corpus' names for ours; never changed
    temperature: float = 0.0
    max_tokens: int = 4096  # of one answer
    seed: int = 0
    template_kwargs: dict[str, object] = {}  # noqa: RUF012 - for the server's chat template; never changed
    limit: int | None = None  # records that are read


class Tally(NamedTuple):
    """How far a run is: records in all, finished now and before, failed now, and the tokens written since it began."""

    total: int
    before: int
    done: int = 0
    failed: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Task(NamedTuple):
    """A record by its number in the whole corpus, with its file's format."""

    number: int
    record: Record
    form: str | None


def regenerate(
    inputs: tuple[str, ...],
    output: Path,
    endpoint: Endpoint,
    model: str | None = None,
    options: Options = Options(),  # noqa: B008 - immutable
    concurrency: int = 32,
    max_reject_share: float = 0.05,
    progress: Callable[[Tally], None] = lambda tally: None,
) -> dict | None:
    """Write `output` from a corpus, with the answers of `model` (None: the only one served); returns what it came to.

    None where a run of the same had just finished it when it was killed.
    """
    output = resolved(output)
    check_place(output)
    model = served(endpoint, model)
    with open_corpus(inputs) as corpus:
        rejects = beside(output, "rejects.jsonl.zst")  # of an earlier try, if the output goes into a directory of the corpus
        files = [file for file in corpus.files if resolved(file.path) != rejects]
        formats = {file: options.format or detect(records_of(file, options), options.columns) for file in files}
        total = sum(1 for _ in tasks_of(formats, options))
        if not total:
            raise UserError(f"{', '.join(inputs)}: no records; name a JSONL file with one conversation a line")
        origin = {
            "inputs": [{"name": file.name, "checksum": checksum(file)} for file in files],
            "model": model,
            "options": options._asdict(),
        }
        with Journal(beside(output, "partial"), origin) as journal:
            if is_finished(output):
                journal.remove()
                return None
            if os.path.lexists(output) and not journal.begun():  # whoever had the journal before has finished just now
                journal.remove()
                raise taken(output)
            try:
                lost = ask_all(Asker(endpoint, model, options), formats, journal, total, concurrency, progress)
                counts = write(journal, total, output, max_reject_share)
            except OSError as fault:
                raise UserError(f"{reason_of(fault, output)}; make room and run the same again") from None
            except KeyboardInterrupt as fault:
                kept = sum(map(journal.kept, range(total)))
                raise UserError(
                    f"{reason_of(fault, output)}; the {kept} of {total} records that are finished are kept in "
                    f"{journal.path}: run the same again to go on"
                ) from None
            journal.remove()
    return {
        "model": model,
        "records": total,
        "counts": counts,
        "formats": dict(sorted(Counter(form or "unknown" for form in formats.values()).items())),
        "other_files": corpus.others,
        "lost_files": lost,
        "options": options._asdict(),
    }


def served(endpoint: Endpoint, model: str | None) -> str:
    """The model's name if the server has it; without a name the only one that it has."""
    names = endpoint.models()
    listed = ", ".join(names[:10]) or "none"
    if model is None and len(names) != 1:
        raise UserError(f"{endpoint.url}: serves {len(names)} models ({listed}); choose one with --model")
    if model is not None and model not in names:
        raise UserError(f"{endpoint.url}: does not serve {model}; it serves {listed}")
    return model or names[0]


def tasks_of(formats: dict[CorpusFile, str | None], options: Options) -> Iterator[Task]:
    """Every record of the corpus, numbered from 0."""
    records = ((record, form) for file, form in formats.items() for record in records_of(file, options))
    for number, (record, form) in enumerate(islice(records, options.limit)):
        yield Task(number, record, form)


class Asker:
    """Asks one model for the answers of one record after another; may be used by many threads."""

    def __init__(self, endpoint: Endpoint, model: str, options: Options):
        self.endpoint, self._model, self._options = endpoint, model, options

    def answer(self, task: Task) -> Entry | Reject:
        """What becomes of a record, or why nothing does."""
        try:
            said = parse(task.record, task.form, self._options.columns)
            if not isinstance(said, Dialogue):
                raise Reject(f"no conversation: {task.form}")
            new = regenerated(said, lambda messages, tools, turn: self._ask(messages, tools, task.number, turn))
            row = {"messages": new.messages} | ({"tools": new.tools} if new.tools else {})
            row |= {"finish_reason": new.finish, "source": task.record.source, "line": task.record.line}
            return Entry(True, new.counts, to_line(row))
        except Reject as reject:
            return reject
        except RecursionError:
            return Reject("nested too deeply")

    def _ask(self, messages: list[dict], tools: list | None, number: int, turn: int) -> Answer:
        options = self._options
        body = {"model": self._model, "messages": messages} | ({"tools": tools} if tools else {})
        body |= {"max_tokens": options.max_tokens, "temperature": options.temperature}
        if options.temperature > 0:  # a seed of its own each, or all answers would be drawn with the same luck
            key = f"{options.seed} {number} {turn}".encode()
            body["seed"] = int.from_bytes(blake2b(key, digest_size=4).digest(), "big") >> 1
        if options.template_kwargs:
            body["chat_template_kwargs"] = options.template_kwargs
        return self.endpoint.ask(body)


def to_line(row: dict) -> bytes:
    """One line of JSON; what Parquet has and JSON has not becomes text."""
    try:
        return json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise Reject("text with a lone surrogate") from None
    except ValueError:
        raise Reject("nested too deeply") from None


def ask_all(asker: Asker, formats: dict, journal: Journal, total: int, concurrency: int, progress: Callable) -> list[str]:
    """Ask for every record that the journal does not hold and note what becomes of it; returns what files were lost."""
    before = sum(map(journal.kept, range(total)))
    tally, start, in_a_row, lost = Tally(total, before), time.monotonic(), 0, []
    progress(tally)
    todo = (task for task in tasks_of(formats, asker._options) if not journal.kept(task.number))
    with in_parallel(asker.answer, todo, min(concurrency, total - before)) as outcomes:
        try:
            for task, outcome in outcomes:
                if not isinstance(outcome, Entry | Reject):
                    raise outcome
                if isinstance(outcome, NoAnswer):
                    in_a_row += 1
                elif isinstance(outcome, Entry | Refused):  # any other reject never came to the server
                    in_a_row = 0
                if isinstance(outcome, Lost):
                    lost.append(f"{task.record.source} from record {task.record.line} on: {outcome}")
                entry = outcome if isinstance(outcome, Entry) else rejected(task.record, outcome)
                journal.add(task.number, entry)
                tally = tally._replace(
                    done=tally.done + 1,
                    failed=tally.failed + (not entry.kept),
                    tokens=tally.tokens + entry.counts[TOKENS],
                    seconds=time.monotonic() - start,
                )
                progress(tally)
                if in_a_row >= max(UNANSWERED, 2 * concurrency):
                    raise UserError(
                        f"{asker.endpoint.url}: {in_a_row} records in a row got no answer ({outcome}); the "
                        f"{before + tally.done - tally.failed} of {total} that are finished are kept in {journal.path}: run "
                        "the same again once the server is well"
                    )
        finally:
            asker.endpoint.stop()
    return lost


def rejected(record: Record, reason: Reject) -> Entry:
    """A record that is not kept, as the list of rejects has it."""
    row = {"source": record.source, "line": record.line, "reason": str(reason), "excerpt": record.excerpt()}
    line = json.dumps(row, ensure_ascii=False).encode(errors="replace")
    return Entry(False, Counter({str(reason).split(":")[0]: 1}), line)


@contextmanager
def in_parallel(work: Callable, tasks: Iterable, threads: int) -> Iterator[Iterator[tuple]]:
    """Each task with what `work` made of it, as they get ready; never more than `threads` at once, none read far ahead.

    The threads are daemons: an interrupted run does not wait for answers that nobody wants.
    """
    asked: queue.SimpleQueue = queue.SimpleQueue()
    ready: queue.SimpleQueue = queue.SimpleQueue()

    def serve():
        while (task := asked.get()) is not None:
            try:
                outcome = work(task)
            except BaseException as fault:  # raised where the outcome is awaited
                outcome = fault
            ready.put((task, outcome))

    def outcomes():
        flying = 0
        for task in tasks:
            if flying == threads:
                yield ready.get()
                flying -= 1
            asked.put(task)
            flying += 1
        for _ in range(flying):
            yield ready.get()

    for _ in range(threads):
        threading.Thread(target=serve, daemon=True).start()
    try:
        yield outcomes()
    finally:
        for _ in range(threads):
            asked.put(None)
