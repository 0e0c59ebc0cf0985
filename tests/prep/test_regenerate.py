"""A regenerated corpus: every record once and in order, whatever fails, however it is killed, whoever else is at work."""

import gzip
import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_prep import endpoint
from dflash_prep.cli import main
from dflash_prep.journal import Journal
from dflash_prep.store import Store
from tests.prep.chat_server import MODEL, completion, reply, serving
from tests.prep.support import assert_user_error, chat, jsonl, run, unzstd_lines

OUT = "out.jsonl.zst"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """An empty directory to work in; short delays between tries."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(endpoint, "FIRST_DELAY", 0.001)
    return tmp_path


def corpus(records: int, turns: int = 2) -> Path:
    """A corpus of conversations of several turns, all of them different."""
    path = Path("corpus.jsonl")
    path.write_bytes(jsonl([chat(*(f"record {record} turn {turn}" for turn in range(turns))) for record in range(records)]))
    return path


def regenerate(server, *arguments: object):
    """Run the command against a server."""
    return run("regenerate", "--endpoint", server.url, "-o", OUT, *arguments)


def contents(path: Path | str = OUT) -> list[list[str]]:
    """What the conversations of an output say."""
    return [[message["content"] for message in row["messages"]] for row in unzstd_lines(Path(path))]


def count(result, name: str) -> str | None:
    """A figure of the final table."""
    cells = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in result.stdout.splitlines()]
    return next((row[1] for row in cells if row[0] == name), None)


def names(directory: Path) -> set[str]:
    """What is in a directory."""
    return {path.name for path in directory.iterdir()}


def test_options_are_the_agreed_ones():
    """Other people's scripts call these."""
    options = {p.opts[-1]: p.default for p in main.commands["regenerate"].params if p.param_type_name == "option"}
    assert list(options) == [
        *("--endpoint", "--model", "--output", "--format", "--columns", "--temperature", "--max-tokens", "--seed"),
        *("--template-kwargs", "--api-key", "--concurrency", "--timeout", "--limit", "--max-reject-share"),
    ]
    assert options["--endpoint"] == "http://127.0.0.1:8000/v1"
    assert (options["--temperature"], options["--max-tokens"], options["--max-reject-share"]) == (0.0, 4096, 0.05)


def test_every_answer_is_the_servers_own_in_the_order_of_the_input(here):
    path = corpus(40, turns=4)
    delays = random.Random(0)

    def script(body):
        time.sleep(delays.random() / 50)
        return reply(body)

    with serving(script) as server:
        result = regenerate(server, path, "--concurrency", 8)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = unzstd_lines(here / OUT)
    assert [(row["source"], row["line"]) for row in rows] == [(str(path), line) for line in range(1, 41)]
    assert {row["finish_reason"] for row in rows} == {"stop"}
    for record, said in enumerate(contents()):
        first, second = f"record {record} turn 0", f"record {record} turn 2"
        assert said == [first, f"re 1: {first}", second, f"re 3: {second}"]
    assert 2 <= server.most <= 8 and len(server.requests) == 80
    asked = Counter(json.dumps(body["messages"]) for body in server.requests)
    assert set(asked.values()) == {1}
    assert all(body["messages"][1]["content"].startswith("re 1") for body in server.requests if len(body["messages"]) == 3)
    assert names(here) == {"corpus.jsonl", OUT}
    assert (count(result, "conversations"), count(result, "answers"), count(result, "answer tokens")) == ("40", "80", "560")


@pytest.mark.parametrize("concurrency", [1, 3, 64])
def test_never_more_requests_in_flight_than_allowed(concurrency):
    def script(body):
        time.sleep(0.01)
        return reply(body)

    with serving(script) as server:
        assert regenerate(server, corpus(100), "--concurrency", concurrency).exit_code == 0
    assert server.most <= concurrency and server.most >= min(concurrency, 8)


def test_what_a_request_holds():
    with serving() as server:
        options = ["--max-tokens", 9, "--template-kwargs", '{"enable_thinking": false}', "--api-key", "k"]
        assert regenerate(server, corpus(1), *options).exit_code == 0
    assert server.requests == [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "record 0 turn 0"}],
            "max_tokens": 9,
            "temperature": 0.0,
            "chat_template_kwargs": {"enable_thinking": False},
        }
    ]
    assert server.headers[0]["Authorization"] == "Bearer k"


def test_the_key_is_taken_from_the_environment_and_written_nowhere(here, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving(lambda body: (400, {}, {"error": "no secret"})) as server:
        result = regenerate(server, corpus(3))
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert "secret" not in result.output
    assert not any(b"secret" in path.read_bytes() for path in here.rglob("*") if path.is_file())
    assert "secret" not in str(unzstd_lines(here / f"{OUT}.rejects.jsonl.zst"))


def test_samples_are_drawn_with_seeds_of_their_own_and_the_same_again():
    path = corpus(5, turns=4)
    with serving() as server:
        for seed in (0, 0, 1):
            Path(OUT).unlink(missing_ok=True)
            assert regenerate(server, path, "--temperature", 0.7, "--seed", seed, "--concurrency", 3).exit_code == 0
    seeds = [{json.dumps(b["messages"]): b["seed"] for b in server.requests[start:][:10]} for start in (0, 10, 20)]
    assert seeds[0] == seeds[1] and len({*seeds[0].values(), *seeds[2].values()}) == 20
    assert all(0 <= seed < 2**31 for seed in seeds[0].values())


def test_faults_that_pass_are_not_seen_in_the_output():
    path, tried, lock = corpus(60), Counter(), threading.Lock()
    faults = [(429, {"Retry-After": "0"}, {}), (500, {}, {}), ConnectionResetError(), b"{", {"choices": []}]

    def script(body):
        record = int(body["messages"][0]["content"].split()[1])
        with lock:
            tried[record] += 1
            number = tried[record]
        if number <= record % 4:
            fault = faults[(number + record) % len(faults)]
            if isinstance(fault, Exception):
                raise fault
            return fault
        return reply(body)

    with serving(script) as server:
        result = regenerate(server, path, "--concurrency", 8)
    assert result.exit_code == 0, result.stderr
    assert contents() == [[f"record {n} turn 0", f"re 1: record {n} turn 0"] for n in range(60)]
    assert len(server.requests) == sum(1 + n % 4 for n in range(60))


def too_long(body: dict) -> object:
    """Refuse each tenth record."""
    if body["messages"][0]["content"].split()[1].endswith("3"):
        return 400, {}, {"error": {"message": "This model's maximum context length is 5 tokens."}}
    return reply(body)


def test_too_many_failures_write_the_rejects_and_a_rerun_asks_for_these_alone(here):
    path = corpus(40)
    with serving(too_long) as server:
        assert_user_error(regenerate(server, path), "4 of 40 records failed (4 refused by the server (400))", "0.05")
        assert len(server.requests) == 40
        assert names(here) == {"corpus.jsonl", f"{OUT}.partial", f"{OUT}.rejects.jsonl.zst"}
        rejects = unzstd_lines(here / f"{OUT}.rejects.jsonl.zst")
        assert [row["line"] for row in rejects] == [4, 14, 24, 34]
        assert rejects[0]["source"] == str(path) and "maximum context length" in rejects[0]["reason"]
        assert rejects[0]["excerpt"].startswith('{"messages"')
        server.requests.clear()
        server.script = reply
        assert regenerate(server, path).exit_code == 0
        assert {body["messages"][0]["content"].split()[1] for body in server.requests} == {"3", "13", "23", "33"}
        assert len(server.requests) == 4
    assert names(here) == {"corpus.jsonl", OUT}
    assert contents() == [[f"record {n} turn 0", f"re 1: record {n} turn 0"] for n in range(40)]


def test_an_output_in_a_directory_of_the_corpus_is_no_input_of_the_next_try(here):
    (here / "data").mkdir()
    corpus(40).rename("data/corpus.jsonl")
    arguments = ["regenerate", "data", "-o", f"data/{OUT}", "--endpoint"]
    with serving(too_long) as server:
        assert_user_error(run(*arguments, server.url), "4 of 40 records failed")
        assert_user_error(run(*arguments, server.url), "4 of 40 records failed")
        server.script = reply
        assert run(*arguments, server.url).exit_code == 0
    assert len(contents(f"data/{OUT}")) == 40


def test_few_failures_are_counted_and_listed(here):
    with serving(too_long) as server:
        result = regenerate(server, corpus(40), "--max-reject-share", "0.1")
    assert result.exit_code == 0
    assert count(result, "failed: refused by the server (400)") == "4"
    assert count(result, "conversations") == "36" and len(contents()) == 36
    assert names(here) == {"corpus.jsonl", OUT, f"{OUT}.rejects.jsonl.zst"}


def test_records_that_say_nothing_are_failures_with_their_reason(here):
    lines = [*jsonl([chat("a", "b")] * 3).splitlines(), b"{", b'{"messages": []}', b'{"text": "x"}']
    lines += [
        b'{"messages": [{"role": "system", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ]
    Path("c.jsonl").write_bytes(b"\n".join(lines))
    with serving() as server:
        result = regenerate(server, "c.jsonl", "--max-reject-share", 1)
        assert len(server.requests) == 3
    assert result.exit_code == 0
    reasons = [row["reason"] for row in unzstd_lines(here / f"{OUT}.rejects.jsonl.zst")]
    assert reasons[0] == "not JSON" and reasons[3:] == ["no question to answer", "text with a lone surrogate"]
    assert len(reasons) == 5


def test_plain_text_and_tokens_are_no_conversations(here):
    Path("c.jsonl").write_bytes(b'{"text": "x"}\n' * 3)
    Path("d.jsonl").write_bytes(b'{"input_ids": [1], "loss_mask": [1]}\n' * 2)
    with serving() as server:
        assert_user_error(regenerate(server, "c.jsonl", "d.jsonl"), "5 no conversation", "nothing was kept")
    assert not server.requests


def test_formats_and_columns_as_tokenize_takes_them(here):
    Path("a.jsonl").write_text('{"conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": "x"}]}\n')
    Path("b.json.gz").write_bytes(gzip.compress(b'[{"instruction": "2", "input": "and", "output": "x"}]'))
    pq.write_table(pa.table({"question": ["3"], "response": ["x"], "system": ["s"]}), "c.parquet")
    Path("notes.txt").write_text("no corpus")
    with serving() as server:
        result = regenerate(server, ".", "--columns", "prompt=question")
    assert result.exit_code == 0, result.stderr
    assert contents() == [["1", "re 1: 1"], ["2\n\nand", "re 1: 2\n\nand"], ["s", "3", "re 2: 3"]]
    assert count(result, "files of format: sharegpt") == "1"
    assert count(result, "other files, passed over") == "1"


def test_standard_input_and_the_format_given(here):
    with serving() as server:
        command = [*command_line(server), "-", "--format", "prompt"]
        data = b'{"prompt": "1", "response": "x"}\n'
        assert subprocess.run(command, input=data, capture_output=True).returncode == 0
    assert contents() == [["1", "re 1: 1"]]


def test_the_limit_ends_the_reading():
    with serving() as server:
        result = regenerate(server, corpus(40), "--limit", 7)
    assert len(server.requests) == len(contents()) == 7
    assert count(result, "stopped at --limit") == "7"


def test_tools_calls_and_reasoning_reach_the_output(here, tiny_directory):
    tools = [{"name": "f", "parameters": {}}]
    record = {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "x"}], "tools": tools}
    Path("c.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(record) + "\n")
    call = {"id": "i", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]}
    with serving(lambda body: completion(said, "tool_calls")) as server:
        result = regenerate(server, "c.jsonl")
    assert result.exit_code == 0 and count(result, "answers that call a tool") == "2"
    wrapped = [{"type": "function", "function": tools[0]}]
    assert server.requests[0]["tools"] == wrapped
    row = unzstd_lines(here / OUT)[0]
    assert row["messages"][1] == {key: value for key, value in said.items() if value is not None}
    assert (row["tools"], row["finish_reason"]) == (wrapped, "tool_calls")


def test_cut_answers_are_kept_and_counted(here):
    with serving(lambda body: completion(reply(body)["choices"][0]["message"], "length")) as server:
        result = regenerate(server, corpus(3, turns=4))
    assert result.exit_code == 0
    assert count(result, "answers cut at --max-tokens") == "3"
    assert {row["finish_reason"] for row in unzstd_lines(here / OUT)} == {"length"}
    assert [len(said) for said in contents()] == [2, 2, 2]


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_the_output_is_what_tokenize_takes(here, tiny_directory, ending):
    out = here / "deep" / "er" / f"out.jsonl{ending}"
    with serving() as server:
        assert run("regenerate", corpus(12, turns=4), "--endpoint", server.url, "-o", out).exit_code == 0
    result = run("tokenize", out, "--tokenizer", tiny_directory, "-o", "store")
    assert result.exit_code == 0, result.stderr
    assert len(Store(here / "store")) == 12
    assert names(out.parent) == {out.name}


def test_a_finished_output_is_never_touched(here):
    Path(OUT).write_text("precious")
    with serving() as server:
        assert_user_error(regenerate(server, corpus(3)), f"{OUT}: is there already")
        assert not server.requests
    assert Path(OUT).read_text() == "precious" and names(here) == {"corpus.jsonl", OUT}


def test_what_a_kill_at_the_very_end_leaves_is_removed_and_nothing_is_asked_again(here):
    """After the journal is known to be finished, killed at each of its last removals."""
    path = corpus(20)
    code = (
        "import os, sys; from dflash_prep import journal; from dflash_prep.cli import main; left = int(sys.argv.pop(1))\n"
        "def hook(event, arguments):\n"
        "    global left\n"
        "    if event in ('os.remove', 'os.rmdir') and '.partial' in repr(arguments):\n"
        "        left -= 1\n"
        "        if left < 0: os._exit(9)\n"
        "sys.addaudithook(hook); main()"
    )
    with serving(too_long) as server:
        command = ["regenerate", path, "--endpoint", server.url, "-o", OUT, "--max-reject-share", 1]
        for removals in itertools.count():
            killed = subprocess.run([sys.executable, "-c", code, *map(str, [removals, *command])], stdout=subprocess.DEVNULL)
            whole = Path(OUT).read_bytes()
            if killed.returncode == 0:
                break
            server.requests.clear()
            draft = Path(f"{OUT}.partial/output").exists()
            result = run(*command)
            assert not server.requests and Path(OUT).read_bytes() == whole
            if draft:  # it can be told whose the output is
                assert result.exit_code == 0 and "is there already: the same command had finished it" in result.stdout
                assert names(here) == {"corpus.jsonl", OUT, f"{OUT}.rejects.jsonl.zst"}
            else:
                assert_user_error(result, "is there already")
            Path(OUT).unlink()
            if Path(f"{OUT}.partial").exists():  # what is left of it hinders nobody
                shutil.rmtree(f"{OUT}.partial")
            Path(f"{OUT}.rejects.jsonl.zst").unlink()
    assert removals >= 5


def test_what_another_command_left_at_its_very_end_is_not_taken_for_this_ones(here, monkeypatch):
    path = corpus(3)
    with serving() as server:
        monkeypatch.setattr(Journal, "remove", lambda journal: None)
        assert regenerate(server, path).exit_code == 0
        monkeypatch.undo()
        monkeypatch.chdir(here)
        whole = Path(OUT).read_bytes()
        assert_user_error(regenerate(server, path, "--seed", 1), "finished with other options")
    assert Path(OUT).read_bytes() == whole


def test_a_journal_that_another_process_takes_as_it_is_removed_is_left_alone(here, monkeypatch):
    """A second run begins in the directory between the first's last removals."""
    path, rmdir = corpus(3), os.rmdir

    def begun(place, **options):
        if str(place).endswith(".partial"):
            monkeypatch.setattr(os, "rmdir", rmdir)
            (Path(place) / ".lock").touch()
        return rmdir(place, **options)

    with serving() as server:
        monkeypatch.setattr(os, "rmdir", begun)
        assert regenerate(server, path).exit_code == 0
    assert len(contents()) == 3 and names(here / f"{OUT}.partial") == {".lock"}


def test_a_list_of_rejects_that_is_not_this_runs_is_never_touched(here):
    path, rejects = corpus(40), here / f"{OUT}.rejects.jsonl.zst"
    rejects.write_text("precious")
    with serving(too_long) as server:
        for script in (too_long, reply):
            server.script = script
            assert_user_error(regenerate(server, path), f"{rejects}: is there already and not this run's", "-o")
        assert not server.requests and names(here) == {path.name, rejects.name}

        def meanwhile(body):
            rejects.write_text("precious")
            return too_long(body)

        rejects.unlink()
        server.script = meanwhile
        assert_user_error(regenerate(server, path), f"{rejects}: is there already and not this run's")
        assert rejects.read_text() == "precious"
        rejects.unlink()
        server.script = too_long
        assert_user_error(regenerate(server, path), "4 of 40 records failed")
        assert_user_error(regenerate(server, path), "4 of 40 records failed")  # its own list gives way


PLACES = {
    "the root": "/",
    "a directory": ".",
    "Parquet": "out.parquet",
    "an array": "out.json",
    "a packed array": "out.json.gz",
    "no ending": "out",
    "a name too long": "x" * 240 + ".jsonl",
    "rejects that are a directory": "blocked.jsonl",
}


@pytest.mark.parametrize("name", PLACES)
def test_an_output_that_cannot_be_is_refused_before_anything_is_asked(here, name):
    path = corpus(3)
    Path("blocked.jsonl.rejects.jsonl.zst").mkdir()
    with serving() as server:
        assert_user_error(run("regenerate", path, "--endpoint", server.url, "-o", PLACES[name]), "-o")
        assert not server.requests
    assert names(here) == {"corpus.jsonl", "blocked.jsonl.rejects.jsonl.zst"}


@pytest.mark.parametrize("ending", [".jsonl.ZST", ".JSONL.GZ", ".Jsonl"])
def test_endings_of_any_case(here, tiny_directory, ending):
    with serving() as server:
        assert run("regenerate", corpus(3), "--endpoint", server.url, "-o", f"out{ending}").exit_code == 0
    start = Path(f"out{ending}").read_bytes()[:2]
    assert start == {".zst": b"\x28\xb5", ".gz": b"\x1f\x8b"}.get(Path(ending).suffix.lower(), b'{"')
    assert run("tokenize", f"out{ending}", "--tokenizer", tiny_directory, "-o", "store").exit_code == 0


def test_a_disk_that_is_full_at_the_start_is_one_line(here, monkeypatch):
    def full(path, value):
        raise OSError(28, "No space left on device")

    with serving() as server:
        monkeypatch.setattr("dflash_prep.journal.write_json", full)
        assert_user_error(regenerate(server, corpus(3)), f"{OUT}.partial: cannot write: No space left on device; make room")
        assert not server.requests


def test_an_output_that_appears_meanwhile_is_not_overwritten(here):
    path = corpus(3)

    def script(body):
        Path(here / OUT).write_text("precious")
        return reply(body)

    with serving(script) as server:
        assert_user_error(regenerate(server, path), "appeared meanwhile")
        assert Path(OUT).read_text() == "precious"
        Path(OUT).unlink()
        server.requests.clear()
        assert regenerate(server, path).exit_code == 0
        assert not server.requests
    assert len(contents()) == 3


def test_no_server_is_one_line_and_nothing_is_written(here):
    with serving() as server:
        url = server.url
    assert_user_error(run("regenerate", corpus(3), "--endpoint", url, "-o", OUT), url, "no server answers here")
    assert names(here) == {"corpus.jsonl"}


FAULTS = {
    "another model": (["--model", "other"], f"does not serve other; it serves {MODEL}"),
    "no corpus": (["gone.jsonl"], "gone.jsonl: no such file"),
    "an empty corpus": (["empty.jsonl"], "no records"),
    "a bad key": (["--api-key", "é"], "API key"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_before_the_start_is_one_line_and_writes_nothing(here, name):
    arguments, words = FAULTS[name]
    corpus(3)
    Path("empty.jsonl").write_bytes(b"\n")
    inputs = [] if arguments[0].endswith(".jsonl") else ["corpus.jsonl"]
    with serving() as server:
        assert_user_error(regenerate(server, *inputs, *arguments), words)
        assert not server.requests
    assert names(here) == {"corpus.jsonl", "empty.jsonl"}


@pytest.mark.parametrize("served", [[], ["a", "b"]])
def test_without_a_name_the_model_must_be_the_only_one(served):
    with serving(models={"data": [{"id": name} for name in served]}) as server:
        assert_user_error(regenerate(server, corpus(1)), f"serves {len(served)} models", "--model")
        assert regenerate(server, corpus(1), *(["--model", "b"] if served else [])).exit_code == (0 if served else 1)


def test_a_server_that_dies_ends_the_run_and_what_is_finished_is_kept(here):
    path = corpus(200)
    answered = itertools.count()

    def script(body):
        if next(answered) >= 50:
            raise ConnectionResetError
        return reply(body)

    with serving(script) as server:
        result = regenerate(server, path, "--concurrency", 2)
        assert_user_error(result, "16 records in a row got no answer", "50 of 200", f"{OUT}.partial", "run the same again")
        assert names(here) == {"corpus.jsonl", f"{OUT}.partial"}
        server.script = reply
        server.requests.clear()
        assert regenerate(server, path, "--concurrency", 5).exit_code == 0
        assert 150 <= len(server.requests) <= 151  # the stopped run's other request may come after it
    assert contents() == [[f"record {n} turn 0", f"re 1: record {n} turn 0"] for n in range(200)]


def test_another_runs_journal_is_refused(here):
    path = corpus(40)
    with serving(too_long) as server:
        assert regenerate(server, path).exit_code == 1
        for arguments in (["--temperature", 0.5], ["--max-tokens", 5], ["--limit", 39], ["--seed", 1]):
            result = regenerate(server, path, *arguments)
            assert_user_error(result, "finished with other options", "remove it to begin anew", "-o")
        server.models["data"].append({"id": "other"})
        assert_user_error(regenerate(server, path, "--model", "other"), "finished with other model")
        path.write_bytes(path.read_bytes() + b"\n" + jsonl([chat("new", "x")]))
        assert_user_error(regenerate(server, path, "--model", MODEL), "finished with other inputs")


def command_line(server) -> list[str]:
    """The command as a process of its own."""
    code = "import sys; from dflash_prep.cli import main; sys.argv[0] = 'dflash-prep'; main()"
    return [sys.executable, "-c", code, "regenerate", "--endpoint", server.url, "-o", OUT]


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_moment_it_ends_with_the_same_bytes(here, seed):
    path, moments = corpus(300, turns=4), random.Random(seed)

    def script(body):
        time.sleep(0.004)
        return reply(body)

    with serving(script) as server:
        command = [*command_line(server), str(path), "--concurrency", str(4 + seed)]
        kills, before = 0, 0
        while True:
            process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
            more = moments.randrange(1, 250)
            while process.poll() is None and len(server.requests) < before + more:
                time.sleep(0.001)
            process.send_signal(signal.SIGKILL)
            _, errors = process.communicate()
            before = len(server.requests)
            if process.returncode != -signal.SIGKILL:
                assert process.returncode == 0, errors
                break
            kills += 1
            if Path(OUT).exists():  # killed after all was done
                assert "is there already" in regenerate(server, path).output
                break
            if (journal := here / f"{OUT}.partial" / "journal").exists():
                with journal.open("ab") as file:  # a line that the kill left torn
                    file.write(b'deadbeef [3,true,{"answ'[: moments.randrange(20)])
        interrupted, requests = Path(OUT).read_bytes(), len(server.requests)
        assert requests <= 600 + kills * 2 * (4 + seed)
        assert regenerate(server, path, "-o", "whole.jsonl.zst").exit_code == 0
    assert Path("whole.jsonl.zst").read_bytes() == interrupted
    assert names(here) == {"corpus.jsonl", OUT, "whole.jsonl.zst"}


def test_an_interrupted_run_does_not_wait_for_answers(here):
    def script(body):
        time.sleep(5)
        return reply(body)

    with serving(script) as server:
        process = subprocess.Popen([*command_line(server), str(corpus(3))], stderr=subprocess.PIPE)
        while not server.requests and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        _, errors = process.communicate()
    assert time.monotonic() - start < 3
    assert process.returncode == 1 and errors.count(b"\n") == 1
    assert b"interrupted; the 0 of 3 records that are finished are kept in" in errors


def test_a_second_process_refuses(here):
    path, free = corpus(20), threading.Event()

    def script(body):
        free.wait(20)
        return reply(body)

    with serving(script) as server:
        process = subprocess.Popen([*command_line(server), str(path)], stderr=subprocess.PIPE, stdout=subprocess.PIPE)
        while not server.requests and process.poll() is None:
            time.sleep(0.01)
        assert_user_error(regenerate(server, path), "another process is writing here")
        free.set()
        assert process.wait() == 0
        assert_user_error(regenerate(server, path), "is there already")
    assert len(contents()) == 20


def test_a_full_disk_is_one_line_and_the_run_can_go_on(here, monkeypatch):
    path = corpus(20)
    write, room = Path.open, [1500]

    class Full(io.FileIO):
        """A file on a disk with little room."""

        def write(self, data):
            if room[0] <= 0:
                raise OSError(28, "No space left on device")
            room[0] -= len(data)
            return super().write(data[: max(1, len(data) + min(room[0], 0))])

    def limited(self, mode="r", *arguments, **options):
        if self.name == "journal" and "a" in mode:
            return Full(self, "a+")
        return write(self, mode, *arguments, **options)

    with serving() as server:
        monkeypatch.setattr(Path, "open", limited)
        assert_user_error(regenerate(server, path, "--concurrency", 1), "cannot write: No space left on device; make room")
        monkeypatch.setattr(Path, "open", write)
        finished = len(server.requests) - 1
        server.requests.clear()
        assert regenerate(server, path).exit_code == 0
        assert 0 < len(server.requests) == 20 - finished < 20
    assert len(contents()) == 20


def test_a_disk_that_is_full_at_the_very_end_is_one_line_and_nothing_is_asked_again(here, monkeypatch):
    path = corpus(20)

    def full(**options):
        raise OSError(28, "No space left on device")

    with serving() as server:
        monkeypatch.setattr("dflash_prep.outcome.zstandard.ZstdCompressor", full)
        assert_user_error(
            regenerate(server, path), "cannot write: No space left on device; make room and run the same again"
        )
        monkeypatch.undo()
        monkeypatch.chdir(here)
        assert names(here) == {"corpus.jsonl", f"{OUT}.partial"}
        assert regenerate(server, path).exit_code == 0
    assert len(server.requests) == len(contents()) == 20


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no peak of memory to read")
def test_memory_does_not_grow_with_the_corpus(here):
    """Peak memory of 400 and of 4,000 records of 20 kB, four in flight."""
    peaks = []
    code = (
        "import sys; from dflash_prep.cli import main; sys.argv[0] = 'dflash-prep'\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        "print('peak', next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
    )
    with serving() as server:
        for records in (400, 4000):
            Path("c.jsonl").write_bytes(jsonl([chat(f"{n} " + "é" * 10_000, "x") for n in range(records)]))
            Path(OUT).unlink(missing_ok=True)
            arguments = ["regenerate", "c.jsonl", "--endpoint", server.url, "-o", OUT, "--concurrency", "4"]
            result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
            server.requests.clear()
            peaks.append(int(result.stdout.split()[-1]))
    assert all(later - earlier < 20_000 for earlier, later in itertools.pairwise(peaks)), peaks
