"""A store's making over many runs: killed at any moment, on any number of processes, the bytes are the same."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_prep import tokenize as module
from dflash_prep.errors import UserError
from dflash_prep.sample_maker import Options
from dflash_prep.store import Store
from dflash_prep.tokenize import tokenize
from dflash_prep.tokenizer import load_tokenizer
from tests.prep.support import assert_user_error, chat, jsonl, run, unzstd_lines

OPTIONS = Options(max_length=60, too_long="split", max_reject_share=0.5, near_dedup=0.5)
SHARD = 3_000
CHILD = """
import json, resource, sys, time
from dflash_prep import tokenize as module
from dflash_prep.errors import UserError
from dflash_prep.sample_maker import Options
from dflash_prep.tokenizer import load_tokenizer
if __name__ == "__main__":
    corpus, tokenizer, output, options, workers, shard, pause, most = sys.argv[1:]
    if int(most):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(most), int(most)))
    module.BATCH = 7
    wait = lambda status: time.sleep(float(pause))
    options = Options(**json.loads(options))
    try:
        inputs, output = tuple(corpus.split(",")), module.Path(output)
        module.tokenize(inputs, load_tokenizer(tokenizer), output, options, wait, int(workers), int(shard))
    except UserError as fault:
        sys.exit(f"error: {fault}")
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    """Three files of several formats with good, bad, equal, like and long records."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(5)
    lines = []
    for number in range(400):
        words = " ".join(str(draw.randrange(99)) for _ in range(draw.randrange(1, 12)))
        like = f"a b c d e f g h i j k l m {number}"
        answers = (f"q{number}", words), ("same", "same"), ("like", like)
        lines.append(draw.choice([*(jsonl([chat(*answer)]) for answer in answers), b"{broken\n"]))
    (folder / "a.jsonl").write_bytes(b"".join(lines))
    (folder / "b.json").write_text(json.dumps([{"messages": chat("array", f"a{number}")} for number in range(100)]))
    texts = [" ".join(str(draw.randrange(9)) for _ in range(draw.randrange(1, 200))) for _ in range(60)]
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return ",".join(str(folder / name) for name in ("a.jsonl", "b.json", "c.jsonl"))


def start(corpus, tokenizer, output, workers=1, pause=0.0, most=0, options=OPTIONS, name="") -> subprocess.Popen:
    """Begin to tokenize in a process of its own, slowly, or with files of at most so many bytes."""
    arguments = (corpus, tokenizer, output, json.dumps(options._asdict()), workers, SHARD, pause, most)
    command = [sys.executable, "-c", CHILD, *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"RUN_NAME": name})


def files(directory: Path) -> dict[str, bytes]:
    """Every file's bytes."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def expected(corpus, tiny_directory, tmp_path_factory) -> dict[str, bytes]:
    """The store of one run in one process."""
    output = tmp_path_factory.mktemp("expected") / "store"
    tokenize(tuple(corpus.split(",")), load_tokenizer(str(tiny_directory)), output, OPTIONS, shard_bytes=SHARD)
    manifest = Store(output).manifest
    assert len(manifest["shards"]) > 5
    assert {"not JSON", "duplicate", "near-duplicate"} <= set(manifest["counts"]["rejected"])
    assert manifest["counts"]["split"] > 5
    return files(output)


def test_any_number_of_workers_gives_the_same_bytes(corpus, expected, tiny_directory, tmp_path):
    for workers in (2, 3):
        assert start(corpus, tiny_directory, tmp_path / str(workers), workers).wait(120) == 0
        assert files(tmp_path / str(workers)) == expected


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_moment_it_goes_on_and_ends_with_the_same_bytes(corpus, expected, tiny_directory, tmp_path, seed):
    draw, output, kills, resumed = random.Random(seed), tmp_path / "store", 0, set()
    progress = tmp_path / "store.partial" / "parts" / "progress.json"
    while not output.exists():
        child = start(corpus, tiny_directory, output, workers=draw.choice([1, 2]), pause=0.02, name=str(tmp_path))
        before = finished(progress)
        resumed.add(before)
        more = draw.choice([0, 1, 2, 3])
        while child.poll() is None:
            if finished(progress) >= before + more:
                time.sleep(draw.random() * 0.1)
                child.kill()
                kills += 1
                break
            time.sleep(0.01)
        child.wait()
        assert kills < 40
    assert kills > 1
    assert len(resumed) > 1
    assert files(output) == expected
    assert os.listdir(tmp_path) == ["store"]


def finished(progress: Path) -> int:
    """How many shards an unfinished store has."""
    try:
        return len(json.loads(progress.read_text())["shards"])
    except FileNotFoundError:
        return 0


def test_worker_processes_do_not_outlive_a_killed_run(corpus, tiny_directory, tmp_path):
    child = start(corpus, tiny_directory, tmp_path / "store", workers=2, pause=0.05, name=str(tmp_path))
    wait_for(lambda: len(named(tmp_path)) >= 4)  # itself, the server of the workers, two workers
    child.send_signal(signal.SIGKILL)
    child.wait()
    wait_for(lambda: not named(tmp_path))


def named(name: Path) -> list[str]:
    """The processes of a run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"RUN_NAME={name}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(entry.name)
        except OSError:
            continue
    return found


def wait_for(condition) -> None:
    """Until something holds; fails after half a minute."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_second_of_two_runs_refuses_and_harms_nothing(corpus, expected, tiny_directory, tmp_path):
    output = tmp_path / "store"
    child = start(corpus, tiny_directory, output, pause=0.02)
    wait_for(lambda: (tmp_path / "store.partial" / "parts" / "progress.json").exists())
    with pytest.raises(UserError, match="another process is writing here"):
        tokenize(tuple(corpus.split(",")), load_tokenizer(str(tiny_directory)), output, OPTIONS, shard_bytes=SHARD)
    assert child.wait(60) == 0
    assert files(output) == expected


def test_many_runs_at_once_leave_one_whole_store(corpus, expected, tiny_directory, tmp_path):
    children = [start(corpus, tiny_directory, tmp_path / "store") for _ in range(4)]
    ends = [(child.wait(60), child.stderr.read()) for child in children]
    assert any(code == 0 for code, _ in ends)
    assert all(code == 0 or "another process" in words or "appeared" in words for code, words in ends), ends
    assert files(tmp_path / "store") == expected


def test_another_request_leaves_an_unfinished_store_as_it_is(corpus, expected, tiny_directory, tmp_path):
    child = start(corpus, tiny_directory, tmp_path / "store", pause=0.02)
    wait_for(lambda: (tmp_path / "store.partial" / "parts" / "progress.json").exists())
    child.kill()
    child.wait()
    inputs, tokenizer = tuple(corpus.split(",")), load_tokenizer(str(tiny_directory))
    for other in (OPTIONS._replace(max_length=61), OPTIONS._replace(limit=3)):
        with pytest.raises(UserError, match="holds an unfinished store of other inputs or options"):
            tokenize(inputs, tokenizer, tmp_path / "store", other)
    made = tokenize(inputs, tokenizer, tmp_path / "store", OPTIONS, shard_bytes=SHARD)
    assert made.resumed > 0
    assert files(tmp_path / "store") == expected


@pytest.mark.parametrize("most", [200, 2_000, 3_500, 6_000])
def test_a_full_disk_ends_in_one_line_and_what_is_finished_is_not_lost(corpus, expected, tiny_directory, tmp_path, most):
    """A limit on the size of files fails as a full disk does: in the middle of a write."""
    child = start(corpus, tiny_directory, tmp_path / "store", most=most)
    assert child.wait(60) == 1
    words = child.stderr.read()
    assert words.startswith("error: ") and words.count("\n") == 1, words
    assert "cannot write: File too large" in words
    kept = tmp_path / "store.partial"
    assert ("goes on from there" in words) == kept.exists()
    assert not (tmp_path / "store").exists()
    assert start(corpus, tiny_directory, tmp_path / "store").wait(60) == 0
    assert files(tmp_path / "store") == expected
    assert os.listdir(tmp_path) == ["store"]


def test_a_run_killed_between_its_last_writes_is_only_put_in_place(corpus, expected, tiny_directory, tmp_path, monkeypatch):
    def killed(*arguments, **options):
        raise KeyboardInterrupt

    inputs, tokenizer = tuple(corpus.split(",")), load_tokenizer(str(tiny_directory))
    for name in ("shutil.rmtree", "dflash_prep.unfinished.place_directory"):
        with monkeypatch.context() as patch:
            patch.setattr(name, killed)
            with pytest.raises(UserError, match="interrupted"):
                tokenize(inputs, tokenizer, tmp_path / "store", OPTIONS, shard_bytes=SHARD)
    assert os.listdir(tmp_path) == ["store.partial"]
    tokenize(inputs, tokenizer, tmp_path / "store", OPTIONS, shard_bytes=SHARD)
    assert files(tmp_path / "store") == expected


def test_rejects_of_a_refused_corpus_are_those_of_all_shards(corpus, tiny_directory, tmp_path):
    with pytest.raises(UserError, match=r"more than --max-reject-share 0\.01 allows"):
        tokenize(
            tuple(corpus.split(",")),
            load_tokenizer(str(tiny_directory)),
            tmp_path / "store",
            OPTIONS._replace(max_reject_share=0.01),
            shard_bytes=SHARD,
        )
    assert os.listdir(tmp_path) == ["store.rejects.jsonl.zst"]
    reasons = {reject["reason"].split(":")[0] for reject in unzstd_lines(tmp_path / "store.rejects.jsonl.zst")}
    assert {"not JSON", "duplicate", "near-duplicate"} <= reasons


def test_the_command_says_where_it_went_on(corpus, tiny_directory, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARD_BYTES", SHARD)
    child = start(
        corpus.split(",")[0], tiny_directory, tmp_path / "store", pause=0.02, options=Options(max_reject_share=0.6)
    )
    wait_for(lambda: (tmp_path / "store.partial" / "parts" / "progress.json").exists())
    child.kill()
    child.wait()
    arguments = (corpus.split(",")[0], "--tokenizer", tiny_directory, "-o", tmp_path / "store", "--max-reject-share", 0.6)
    result = run("tokenize", *arguments)
    assert result.exit_code == 0, result.output
    assert "went on from record" in result.stdout
    assert_user_error(run("tokenize", *arguments, "--limit", 3), "holds a store of other inputs or options")


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_unfinished_store_is_refused_or_made_whole(corpus, expected, tiny_directory, tmp_path, seed):
    """Never a traceback, and never a store that is another."""
    draw, output = random.Random(seed), tmp_path / "store"
    child = start(corpus, tiny_directory, output, pause=0.02)
    wait_for(lambda: finished(tmp_path / "store.partial" / "parts" / "progress.json") >= 2)
    child.kill()
    child.wait()
    found = sorted(path for path in (tmp_path / "store.partial").rglob("*") if path.is_file() and path.name != ".lock")
    path = draw.choice(found)
    data = bytearray(path.read_bytes())
    kind = draw.choice(["gone", "cut", "flipped", "garbage"])
    if kind == "gone":
        path.unlink()
    else:
        data = data[: len(data) // 2] if kind == "cut" else data if kind == "flipped" else bytearray(b"{}garbage")
        if kind == "flipped" and data:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
    try:
        tokenize(tuple(corpus.split(",")), load_tokenizer(str(tiny_directory)), output, OPTIONS, shard_bytes=SHARD)
    except UserError as fault:
        assert "remove" in str(fault), (path, kind)
    else:
        assert files(output) == expected


def test_a_shard_ends_after_so_many_samples_too(corpus, tiny_directory, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_prep.store_writer.SHARD_SAMPLES", 10)
    made = tokenize(tuple(corpus.split(",")), load_tokenizer(str(tiny_directory)), tmp_path / "store", OPTIONS)
    assert {shard["samples"] for shard in made.manifest["shards"][:-1]} <= set(range(10, 20))
