"""What `inspect` shows is what the store and the plan hold, and nothing that a terminal would obey."""

import json
import random
import re
import subprocess
import sys
import unicodedata
from collections import defaultdict
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dflash_prep.cli import main
from dflash_prep.manifest import Plan
from dflash_prep.overview import MOST_BINS, QUANTILES, length_bins, loss_bins, quantiles
from dflash_prep.pieces import decode
from dflash_prep.store import Store
from tests.prep.support import assert_user_error, chat, jsonl, make_plan, make_store, run

LETTERS = "answers 12 [bold][/y] {x} ⟦⟧ éü e\u0301 漢字かな한국 नमस्ते שלום مرحبا ไทย 👩‍👩‍👧‍👦🇩🇪✨ 🤦🏽‍♂️\t\n<|im_end|>"
UNSAFE = "\x00\x07\x08\x0b\x0c\x1b\r\x7f\x85\x9b\u2028\u2029\u202e\u202a\u2066\u200f\ufeff\u200b"
UNSAFE += "\u180e\u3164\ufff9\ufffb\U000e0041\U000e007f"
CONVERSATIONS = 60
REORDERING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def said(draw: random.Random) -> str:
    """Some text of many scripts, control characters in it, without a backslash."""
    return "".join(draw.choices([*LETTERS, *UNSAFE, "\x1b[31m", "\r\n", "<|im_end|>"], k=draw.randint(1, 40)))


def corpus() -> bytes:
    """Conversations of one to three turns, then three records that are not kept."""
    draw = random.Random(5)
    chats = [chat(*(said(draw) for _ in range(2 * draw.randint(1, 3)))) for _ in range(CONVERSATIONS)]
    return jsonl([*chats, chats[0], chat("\x1b[31m alone")]) + b"\x1b[31m no [/y] JSON\n"


@pytest.fixture(scope="module")
def store(tmp_path_factory, tiny_directory) -> Path:
    """A store of a corpus in many scripts."""
    place = tmp_path_factory.mktemp("inspect")
    (place / "wild.jsonl").write_bytes(corpus())
    result = run("tokenize", place / "wild.jsonl", "--tokenizer", tiny_directory, "-o", place / "store")
    assert result.exit_code == 0, result.stderr
    return place / "store"


@pytest.fixture(scope="module")
def plan(store, tmp_path_factory) -> Path:
    """A plan of it, with copies and a hold-out."""
    path = tmp_path_factory.mktemp("plans") / "plan"
    weights = ((str(store.parent / "wild.jsonl"), 1.5),)
    make_plan(store, path, epochs=3, slots=2, strategy="packed", holdout=0.2, weights=weights, token_budget=700)
    return path


def shown(*arguments: object, color: bool = False) -> str:
    """What `inspect` prints, to a terminal with colours or to a pipe."""
    env = {"FORCE_COLOR": "1" if color else None, "NO_COLOR": None, "TERM": "xterm-256color"}
    result = CliRunner(env=env).invoke(main, ["inspect", *map(str, arguments)])
    assert (result.exit_code, result.stderr) == (0, ""), (result.stderr, result.exception)
    return result.stdout


def unescaped(text: str) -> str:
    """Text whose escapes are again what they stand for; it had no backslash of its own."""
    return re.sub(r"\\(x..|u....|U.{8}|[rnt])", lambda found: found[0].encode().decode("unicode_escape"), text)


def body(output: str) -> str:
    """A sample's text as it was shown, without the newline that ends the output."""
    blank, _, _, text = output.split("\n", 3)
    assert blank == ""
    return text


def assert_harmless(output: str) -> None:
    for character in set(output) - {"\n", "\t"}:
        assert unicodedata.category(character) not in ("Cc", "Zl", "Zp", "Cs"), repr(character)
        assert unicodedata.bidirectional(character) not in REORDERING, repr(character)
        assert character not in UNSAFE, repr(character)


def test_a_pipe_gets_the_whole_text_with_the_loss_between_marks(store, tiny):
    kept = Store(store)
    assert len(kept) == CONVERSATIONS
    for number in range(len(kept)):
        ids, spans = kept.sample(number)
        output = shown(store, "--sample", number)
        assert_harmless(output)
        text = body(output).removesuffix("\n")
        assert unescaped(re.sub("[⟦⟧]", "", text)) == decode(ids.tolist(), tiny).removesuffix("\n")
        loss = [unescaped(part) for part in re.findall("(?s)⟦(.*?)⟧", text)]
        assert loss == [decode(ids[start:end].tolist(), tiny) for start, end in spans.reshape(-1, 2)]


def test_a_terminal_gets_the_same_text_with_the_loss_in_green_and_special_tokens_reversed(store, tiny):
    kept = Store(store)
    for number in range(len(kept)):
        ids, spans = kept.sample(number)
        output = shown(store, "--sample", number, color=True)
        assert_harmless(re.sub(r"\x1b\[[\d;]*m", "", output))
        found = re.findall(r"(?s)(?:\x1b\[([\d;]+)m)?([^\x1b]+)(?:\x1b\[0m)?", body(output))
        parts = [(set(codes.split(";")), text) for codes, text in found]
        assert unescaped("".join(text for _, text in parts)).rstrip("\n") == decode(ids.tolist(), tiny).rstrip("\n")
        inside = np.concatenate([ids[start:end] for start, end in spans.reshape(-1, 2)]).tolist()
        green = unescaped("".join(text for codes, text in parts if "32" in codes))
        assert green == decode(inside, tiny).replace("\n", "")  # newlines are outside of styles
        special = "".join(text for codes, text in parts if "7" in codes)
        assert special == decode([token for token in ids.tolist() if token in tiny.special_ids], tiny)


def test_token_by_token_every_id_has_its_number_and_mark(store, tiny):
    kept = Store(store)
    for number in range(0, len(kept), 7):
        ids, spans = kept.sample(number)
        output = shown(store, "--sample", number, "--tokens")
        assert_harmless(output)
        rows = [line.split(maxsplit=3) for line in body(output).splitlines()[1:]]
        assert [int(row[0]) for row in rows] == list(range(len(ids)))
        assert [int(row[1]) for row in rows] == ids.tolist()
        loss = {at for start, end in spans.reshape(-1, 2).tolist() for at in range(start, end)}
        assert [row[2] == "loss" for row in rows] == [at in loss for at in range(len(ids))]
        quoted = [row[3][1:-1] for row in rows if row[3].startswith('"')]
        assert unescaped("".join(quoted)) == decode(ids.tolist(), tiny)


def test_the_heading_says_what_the_index_says(store):
    row = Store(store).index.slice(3, 1).to_pylist()[0]
    heading = "\n".join(shown(store, "--sample", 3).split("\n")[1:3])
    for value in (f"{row['source']}:{row['line']}", row["length"], row["loss_tokens"], row["eligible"], row["key"]):
        assert str(value) in heading


def numbers(output: str) -> list[int]:
    """The samples that are shown."""
    return [int(found.replace(",", "")) for found in re.findall(r"^sample ([\d,]+) from ", output, re.MULTILINE)]


def test_samples_are_found_by_number_key_place_and_chance(store):
    index = Store(store).index
    for number in (0, 7, CONVERSATIONS - 1):
        row = index.slice(number, 1).to_pylist()[0]
        assert numbers(shown(store, "--key", row["key"])) == [number]
        assert numbers(shown(store, "--key", row["key"][:12].upper())) == [number]
        for source in (row["source"], "wild.jsonl"):
            assert numbers(shown(store, "--find", f"{source}:{row['line']}")) == [number]
    assert numbers(shown(store, "--sample", 5, "--sample", 2, "--sample", 5)) == [5, 2]
    first = numbers(shown(store, "--random", 9))
    assert len(set(first)) == 9 and first == numbers(shown(store, "--random", 9)) and max(first) < CONVERSATIONS
    assert first != numbers(shown(store, "--random", 9, "--seed", 1))
    assert numbers(shown(store, "--random", 10**6)) == list(range(CONVERSATIONS))


def test_a_record_that_was_not_kept_says_why(store):
    for line, reason in ((61, "duplicate"), (62, "no assistant turn"), (63, "not JSON")):
        assert_user_error(run("inspect", store, "--find", f"wild.jsonl:{line}"), f"wild.jsonl:{line}", reason)
    assert_user_error(run("inspect", store, "--find", "wild.jsonl:64"), "no sample is from wild.jsonl:64")
    assert_user_error(run("inspect", store, "--find", "ild.jsonl:1"), "no sample is from ild.jsonl:1")
    assert_user_error(run("inspect", store, "--key", "f" * 32), "no sample's key begins with")
    assert_user_error(run("inspect", store, "--find", "\x1b[2J:1"), r"no sample is from \x1b[2J:1")


def test_the_overview_counts_everything_and_shows_rejects(store):
    output = shown(store)
    assert_harmless(output)
    lengths = Store(store).column("length")
    for part in ("lengths in tokens", "share of a sample's tokens"):
        rows = re.findall(
            r"^ *([\d,]+)- *[\d,]+ +([\d,]+) +[\d.]+% ?(.*)$", output.split(part)[1].split("\n\n")[0], re.MULTILINE
        )
        assert sum(int(row[1]) for row in rows) == CONVERSATIONS
        assert all((row[1] == "0") == (row[2] == "") for row in rows)
    assert f"longest {lengths.max()}" in output
    for words in ("wild.jsonl:61", "wild.jsonl:62: ", r"wild.jsonl:63: \x1b[31m no [/y] JSON"):
        assert words in output


def test_examples_of_rejects_are_looked_for_in_the_first_ones_only(store, monkeypatch):
    monkeypatch.setattr("dflash_prep.overview.MOST_READ", 2)
    output = shown(store).split("\nrejects\n")[1]
    assert "wild.jsonl:61: " in output and "wild.jsonl:62: " in output and "wild.jsonl:63" not in output
    assert re.search(r"1  not JSON\n +\(further down", output)


def test_many_sources_are_summed_up(tmp_path):
    path = make_store(tmp_path / "store", list(range(4, 44)))
    index = pq.read_table(path / "index.parquet")
    names = pa.array([f"[/{number % 20}]" for number in range(40)]).dictionary_encode()
    replace_index(path, index.set_column(5, index.schema.field("source"), names.cast(index.schema.field("source").type)))
    table = shown(path).split("loss  source\n")[1].split("\n\n")[0].splitlines()
    assert table[0].endswith("  [/19]") and table[-1].endswith("  8 others") and len(table) == 13
    counts = [[int(cell.replace(",", "")) for cell in line.split()[:2]] for line in table]
    assert [sum(column) for column in zip(*counts, strict=True)] == [40, sum(range(4, 44))]


def replace_index(path: Path, index: pa.Table) -> None:
    """Put another index in a store."""
    from dflash_prep.files import file_digest

    pq.write_table(index, path / "index.parquet", compression="zstd")
    edit_json(path / "store.json", {"index_checksum": file_digest(path / "index.parquet")})


def edit_json(path: Path, changes: dict) -> None:
    """Change what a manifest states."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


LENGTHS = st.lists(st.integers(1, 2**24), min_size=1, max_size=60) | st.lists(st.integers(1, 40), min_size=1, max_size=60)


@given(values=LENGTHS)
def test_bins_hold_each_length_once(values):
    bins = length_bins(np.array(values))
    assert [part.count for part in bins] == [sum(part.low <= value <= part.high for value in values) for part in bins]
    assert all(low.high + 1 == high.low for low, high in pairwise(bins))
    assert (bins[0].low, bins[-1].high) == (min(values), max(values))
    assert len(bins) <= max(MOST_BINS, max(values).bit_length() + 1)
    assert sum(part.count for part in bins) == len(values)


@given(values=LENGTHS, data=st.data())
def test_bins_hold_each_share_of_loss_once(values, data):
    loss = [data.draw(st.integers(0, value)) for value in values]
    bins = loss_bins(np.array(values), np.array(loss))
    assert sum(part.count for part in bins) == len(values)
    for part in bins:
        percent = [100 * one // whole for one, whole in zip(loss, values, strict=True)]
        assert part.count == sum(part.low <= value <= part.high for value in percent)


@given(values=LENGTHS)
def test_quantiles_are_the_least_lengths_that_so_many_do_not_pass(values):
    found = quantiles(np.array(values))
    assert found.pop("longest") == max(values)
    for share, value in zip(QUANTILES, found.values(), strict=True):
        assert value in values
        assert sum(one <= value for one in values) >= share * len(values) - 1e-9
        assert sum(one < value for one in values) < share * len(values) + 1e-9


def planned(plan: Plan) -> tuple[dict, dict]:
    """By what the files say: each sample's places in each epoch, and each step's slots."""
    places, steps = defaultdict(lambda: defaultdict(list)), defaultdict(list)
    for epoch in [*range(len(plan["epochs"])), None]:
        for row in plan.rows(epoch):
            steps[epoch, row["step"]].append(row)
            for sample in row["samples"]:
                places[sample]["held out" if epoch is None else f"epoch {epoch}"].append((row["step"], row["slot"]))
    return places, steps


def test_a_plans_samples_are_where_the_files_have_them(plan, store):
    places, _ = planned(Plan(plan))
    output = shown(plan, "--random", CONVERSATIONS)
    assert numbers(output) == list(range(CONVERSATIONS))
    for number, part in enumerate(re.split(r"^sample [\d,]+ from ", output, flags=re.MULTILINE)[1:]):
        lines = re.findall(r"^(epoch \d|held out): (.*)$", part, re.MULTILINE)[-4:]
        assert [name for name, _ in lines] == ["epoch 0", "epoch 1", "epoch 2", "held out"]
        for name, stated in lines:
            found = [(int(step), int(slot)) for step, slot in re.findall(r"step (\d+) slot (\d+)", stated)]
            assert found == places[number][name]
            assert found or stated == "not in it"
        assert body("\n" + "sample 0 from " + part).startswith(body(shown(store, "--sample", number)).rstrip("\n"))


def step_shown(output: str) -> list[tuple[int, list[tuple[int, int]]]]:
    """The slots of a step as they are shown: number, and each sample with its length."""
    slots = []
    for line in output.splitlines()[1:]:
        if found := re.match(r"slot (\d+): ", line):
            slots.append((int(found[1]), []))
        elif line:
            sample, length, _ = line.replace(",", "").split(maxsplit=2)
            slots[-1][1].append((int(sample), int(length)))
    return slots


def test_a_plans_steps_are_what_the_files_have(plan, store):
    opened, lengths = Plan(plan), Store(store).column("length").tolist()
    _, steps = planned(opened)
    whole = 0
    for epoch, summary in enumerate(opened["epochs"]):
        for step in range(summary["steps"]):
            output = shown(plan, "--step", step, "--epoch", epoch)
            expected = [
                (row["slot"], [(sample, lengths[sample]) for sample in row["samples"]]) for row in steps[epoch, step]
            ]
            assert step_shown(output) == expected
            assert shown(plan, "--step", whole) == output
            whole += 1
    assert whole == opened.total_steps


def test_padding_and_empty_slots_are_shown(tmp_path):
    make_store(tmp_path / "store", [2, 9, 5])
    make_plan(tmp_path / "store", tmp_path / "plan", epochs=1, slots=2, strategy="shuffled", token_budget=18)
    output = "".join(shown(tmp_path / "plan", "--step", step) for step in range(Plan(tmp_path / "plan").total_steps))
    rows = list(Plan(tmp_path / "plan").rows(0))
    padding = [row["padded_tokens"] - row["tokens"] for row in rows if row["samples"]]
    assert [int(found) for found in re.findall(r"and (\d+) of padding", output)] == padding and any(padding)
    assert len(re.findall(r"slot \d+: empty", output)) == sum(not row["samples"] for row in rows)


def test_a_plan_of_lengths_shows_its_steps(tmp_path):
    pq.write_table(pa.table({"length": [5, 6, 7], "source": ["a[/b]", "a[/b]", "c"]}), tmp_path / "lengths.parquet")
    options = ("--lengths", tmp_path / "lengths.parquet", "-o", tmp_path / "plan", "--slots", 1, "--epochs", 1)
    assert run("plan-epochs", *options, "--token-budget", 100).exit_code == 0
    output = [shown(tmp_path / "plan", "--step", step) for step in range(Plan(tmp_path / "plan").total_steps)]
    samples = [found for part in output for _, found in step_shown(part)]
    assert sorted(chain.from_iterable(samples)) == [(0, 5), (1, 6), (2, 7)]
    assert "".join(output).count("a[/b]") == 2
    assert "source a[/b]: 2 x 1 = 2" in shown(tmp_path / "plan")
    assert_user_error(run("inspect", tmp_path / "plan", "--sample", 0), "lengths alone")


def test_a_plans_overview_is_that_of_planning(plan):
    output = shown(plan)
    for epoch in Plan(plan)["epochs"]:
        assert f"{epoch['tokens']:,}" in output
    assert "token budget 700" in output


def test_a_moved_store_is_named(plan, store, tmp_path, tiny_store):
    store_there = store.rename(store.with_name("moved"))
    try:
        assert_user_error(run("inspect", plan, "--sample", 0), str(store))
        assert numbers(shown(plan, "--sample", 0, "--data", store_there)) == [0]
        assert "token budget" in shown(plan)
    finally:
        store_there.rename(store)
    for options in ([], ["--sample", 0], ["--step", 0]):
        assert_user_error(run("inspect", plan, *options, "--data", tiny_store), str(tiny_store), "not the store")


@pytest.mark.parametrize(
    ("what", "options", "words"),
    [
        ("store", ["--sample", CONVERSATIONS], f"samples are 0 to {CONVERSATIONS - 1}"),
        ("store", ["--sample", 10**30], "no sample"),
        ("store", ["--step", 0], "is a store"),
        ("store", ["--tokens"], "--sample"),
        ("plan", ["--sample", CONVERSATIONS], f"samples are 0 to {CONVERSATIONS - 1}"),
        ("plan", ["--step", 10**30], "no step"),
        ("plan", ["--step", 10**6, "--epoch", 1], "epoch 1 has no step"),
        ("plan", ["--step", 0, "--epoch", 3], "epochs are 0 to 2"),
        ("plan", ["--epoch", 0], "--step"),
    ],
)
def test_what_is_not_there_is_one_line(store, plan, what, options, words):
    assert_user_error(run("inspect", {"store": store, "plan": plan}[what], *options), words)


@pytest.mark.parametrize(
    "options", [["--find", "a"], ["--find", "a:0"], ["--find", ":1"], ["--sample", "-1"], ["--key", ""], ["--tokenizer", ""]]
)
def test_nonsense_is_wrong_usage(store, options):
    assert run("inspect", store, *options).exit_code == 2


def test_other_places_are_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_user_error(run("inspect"), "data/tokens", "neither")
    (tmp_path / "file").write_text("x")
    for name in ("file", "file/inside", "."):
        assert_user_error(run("inspect", name), "neither a token store nor a plan")


def test_another_tokenizer_is_asked_for(store, tiny_directory, target_directory, tmp_path):
    copied = copy_of(store, tmp_path)
    tokenizer = json.loads((copied / "store.json").read_text())["tokenizer"]
    edit_json(copied / "store.json", {"tokenizer": tokenizer | {"name": str(tmp_path / "gone")}})
    assert_user_error(run("inspect", copied, "--sample", 0), "gone", "--tokenizer")
    assert numbers(shown(copied, "--sample", 0, "--tokenizer", tiny_directory)) == [0]
    assert_user_error(run("inspect", copied, "--sample", 0, "--tokenizer", target_directory), "another", "--tokenizer")
    assert_user_error(run("inspect", copied, "--sample", 0, "--tokenizer", "./nowhere"), "./nowhere")


def test_the_default_target_is_found_by_its_stated_name(tmp_path, target_directory):
    (tmp_path / "c.jsonl").write_bytes(jsonl([chat("Hello?", "Hi 漢.")]))
    assert run("tokenize", tmp_path / "c.jsonl", "-o", tmp_path / "store").exit_code == 0
    assert "⟦Hi 漢.<|im_end|>⟧" in shown(tmp_path / "store", "--sample", 0)


def copy_of(store: Path, directory: Path) -> Path:
    """The same files elsewhere."""
    (directory / "copy").mkdir()
    for file in store.iterdir():
        (directory / "copy" / file.name).write_bytes(file.read_bytes())
    return directory / "copy"


def test_a_damaged_store_is_one_line(store, tmp_path):
    copied = copy_of(store, tmp_path)
    ids, _ = Store(copied).sample(4)
    shard = copied / "shard-00000.arrow"
    data = shard.read_bytes()
    shard.write_bytes(data.replace(ids.tobytes(), ids[::-1].tobytes(), 1))
    assert_user_error(run("inspect", copied, "--sample", 4), "sample 4", "damaged")
    assert numbers(shown(copied, "--sample", 3)) == [3]
    for rejects in (b"", b"no zstd", zstandard.compress(b"{}\n"), zstandard.compress(b"[1]"), zstandard.compress(b"\xff\n")):
        (copied / "rejects.jsonl.zst").write_bytes(rejects)
        if rejects:
            assert_user_error(run("inspect", copied), "rejects.jsonl.zst")
    (copied / "rejects.jsonl.zst").unlink()
    assert_user_error(run("inspect", copied), "rejects.jsonl.zst")
    for changes in ({"formats": None}, {"formats": {"x": "y"}}, {"lost_files": [1]}, {"options": 1}, {"special_texts": "z"}):
        edit_json(copied / "store.json", changes)
        assert_user_error(run("inspect", copied), next(iter(changes)))
        edit_json(copied / "store.json", {key: json.loads((store / "store.json").read_text())[key] for key in changes})


def test_a_damaged_plan_is_one_line(plan, tmp_path):
    copied = copy_of(plan, tmp_path)
    certificate = json.loads((copied / "plan.json").read_text())["certificate"]
    edit_json(copied / "plan.json", {"certificate": certificate | {"real_token_share": "all"}})
    assert_user_error(run("inspect", copied), "certificate")
    (copied / "epoch-001.parquet").write_bytes(b"PAR1")
    assert_user_error(run("inspect", copied, "--sample", 0), "epoch-001.parquet")


@pytest.mark.parametrize("name", ["truncated", "split", "pieces"])
@pytest.mark.parametrize("value", ["x", [1], -1, True, {"a": 1}])
def test_damaged_counts_of_a_store_are_one_line(store, tmp_path, name, value):
    copied = copy_of(store, tmp_path)
    counts = json.loads((copied / "store.json").read_text())["counts"]
    edit_json(copied / "store.json", {"counts": counts | {name: value}})
    assert_user_error(run("inspect", copied), "no valid counts")


@pytest.mark.parametrize("damage", [{"seconds": [0, 0]}, {"optimum": 0}, {"chosen": -1}, {"seconds": []}])
def test_a_curve_of_nothing_is_one_line(tmp_path, damage):
    make_store(tmp_path / "store", list(range(2, 20)))
    make_plan(tmp_path / "store", tmp_path / "plan", epochs=1, slots=2, strategy="bucketed")
    curve = json.loads((tmp_path / "plan" / "plan.json").read_text())["curve"]
    assert curve and "buckets up to" in shown(tmp_path / "plan")
    edit_json(tmp_path / "plan" / "plan.json", {"curve": curve | damage})
    assert_user_error(run("inspect", tmp_path / "plan"), "curve")


def test_a_plan_that_states_no_curve_is_shown(tmp_path):
    make_store(tmp_path / "store", list(range(2, 20)))
    make_plan(tmp_path / "store", tmp_path / "plan", epochs=1, slots=2)
    manifest = json.loads((tmp_path / "plan" / "plan.json").read_text())
    del manifest["curve"]
    (tmp_path / "plan" / "plan.json").write_text(json.dumps(manifest))
    assert "boundaries" in shown(tmp_path / "plan")


@pytest.mark.parametrize("color", [False, True])
def test_no_name_reaches_the_terminal_as_it_is(tmp_path, color):
    """Of the directory, of formats, reasons, lost files and sources: each holds what a terminal would obey."""
    evil = "[/b]:smile:\x1b[2J\x1b]0;t\x07\u202e\x9b1m\n\U000e0041"
    path = make_store(tmp_path / evil, list(range(2, 22)))
    edit_json(path / "store.json", {"formats": {evil: 1}, "lost_files": [evil]})
    make_plan(path, tmp_path / f"plan{evil}", epochs=1, slots=2)
    manifest = json.loads((tmp_path / f"plan{evil}" / "plan.json").read_text())
    source = {"samples": 5, "weight": 1.0, "per_epoch": 5}
    edit_json(tmp_path / f"plan{evil}" / "plan.json", {"sources": manifest["sources"] | {evil: source}})
    env = {"FORCE_COLOR": "1" if color else None, "NO_COLOR": None, "TERM": "xterm-256color", "COLUMNS": "500"}
    for arguments in ([path], [tmp_path / f"plan{evil}"], [tmp_path / f"gone{evil}"]):
        result = CliRunner(env=env).invoke(main, ["inspect", *map(str, arguments)])
        assert result.exit_code == (0 if arguments[0].exists() else 1), result.exception
        assert_harmless(re.sub(r"\x1b\[[\d;]*m", "", result.output))
        assert r"[/b]:smile:\x1b[2J" in re.sub(r"\x1b\[[\d;]*m", "", result.output)
        assert not {"\x1b[2J", "\x1b]0"} & set(re.findall(r"\x1b(?:\[2J|\]0)", result.output))


@pytest.mark.parametrize("count", [2, 13, 14, 500])
def test_many_sources_of_a_plan_are_summed_up(tmp_path, count):
    make_store(tmp_path / "store", list(range(2, 22)))
    make_plan(tmp_path / "store", tmp_path / "plan", epochs=1, slots=2)
    sources = {f"s{number}": {"samples": number, "weight": 2.0, "per_epoch": 2 * number} for number in range(count)}
    edit_json(tmp_path / "plan" / "plan.json", {"sources": sources})
    output = shown(tmp_path / "plan")
    lines = {name: (int(samples), int(drawn)) for name, samples, drawn in SOURCE_LINES.findall(output.replace(",", ""))}
    others = re.findall(r"^(\d+) other sources: (\d+) samples (\d+) an epoch$", output.replace(",", ""), re.MULTILINE)
    left = [(int(samples), int(drawn)) for _, samples, drawn in others]
    assert len(lines) == (count if count <= 13 else 12) and len(lines) + sum(int(other[0]) for other in others) == count
    sums = [sum(column) for column in zip(*lines.values(), *left, strict=True)]
    assert sums == [sum(range(count)), 2 * sum(range(count))]
    assert count <= 13 or set(lines) == {f"s{number}" for number in range(count - 12, count)}


SOURCE_LINES = re.compile(r"^source (\w+): (\d+) x 2 = (\d+) an epoch$", re.MULTILINE)


def test_no_columns_are_eighty(store, plan):
    for path in (store, plan):
        shows = [
            CliRunner(env={"FORCE_COLOR": "1", "TERM": "xterm", "NO_COLOR": None, "COLUMNS": columns}).invoke(
                main, ["inspect", str(path)]
            )
            for columns in ("0", "80")
        ]
        assert shows[0].stdout == shows[1].stdout and shows[0].exit_code == 0


@pytest.mark.parametrize("length", [1, 2, 50])
def test_a_store_of_one_sample_is_shown(tmp_path, length):
    path = make_store(tmp_path / "one", [length])
    assert re.search(rf"^{length}-{length} +1 100.0% █+$", shown(path), re.MULTILINE)


@pytest.mark.parametrize("spans", [[[0, 6]], [[5, 6]], [[0, 1], [2, 3], [4, 6]]])
def test_loss_on_all_or_in_pieces(tmp_path, tiny_directory, spans):
    ids = list(range(40, 46))
    (tmp_path / "c.jsonl").write_text(
        json.dumps({"input_ids": ids, "loss_spans": [border for span in spans for border in span]})
    )
    options = ("--format", "tokens", "--tokenizer", tiny_directory, "-o", tmp_path / "store")
    result = run("tokenize", tmp_path / "c.jsonl", *options)
    assert result.exit_code == 0, result.stderr
    kept = Store(tmp_path / "store").sample(0)[1].reshape(-1, 2).tolist()
    assert kept == spans
    text = body(shown(tmp_path / "store", "--sample", 0))
    assert [len(part) for part in re.findall("⟦(.*?)⟧", text)] == [end - start for start, end in spans]


@pytest.mark.parametrize("env", [{"COLUMNS": "20"}, {"COLUMNS": "1"}, {"TERM": "dumb"}, {"NO_COLOR": "1"}, {}])
@pytest.mark.parametrize("charset", ["utf-8", "ascii", "latin-1"])
def test_no_terminal_is_too_odd(store, plan, env, charset):
    for arguments in ([store], [store, "--sample", 0], [store, "--sample", 0, "--tokens"], [plan], [plan, "--step", 0]):
        runner = CliRunner(env={"FORCE_COLOR": "1", "NO_COLOR": None, "TERM": "xterm"} | env, charset=charset)
        result = runner.invoke(main, ["inspect", *map(str, arguments)])
        assert (result.exit_code, result.stderr) == (0, ""), result.exception


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_without_colour_a_terminal_gets_the_marks(store, env):
    result = CliRunner(env={"FORCE_COLOR": "1", "TERM": "xterm"} | env).invoke(
        main, ["inspect", str(store), "--sample", "0"]
    )
    plain = re.sub(r"\x1b\[[\d;]*m", "", result.stdout)
    assert plain == shown(store, "--sample", 0)
    assert not re.search(r"\x1b\[[\d;]*3\d", result.stdout)


def test_a_reader_may_leave_early(store):
    code = "from dflash_prep.cli import main; main()"
    arguments = [sys.executable, "-c", code, "inspect", str(store), "--tokens", "--random", "60"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


def test_a_stores_overview_loads_neither_tokenizer_nor_planner(tiny_store):
    code = f"import sys; from dflash_prep.cli import main; main(['inspect', {str(tiny_store)!r}], standalone_mode=False)"
    code += "; print(sorted({'tokenizers', 'numba', 'polars', 'jinja2', 'torch'} & {*sys.modules}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
