"""`dflash-prep tokenize` beside the tokenizer alone and beside `datasets.map`: tokens a second, memory, and opening a store.

`python benchmarks/tokenize.py [--data DIR] [--megabytes 200] [--tokenizer DIR] [--rivals-python PATH]`. The corpora of DIR,
as one file of `messages`, are repeated to so many megabytes. Ours is the whole command, from start-up to the last byte
written, once with that file and once with four times as much. The floor is `tokenizers`' own `encode_batch` on the same
rendered texts, which are ready in memory, its result thrown away: no tool that uses this tokenizer can be faster. The rival
is what most training scripts do: `datasets.map` in two processes, `apply_chat_template` for the ids and again up to each
assistant turn for the mask; it gets as much of the corpus as it can do in about a minute. Its environment:

    python3 -m venv rivals
    rivals/bin/pip install torch==2.13.0 datasets==5.2.0 transformers==5.24.0

The last part opens a store of 900,000 samples, its pages dropped from memory, and reads 10,000 samples at random; the rival
reads the same ids with `datasets` from the Arrow files that it writes itself.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

CORPORA = ("wide-mix.messages.jsonl.zst", "sgd.sharegpt.parquet", "gpteacher-codegen.instruction.json.gz")
CORPORA += ("gsm8k-train.messages.jsonl.zst", "oasst.messages.jsonl.zst", "smollm2-written.messages.jsonl.zst")
SAMPLES, READ, LENGTH = 900_000, 10_000, 300
RIVAL_SHARE = 0.1  # of the corpus


def write_corpus(folder: Path, output: Path, megabytes: int) -> None:
    """The corpora as one JSONL file of messages, in random order, repeated to a size."""
    from dflash_prep.formats import COLUMNS, detect, parse
    from dflash_prep.records import CorpusFile, read_records

    lines = []
    for name in CORPORA:
        file = CorpusFile(name, folder / name)
        form = detect(read_records(file, COLUMNS))
        for record in read_records(file, COLUMNS):
            lines.append(json.dumps({"messages": parse(record, form).messages}, ensure_ascii=False) + "\n")
    random.Random(0).shuffle(lines)
    size = 0
    with output.open("w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            for line in lines:
                size += len(line.encode())
                file.write(line)


def texts_of(corpus: Path, tokenizer: str | None):
    """A corpus' rendered conversations."""
    from dflash_prep.chat import ChatTemplate
    from dflash_prep.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    template = ChatTemplate(loaded)
    with corpus.open(encoding="utf-8", newline="\n") as lines:
        return loaded, [template.render(json.loads(line)["messages"]) for line in lines]


def floor(corpus: Path, tokenizer: str | None) -> dict:
    """`encode_batch` alone, on all cores."""
    loaded, texts = texts_of(corpus, tokenizer)
    began, tokens = time.perf_counter(), 0
    for start in range(0, len(texts), 1000):
        tokens += sum(map(len, loaded.encoder.encode_batch(texts[start : start + 1000], add_special_tokens=False)))
    return {"tokens": tokens, "seconds": time.perf_counter() - began}


def mapped(corpus: Path, tokenizer: str) -> dict:
    """`datasets.map` as training scripts have it; the seconds are those of the map."""
    from datasets import Dataset, disable_caching, disable_progress_bars
    from transformers import AutoTokenizer

    disable_caching()
    disable_progress_bars()
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    with corpus.open(encoding="utf-8", newline="\n") as lines:
        rows = [json.loads(line) for line in lines]
    rows = rows[: int(len(rows) * RIVAL_SHARE)]
    table = Dataset.from_list([{"messages": [{k: m[k] for k in ("role", "content")} for m in r["messages"]]} for r in rows])

    def ids_of(messages: list[dict], prompt: bool = False) -> list[int]:
        return loaded.apply_chat_template(messages, tokenize=True, return_dict=False, add_generation_prompt=prompt)

    def tokenize(row: dict) -> dict:
        ids = ids_of(row["messages"])
        mask = [0] * len(ids)
        for number, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                start, end = len(ids_of(row["messages"][:number], True)), len(ids_of(row["messages"][: number + 1]))
                mask[start:end] = [1] * (end - start)
        return {"input_ids": ids, "loss_mask": mask}

    began = time.perf_counter()
    done = table.map(tokenize, num_proc=2, remove_columns=["messages"])
    seconds = time.perf_counter() - began
    return {"tokens": sum(map(len, done["input_ids"])), "seconds": seconds}


def tree(root: int) -> list[int]:
    """A process and its descendants."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def held(processes: list[int]) -> int:
    """Bytes of memory that processes hold together, shared pages counted once."""
    total = 0
    for process in processes:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            total += 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
        except (OSError, StopIteration):
            continue
    return total


def watched(command: list[str]) -> dict:
    """Run a command; its seconds, and the most memory that it and its children held."""
    began, most = time.perf_counter(), 0
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    done = threading.Event()

    def look() -> None:
        nonlocal most
        while not done.wait(1):
            most = max(most, held(tree(child.pid)))

    threading.Thread(target=look, daemon=True).start()
    code = child.wait()
    seconds = time.perf_counter() - began
    done.set()
    if code:
        sys.exit(f"{' '.join(command)}: exit code {code}")
    return {"seconds": seconds, "megabytes": most / 1e6}


def ours(corpus: Path, output: Path, tokenizer: str | None) -> dict:
    """The whole command; nothing is left out, so that all do the same work."""
    command = [str(Path(sys.executable).with_name("dflash-prep")), "tokenize", str(corpus), "-o", str(output)]
    command += ["--keep-duplicates", "--max-length", "1000000", "--max-reject-share", "1"]
    found = watched(command + (["--tokenizer", tokenizer] if tokenizer else []))
    counts = json.loads((output / "store.json").read_text())["counts"]
    return found | {"tokens": counts["tokens"], "records": counts["records"], "rejected": sum(counts["rejected"].values())}


def role(python: str, name: str, *arguments: object) -> dict:
    """What one of the functions above says in a process of its own."""
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "true" if name == "floor" else "false"}
    words = [python, __file__, "--role", name, *map(str, arguments)]
    return json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout)


def write_many(path: Path) -> None:
    """A store of many samples."""
    from dflash_prep.sample import Outcome, Sample
    from dflash_prep.store_writer import StoreWriter

    draw = np.random.default_rng(0)
    path.mkdir()
    writer = StoreWriter(path)
    for number, length in enumerate(draw.integers(LENGTH // 2, LENGTH * 3 // 2, SAMPLES).tolist()):
        ids = draw.integers(0, 50_000, length)
        writer.take(Outcome("made", number + 1, (Sample.of(ids, np.array([length // 2, length])),)))
    writer.finish({"tokenizer": {"name": "none", "fingerprint": "0" * 32}})


def dropped(folder: Path) -> None:
    """Drop a folder's pages from memory."""
    for file in folder.rglob("*.*"):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def opened(path: Path, warm: str) -> dict:
    """Open a store in a new process and read samples at random, every page of each touched."""
    from dflash_prep.store import Store

    numbers = np.random.default_rng(1).integers(0, SAMPLES, READ).tolist()
    if warm == "cold":
        dropped(path)
    began = time.perf_counter()
    store = Store(path)
    samples = [store.sample(number)[0] for number in numbers]
    had = time.perf_counter() - began
    total = sum(int(ids.sum()) for ids in samples)
    return {"seconds": time.perf_counter() - began, "views": had, "sum": total}


def opened_by_datasets(path: Path, warm: str) -> dict:
    """The same samples from a data set on disk."""
    from datasets import load_from_disk

    numbers = np.random.default_rng(1).integers(0, SAMPLES, READ).tolist()
    if warm == "cold":
        dropped(path)
    began = time.perf_counter()
    table = load_from_disk(str(path)).with_format("numpy")
    total = sum(int(table[number]["input_ids"].sum()) for number in numbers)
    return {"seconds": time.perf_counter() - began, "sum": total}


def save_for_datasets(store: Path, path: Path) -> dict:
    """The ids of a store as `datasets` saves them."""
    import pyarrow as pa
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    shards = [pa.ipc.open_file(pa.memory_map(str(file))).read_all() for file in sorted(store.glob("shard-*.arrow"))]
    Dataset(pa.concat_tables(shards).select(["input_ids"])).save_to_disk(str(path))
    return {}


def speed(arguments: argparse.Namespace, folder: Path) -> None:
    """The first two tables."""
    from dflash_prep.embedded import default_target

    corpus, larger = folder / "corpus.jsonl", folder / "larger.jsonl"
    write_corpus(arguments.data, corpus, arguments.megabytes)
    tokenizer = arguments.tokenizer or str(default_target())
    print(f"{corpus.stat().st_size / 1e6:.0f} MB of JSONL, {os.cpu_count()} cores, tokenizer {tokenizer}")
    alone = role(sys.executable, "floor", corpus, tokenizer)
    base = alone["tokens"] / alone["seconds"]
    made = ours(corpus, folder / "store", tokenizer)
    again = role(sys.executable, "floor", corpus, tokenizer)
    base = (base + again["tokens"] / again["seconds"]) / 2
    print(f"{'':34}{'tokens/s':>12}{'of encode_batch':>17}{'peak MB':>9}")
    print(f"{'encode_batch alone (mean of two)':34}{base:>12,.0f}{1:>17.3f}")
    rate = made["tokens"] / made["seconds"]
    print(f"{'dflash-prep tokenize':34}{rate:>12,.0f}{rate / base:>17.3f}{made['megabytes']:>9.0f}")
    if arguments.rivals_python:
        slow = role(arguments.rivals_python, "mapped", corpus, tokenizer)
        other = slow["tokens"] / slow["seconds"]
        print(f"{'datasets.map, 2 processes':34}{other:>12,.0f}{other / base:>17.3f}")
        print(f"dflash-prep tokenize : datasets.map = {rate / other:.2f}")
    print(f"{made['records']:,} records, {made['rejected']:,} not kept; tokens {made['tokens']:,} and {alone['tokens']:,}")
    with larger.open("wb") as file:
        for _ in range(4):
            file.write(corpus.read_bytes())
    large = ours(larger, folder / "large", tokenizer)
    ratio = large["megabytes"] / made["megabytes"]
    print(f"four times the corpus: {large['seconds']:.0f} s, {large['megabytes']:.0f} MB, {ratio:.2f} times the memory")


def opening(arguments: argparse.Namespace, folder: Path) -> None:
    """The last table."""
    write_many(folder / "many")
    if arguments.rivals_python:
        role(arguments.rivals_python, "save_for_datasets", folder / "many", folder / "datasets")
    print(
        f"opening a store of {SAMPLES:,} samples and taking {READ:,} at random, as views of the mapped file; then every id"
    )
    print("of them read, which the disk has to deliver where it is cold; seconds:")
    for warm in ("cold", "warm"):
        mine = min((role(sys.executable, "opened", folder / "many", warm) for _ in range(3)), key=lambda r: r["seconds"])
        line = f"  {warm}: {mine['views']:.3f}; read {mine['seconds']:.3f}"
        if arguments.rivals_python:
            theirs = role(arguments.rivals_python, "opened_by_datasets", folder / "datasets", warm)
            assert mine["sum"] == theirs["sum"]
            line += f"; datasets {theirs['seconds']:.3f}, {theirs['seconds'] / mine['seconds']:.1f} times as long"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--tokenizer")
    parser.add_argument("--rivals-python")
    parser.add_argument("--only", choices=["speed", "opening"])
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        name, place, *rest = arguments.role
        rest = [Path(part) if name == "save_for_datasets" else part for part in rest]
        print(json.dumps(globals()[name](Path(place), *rest)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for part in (speed, opening):
            if arguments.only in (None, part.__name__):
                part(arguments, Path(folder))


if __name__ == "__main__":
    main()
