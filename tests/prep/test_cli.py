"""The command line: help with defaults, the whole way from corpus to proof, and one line for each fault of the input."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from click.testing import CliRunner

from dflash_prep.cli import STORE, main
from dflash_prep.command_line import FiniteRange, one_line_errors
from tests.prep.chat_server import serving
from tests.prep.support import assert_user_error, chat, jsonl, make_store, make_tokenizer, run

COMMANDS = sorted(main.commands)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty directory to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def corpus(here) -> Path:
    """A corpus of twelve conversations in it."""
    path = here / "corpus.jsonl"
    path.write_bytes(jsonl([chat("What is it?", "An answer. " * (1 + number)) for number in range(12)]))
    return path


def in_a_process(*arguments: object) -> subprocess.CompletedProcess:
    """Run `dflash-prep` as a user does."""
    code = "import sys; from dflash_prep.cli import main; sys.argv[0] = 'dflash-prep'; main()"
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)


def test_the_installed_script_answers():
    script = Path(sys.executable).with_name("dflash-prep")
    if not script.exists():
        pytest.skip("the project's scripts are not installed")
    result = subprocess.run([script, "--help"], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    for command in ("tokenize", "plan-epochs", "verify"):
        assert command in result.stdout
    assert subprocess.run([script, "--version"], capture_output=True, text=True).returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_shows_every_option_with_its_default(command, flag):
    result = run(command, flag)
    assert result.exit_code == 0
    entries = re.split(r"^  (?=-)", result.stdout.split("Options:")[1], flags=re.MULTILINE)[1:-1]  # the last is --help
    options = [option for option in main.commands[command].params if option.param_type_name == "option"]
    assert len(entries) == len(options)
    for option, entry in zip(options, entries, strict=True):
        assert option.opts[-1] in entry
        assert re.search(r"\[default:\s", entry), entry


def test_options_are_the_agreed_ones():
    """Other people's scripts call these."""
    found = {
        name: [p.opts[-1] for p in command.params if p.param_type_name == "option"]
        for name, command in main.commands.items()
    }
    assert found["tokenize"] == [
        *(
            "--tokenizer",
            "--output",
            "--chat-template",
            "--template-kwargs",
            "--format",
            "--columns",
            "--loss",
            "--max-length",
            "--min-loss-tokens",
        ),
        *("--too-long", "--special-text", "--keep-duplicates", "--near-dedup", "--limit"),
        *("--shuffle-input", "--max-reject-share", "--workers"),
    ]
    assert found["verify"] == ["--data"]
    assert found["inspect"] == [
        *("--sample", "--key", "--find", "--random", "--seed", "--tokens", "--tokenizer", "--step", "--epoch", "--data"),
    ]
    assert found["plan-epochs"] == [
        *("--data", "--lengths", "--output", "--epochs", "--strategy", "--bucket-scope", "--buckets", "--boundaries"),
        *("--fixed-shapes", "--align", "--token-budget", "--anchor-density", "--max-anchors", "--block-size"),
        *("--anchor-budget", "--slots", "--seed", "--weight", "--holdout", "--cost", "--dry-run", "--compare"),
    ]
    defaults = {p.opts[-1]: p.default for p in main.commands["plan-epochs"].params}
    assert str(STORE) == "data/tokens"
    assert str(defaults["--output"]) == "data/manifests"
    assert (defaults["--epochs"], defaults["--strategy"], defaults["--bucket-scope"]) == (6, "bucketed", "epoch")
    assert (defaults["--anchor-density"], defaults["--max-anchors"], defaults["--block-size"]) == (0.25, 512, 16)
    assert (defaults["--slots"], defaults["--seed"], defaults["--token-budget"]) == (8, 0, "auto")
    limits = {p.opts[-1]: p.default for p in main.commands["tokenize"].params if p.param_type_name == "option"}
    assert (limits["--max-length"], limits["--max-reject-share"]) == (8192, 0.05)


def test_from_corpus_to_proof_with_default_places(corpus, tiny_directory):
    result = run("tokenize", corpus, "--tokenizer", tiny_directory)
    assert (result.exit_code, result.stderr) == (0, "")
    assert re.search(r"samples\D+12\b", result.stdout)
    result = run("plan-epochs", "--epochs", "2", "--slots", "2")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "token budget" in result.stdout
    result = run("verify")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith("data/manifests holds\n")


@pytest.mark.parametrize("strategy", ["bucketed", "packed", "shuffled", "sorted"])
def test_a_single_sample_can_be_planned(here, strategy):
    make_store(here / "store", [2])
    assert run("plan-epochs", "--data", "store", "-o", "plan", "--strategy", strategy).exit_code == 0
    assert run("verify", "plan").exit_code == 0


def test_the_shipped_sample_is_the_default_input(here):
    assert_user_error(run("tokenize", "--tokenizer", make_tokenizer(here / "t")), "data/demo.jsonl.zst", "no such file")


INPUTS = {
    "gone.jsonl": (None, "gone.jsonl"),
    "empty.jsonl": (b"", "no records"),
    "blank.jsonl": (b"\n \r\n\n", "no records"),
    "empty.jsonl.gz": (b"", "no records"),
    "empty.jsonl.zst": (b"", "no records"),
    "bad.jsonl": (b"{\n", "1 of 1 records rejected (1 not JSON)"),
    "cut.jsonl.gz": (gzip.compress(jsonl([chat("a", "b")] * 50))[:20], "damaged or truncated"),
    "cut.jsonl.zst": (zstandard.compress(jsonl([chat("a", "b")] * 50))[:20], "damaged or truncated"),
    "text.jsonl.gz": (b"text", "damaged or truncated"),
    "text.jsonl.zst": (b"text", "damaged or truncated"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_a_faulty_corpus_is_one_line_and_leaves_no_store(here, tiny_directory, name):
    data, words = INPUTS[name]
    if data is not None:
        (here / name).write_bytes(data)
    assert_user_error(run("tokenize", name, "--tokenizer", tiny_directory, "-o", "out/store"), words)
    assert {path.name for path in here.glob("out/*")} <= {"store.rejects.jsonl.zst"}


def test_a_directory_without_a_corpus(here, tiny_directory):
    (here / "folder").mkdir()
    (here / "folder" / "notes.txt").write_text("no corpus")
    assert_user_error(
        run("tokenize", "folder", "--tokenizer", tiny_directory), "folder: is a directory with no corpus among its 1"
    )


def test_rejects_beside_are_named_and_hold_every_reject(corpus, tiny_directory):
    corpus.write_bytes(corpus.read_bytes() + b"x\ny\n")
    result = run("tokenize", corpus, "--tokenizer", tiny_directory, "-o", "store", "--max-reject-share", "0.1")
    assert_user_error(result, "2 of 14 records rejected (2 not JSON)", "store.rejects.jsonl.zst")
    assert sorted(path.name for path in corpus.parent.iterdir()) == ["corpus.jsonl", "store.rejects.jsonl.zst"]
    result = run("tokenize", corpus, "--tokenizer", tiny_directory, "-o", "store", "--max-reject-share", "0.2")
    assert result.exit_code == 0
    assert re.search(r"rejected: not JSON\D+2\b", result.stdout)


FAULTS = {
    "tokenizer gone": (["tokenize", "corpus.jsonl", "--tokenizer", "nowhere"], "no such directory"),
    "tokenizer without files": (["tokenize", "corpus.jsonl", "--tokenizer", "folder"], "no tokenizer.json"),
    "no template": (["tokenize", "corpus.jsonl", "--tokenizer", "untemplated"], "no chat template"),
    "output is a file": (["tokenize", "corpus.jsonl", "--tokenizer", "tiny", "-o", "corpus.jsonl"], "corpus.jsonl"),
    "output below a file": (["tokenize", "corpus.jsonl", "--tokenizer", "tiny", "-o", "corpus.jsonl/a"], "cannot create"),
    "output is a plan": (["tokenize", "corpus.jsonl", "--tokenizer", "tiny", "-o", "plan"], "is there already"),
    "output name too long": (["tokenize", "corpus.jsonl", "--tokenizer", "tiny", "-o", "x" * 300], "name too long"),
    "corpus name too long": (["tokenize", "x" * 300, "--tokenizer", "tiny"], "name too long"),
    "plan name too long": (["verify", "x" * 300], "name too long"),
    "other inputs": (["tokenize", "corpus.jsonl", "--tokenizer", "tiny", "-o", "store"], "other inputs or options"),
    "too short": (["tokenize", "corpus.jsonl", "--tokenizer", "tiny", "--max-length", "2"], "longer than --max-length"),
    "no store": (["plan-epochs"], "data/tokens: no token store here"),
    "store is a file": (["plan-epochs", "--data", "corpus.jsonl"], "no token store here"),
    "plan on a folder": (["plan-epochs", "--data", "store", "-o", "store"], "store"),
    "plan on a file": (["plan-epochs", "--data", "store", "-o", "corpus.jsonl"], "corpus.jsonl"),
    "plan below a file": (["plan-epochs", "--data", "store", "-o", "corpus.jsonl/a"], "cannot create"),
    "budget below the longest": (["plan-epochs", "--data", "store", "--token-budget", "19"], "20 tokens, the budget is 19"),
    "stores and lengths": (["plan-epochs", "--data", "store", "--lengths", "lengths.parquet"], "both given"),
    "lengths gone": (["plan-epochs", "--lengths", "nowhere.parquet"], "no such file"),
    "lengths that are none": (["plan-epochs", "--lengths", "corpus.jsonl"], "cannot be read as Parquet"),
    "cost gone": (["plan-epochs", "--data", "store", "--cost", "nowhere.json"], "nowhere.json"),
    "cost that is none": (["plan-epochs", "--data", "store", "--cost", "corpus.jsonl"], "corpus.jsonl"),
    "weight of no source": (["plan-epochs", "--data", "store", "--weight", "web=2"], "names no source; there are made"),
    "weight twice": (["plan-epochs", "--data", "store", "--weight", "made=2", "--weight", "made=3"], "given twice"),
    "nothing to train on": (["plan-epochs", "--data", "store", "--weight", "made=0"], "no sample is left"),
    "nothing held out": (["plan-epochs", "--data", "store", "--holdout", "1e-9"], "holds none"),
    "one store too few": (["verify", "plan", "--data", "store", "--data", "other"], "plan"),
    "corpus is a directory": (["tokenize", "folder", "--tokenizer", "tiny"], "folder: is a directory"),
    "corpus is a FIFO": (["tokenize", "fifo", "--tokenizer", "tiny"], "fifo: is not a regular file"),
    "corpus name no UTF-8": (["tokenize", "a\udcff", "--tokenizer", "tiny"], "'a\\udcff': this name is not UTF-8"),
    "output name no UTF-8": (["plan-epochs", "--data", "store", "-o", "a\udcff"], "'a\\udcff': this name is not UTF-8"),
    "nothing kept": (
        ["tokenize", "corpus.jsonl", "--tokenizer", "tiny", "--max-length", "2", "--max-reject-share", "1"],
        "nothing was kept",
    ),
    "bounds too low": (["plan-epochs", "--data", "store", "--boundaries", "10,19"], "longest sample has 20"),
    "anchor budget": (["plan-epochs", "--data", "store", "--anchor-budget", "1"], "--anchor-budget"),
    "step scope with buckets": (["plan-epochs", "--data", "store", "--bucket-scope", "step", "--buckets", "3"], "leave"),
    "no plan": (["verify"], "data/manifests: no plan here"),
    "plan is a store": (["verify", "store"], "no plan here"),
    "another store": (["verify", "plan", "--data", "other"], "not the store that"),
    "store gone": (["verify", "plan", "--data", "nowhere"], "no token store here"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_of_the_user_is_one_line(corpus, here, name):
    arguments, words = FAULTS[name]
    make_tokenizer(here / "tiny")
    make_tokenizer(here / "untemplated", template=None)
    (here / "folder").mkdir()
    os.mkfifo(here / "fifo")
    make_store(here / "store", [20, 5, 9])
    make_store(here / "other", [20, 5, 8])
    assert run("plan-epochs", "--data", "store", "-o", "plan").exit_code == 0
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert_user_error(run(*arguments), words)
    after = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert after.items() >= before.items()
    assert {path.name for path in after.keys() - before.keys()} <= {"tokens.rejects.jsonl.zst"}
    assert not list(here.rglob("*.partial"))


@pytest.mark.parametrize("command", ["tokenize", "plan-epochs"])
def test_an_empty_directory_is_a_place_to_write_to(corpus, here, tiny_directory, command):
    make_store(here / "store", [20, 5, 9])
    (here / "out").mkdir()
    arguments = {"tokenize": [corpus, "--tokenizer", tiny_directory], "plan-epochs": ["--data", "store"]}[command]
    assert run(command, *arguments, "-o", "out").exit_code == 0
    assert list((here / "out").iterdir())


def test_a_fault_in_a_process_is_one_line_and_exit_code_1(corpus, tiny_directory):
    corpus.write_bytes(corpus.read_bytes() + b"x\n")
    result = in_a_process("tokenize", corpus, "--tokenizer", tiny_directory, "--max-reject-share", "0")
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(r"error: 1 of 13 records rejected [^\n]*\n", result.stderr)


NUMBERS = ("--buckets", "--token-budget", "--max-anchors", "--anchor-budget")


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["tokenize", "--nonsense"],
        ["tokenize", "--max-length", "1"],
        ["tokenize", "--max-length", "many"],
        ["tokenize", "--max-reject-share", "1.5"],
        ["plan-epochs", "--epochs", "0"],
        ["plan-epochs", "--strategy", "best"],
        ["plan-epochs", "--bucket-scope", "all"],
        ["plan-epochs", "--anchor-density", "0"],
        ["plan-epochs", "--slots", "0"],
        ["plan-epochs", "--slots", "65536"],
        ["plan-epochs", "--seed", "-1"],
        ["plan-epochs", "--seed", str(2**63)],
        ["plan-epochs", "--block-size", "1025"],
        ["plan-epochs", "--anchor-density", "nan"],
        ["tokenize", "--max-reject-share", "nan"],
        *(
            ["plan-epochs", option, value]
            for option in NUMBERS
            for value in ("0", "-5", "1.5", "many", str(2**31 + 1), "nan")
        ),
        *(["plan-epochs", "--boundaries", value] for value in ("", "5,x", "5,5", "9,5", "5,,9", str(2**31 + 1))),
        *(
            ["plan-epochs", "--weight", value]
            for value in ("", "made", "=2", "made=", "made=x", "made=-1", "made=nan", "made=1001")
        ),
        *(["plan-epochs", "--align", value] for value in ("0", "-1", "4097", "x")),
        *(["plan-epochs", "--holdout", value] for value in ("-0.1", "0.91", "nan", "x")),
        ["plan-epochs", "surplus"],
        ["verify", "a", "b"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(here, arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert not list(here.iterdir())


def test_a_message_of_several_lines_becomes_one(here):
    (here / "plan").mkdir()
    (here / "plan" / "plan.json").write_text(json.dumps({"format": "dflash-plan", "version": "1\n2"}))
    assert_user_error(run("verify", "plan"), "not a plan of format version")
    (here / "a\nb").mkdir()
    assert_user_error(run("verify", "a\nb"), "a b: no plan here")


def test_right_spellings_reach_the_plan(here):
    make_store(here / "store", [20, 5, 9])
    given = ("--boundaries", "5, 9,25", "--token-budget", 100, "--seed", 2**63 - 1, "--anchor-budget", 2**31)
    assert run("plan-epochs", "--data", "store", "-o", "plan", *given).exit_code == 0
    stated = json.loads((here / "plan" / "plan.json").read_text())
    found = [stated[name] for name in ("boundaries", "token_budget", "seed", "anchor_budget")]
    assert found == [[5, 9, 25], 100, 2**63 - 1, 2**31]
    assert run("plan-epochs", "--data", "store", "-o", "plan", "--buckets", "2", "--token-budget", "auto").exit_code == 0
    assert len(json.loads((here / "plan" / "plan.json").read_text())["boundaries"]) == 2


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (OSError(28, "No space left on device"), "error: No space left on device\n"),
        (OSError("odd"), "error: odd\n"),
        (PermissionError(13, "Permission denied", "x"), "error: x: Permission denied; check the path and its permissions\n"),
    ],
)
def test_any_fault_of_the_system_is_one_line(fault, line):
    @one_line_errors
    def command():
        raise fault

    result = CliRunner().invoke(click.command()(command))
    assert (result.exit_code, result.stderr) == (1, line)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_a_finite_range_refuses_what_is_none(value):
    with pytest.raises(click.BadParameter):
        FiniteRange(min=0).convert(value, None, None)
    assert FiniteRange(min=0).convert("2.5", None, None) == 2.5


def test_rejects_that_cannot_be_put_beside_are_named(corpus, here, tiny_directory):
    (here / "store.rejects.jsonl.zst").mkdir()
    result = run("tokenize", corpus, "--tokenizer", tiny_directory, "-o", "store", "--max-length", "2")
    assert_user_error(result, "store.rejects.jsonl.zst: cannot write")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a place where nothing can be made")
def test_a_store_where_nothing_can_be_made_is_refused_at_once(corpus, tiny_directory):
    assert_user_error(run("tokenize", corpus, "--tokenizer", tiny_directory, "-o", "/proc/x"), "/proc/x", "cannot create")


@pytest.mark.parametrize("words", [("--template-kwargs", '{"x": ["\\ud800"]}'), ("--columns", "messages=\udcff")])
def test_names_inside_of_options_are_utf8_too(corpus, tiny_directory, words):
    assert_user_error(run("tokenize", corpus, "--tokenizer", tiny_directory, *words), "not UTF-8")


def test_advice_on_damaged_output_is_not_the_same_command_again(corpus, here, tiny_directory):
    make_store(here / "store", [20, 5, 9])
    make_store(here / "sound", [20, 5, 9])
    assert run("plan-epochs", "--data", "store", "-o", "plan").exit_code == 0
    for manifest, again in (("store/store.json", "tokenize"), ("plan/plan.json", "plan-epochs")):
        for text in ("{", "[]", "{}", (here / manifest).read_text().replace('"fingerprint"', '"f"')):
            (here / manifest).write_text(text)
            source = [corpus, "--tokenizer", tiny_directory] if again == "tokenize" else ["--data", "sound"]
            assert_user_error(run(again, *source, "-o", Path(manifest).parent), "remove it and")


def lengths_file(path: Path, lengths: list[int]) -> Path:
    """A Parquet file of lengths alone."""
    pq.write_table(pa.table({"length": lengths}), path)
    return path


def test_lengths_are_planned_proven_and_compared(here):
    lengths = np.random.default_rng(0).integers(5, 400, 2_000).tolist()
    file = lengths_file(here / "lengths.parquet", lengths)
    result = run("plan-epochs", "--lengths", file, "-o", "plan", "--epochs", "2", "--holdout", "0.05")
    assert (result.exit_code, result.stderr) == (0, "")
    for words in ("buckets up to", "design effect", "straggler share", "real tokens", "Jaccard", "hold-out"):
        assert words in result.stdout
    stated = json.loads((here / "plan" / "plan.json").read_text())
    assert stated["lengths"]["path"] == str(file.resolve()) and "store" not in stated
    assert run("verify", "plan").exit_code == 0
    result = run("plan-epochs", "--lengths", file, "--compare")
    assert (result.exit_code, result.stderr) == (0, "")
    for words in ("sorted", "shuffled", "packed", "bucketed, by step", "bucketed, auto", "bucketed, 64"):
        assert words in result.stdout


@pytest.mark.parametrize("flags", [["--dry-run"], ["--compare"]])
def test_nothing_is_written_where_nothing_is_to_be(here, flags):
    make_store(here / "store", [20, 5, 9, 11] * 30)
    before = sorted(here.rglob("*"))
    (here / "cost.json").write_text(json.dumps({"c0": 0, "a": 3600, "b": 0, "d": 0, "e": 0}))
    result = run("plan-epochs", "--data", "store", *flags, "--cost", "cost.json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "hours" in result.stdout
    assert sorted(here.rglob("*")) == sorted([*before, here / "cost.json"])


def test_hours_are_those_of_the_calibrated_cost(here):
    make_store(here / "store", [10] * 64)
    (here / "cost.json").write_text(json.dumps({"c0": 0, "a": 3600, "b": 0, "d": 0, "e": 0}))
    result = run("plan-epochs", "--data", "store", "--dry-run", "--slots", "8", "--epochs", "2", "--cost", "cost.json")
    assert "160.00 hours on 8 workers" in result.stdout  # 64 x 10 tokens x 1 hour / 8 slots, twice


def test_two_stores_are_planned_and_proven_together(here):
    make_store(here / "store", [20, 5, 9])
    make_store(here / "other", [7, 8])
    assert run("plan-epochs", "--data", "store", "--data", "other", "-o", "plan", "--slots", "1").exit_code == 0
    assert run("verify", "plan").exit_code == 0
    (here / "store").rename(here / "moved")
    assert_user_error(run("verify", "plan"), "no token store here")
    assert run("verify", "plan", "--data", "moved", "--data", "other").exit_code == 0
    assert_user_error(run("verify", "plan", "--data", "other", "--data", "moved"), "not the store that")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_encoding_of_the_terminal_ends_a_command(here, tiny_directory, command):
    """Names that ASCII has not, with output in ASCII: tables escape them, and click writes its own lines as UTF-8."""
    (here / "ü☃.jsonl").write_bytes(jsonl([chat("What is it?", "An answer. " * (1 + number)) for number in range(12)]))
    make = ["tokenize", "ü☃.jsonl", "--tokenizer", tiny_directory, "-o", "ü☃"]
    plan = ["plan-epochs", "--data", "ü☃", "-o", "plan ü☃", "--epochs", 1, "--slots", 2]
    assert run(*make).exit_code == 0 and run(*plan).exit_code == 0
    arguments = {
        "tokenize": make,
        "plan-epochs": [*plan[:4], "other ü☃", *plan[5:]],
        "verify": ["verify", "plan ü☃"],
        "report": ["report", "plan ü☃", "-o", "ü☃.html"],
        "inspect": ["inspect", "ü☃"],
        "regenerate": ["regenerate", "ü☃.jsonl", "-o", "regenerated ü☃.jsonl"],
    }[command]
    with serving(models={"data": [{"id": "modèle ☃"}]}) as server:
        arguments += ["--endpoint", server.url] if command == "regenerate" else []
        result = CliRunner(charset="ascii").invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert re.search(r"\\u2603|☃", result.stdout_bytes.decode())


def test_an_empty_tokenizer_is_wrong_usage(corpus):
    assert run("tokenize", corpus, "--tokenizer", "").exit_code == 2


def test_an_error_shows_nothing_that_a_terminal_obeys(here):
    result = run("tokenize", "gone\x1b[2J\u202e\x07.jsonl")
    assert_user_error(result, r"gone\x1b[2J\u202e\x07.jsonl")


@pytest.mark.parametrize("command", ["tokenize", "regenerate"])
def test_a_closed_standard_input_is_one_line(here, tiny_directory, command):
    with serving() as server:
        given = ["--tokenizer", str(tiny_directory)] if command == "tokenize" else ["--endpoint", server.url]
        code = "import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
        main_code = "from dflash_prep.cli import main; main()"
        closed = f"import os; os.close(0); {code}"
        result = subprocess.run(
            [sys.executable, "-c", closed, "-c", main_code, command, "-", *given], capture_output=True, text=True
        )
    assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr
    assert "standard input is closed" in result.stderr
