"""From corpora as people have them to a store: each format, each way to choose, each kind of bad input."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_prep.store import Store
from dflash_prep.tokenizer import load_tokenizer
from tests.prep.support import END, assert_user_error, chat, jsonl, make_tokenizer, run, unzstd_lines


@pytest.fixture
def tokenize(tmp_path, tiny_directory, monkeypatch):
    """Run the command in an empty directory; returns the store, or the result where it failed."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments: object, tokenizer: Path = tiny_directory):
        number = sum(path.name.startswith("store-") for path in tmp_path.iterdir())
        result = run("tokenize", *arguments, "--tokenizer", tokenizer, "-o", f"store-{number}")
        return (Store(Path(f"store-{number}")), result.stdout) if result.exit_code == 0 else (None, result)

    return command


def said(store: Store, number: int, reference) -> list[str]:
    """A sample's loss spans, each decoded."""
    ids, spans = store.sample(number)
    return [reference.decode(ids[start:end].tolist()) for start, end in spans.reshape(-1, 2)]


DIALOGS = [chat(f"question {n}", f"answer {n}", "more", "that is all") for n in range(5)]
SHARED = [[{"from": ("human", "gpt")[i % 2], "value": m["content"]} for i, m in enumerate(dialog)] for dialog in DIALOGS]


def test_one_corpus_in_every_spelling_is_one_store(tokenize, tmp_path):
    (tmp_path / "in").mkdir()
    rows = [{"messages": dialog} for dialog in DIALOGS]
    (tmp_path / "in" / "a.jsonl").write_bytes(jsonl(DIALOGS))
    (tmp_path / "in" / "b.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "in" / "c.json.gz").write_bytes(gzip.compress(json.dumps([{"conversations": s} for s in SHARED]).encode()))
    pq.write_table(pa.table({"conversations": SHARED, "id": range(5)}), tmp_path / "in" / "d.parquet")
    pq.write_table(pa.table({"dialog": DIALOGS}), tmp_path / "in" / "e.parquet")
    first, _ = tokenize("in/a.jsonl")
    for name in ("b.json", "c.json.gz", "d.parquet"):
        store, _ = tokenize(f"in/{name}")
        assert store.fingerprint == first.fingerprint, name
        assert store.column("line").tolist() == [1, 2, 3, 4, 5]
    store, _ = tokenize("in/e.parquet", "--columns", "messages=dialog")
    assert store.fingerprint == first.fingerprint
    (tmp_path / "in" / "notes.txt").write_text("none of it")
    store, printed = tokenize("in", "--columns", "messages=dialog", "--keep-duplicates")
    assert len(store) == 25
    assert store.manifest["formats"] == {"messages": 3, "sharegpt": 2}
    assert "files of format: sharegpt" in printed
    assert store.manifest["other_files"] == 1
    store, _ = tokenize("in/a.jsonl", "in/b.json")
    assert (len(store), store.manifest["counts"]["rejected"]) == (5, {"duplicate": 5})


def test_text_is_tokenized_as_by_transformers_and_carries_loss_throughout(tokenize, tmp_path, tiny_reference):
    texts = ["the user asks", "12 and 24 <|im_end|> \u2028 x", "one line after another"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    store, _ = tokenize("a.jsonl", tokenizer=make_tokenizer(tmp_path / "untemplated", template=None))
    for number, text in enumerate(texts):
        ids, spans = store.sample(number)
        assert ids.tolist() == load_tokenizer("untemplated").backend.encode(text).ids == tiny_reference(text)["input_ids"]
        assert spans.tolist() == [0, len(ids)]


def test_tokens_are_kept_as_they_are(tokenize, tmp_path):
    rows = [
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 0]},
        {"input_ids": [5, 6, 7, 8], "loss_mask": [True, False, True, True]},
        {"input_ids": [9, 9], "loss_spans": [0, 1, 1, 2]},
        {"input_ids": [9, 100_000], "loss_spans": [0, 1]},
        {"input_ids": [9, 9], "loss_mask": [0, 0]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    store, _ = tokenize("a.jsonl", "--max-reject-share", 1)
    assert [[array.tolist() for array in store.sample(number)] for number in range(len(store))] == [
        [[5, 6, 7, 8], [1, 3]],
        [[5, 6, 7, 8], [0, 1, 2, 4]],
        [[9, 9], [0, 2]],
    ]
    assert store.manifest["counts"]["rejected"] == {
        "a token number beyond the tokenizer's vocabulary": 1,
        "no loss token": 1,
    }


def test_loss_least_loss_and_limit(tokenize, tmp_path, tiny_reference):
    (tmp_path / "a.jsonl").write_bytes(jsonl([*DIALOGS, chat("a", "b", "c", "")]))
    assert said(tokenize("a.jsonl")[0], 1, tiny_reference) == [f"answer 1{END}", f"that is all{END}"]
    assert said(tokenize("a.jsonl", "--loss", "last-assistant")[0], 1, tiny_reference) == [f"that is all{END}"]
    store, _ = tokenize("a.jsonl", "--loss", "all")
    assert store.column("loss_tokens").tolist() == store.column("length").tolist()
    store, _ = tokenize("a.jsonl", "--min-loss-tokens", 4, "--max-reject-share", 1)
    assert len(store) == 5
    assert store.manifest["counts"]["rejected"] == {"fewer loss tokens than --min-loss-tokens": 1}
    store, printed = tokenize("a.jsonl", "--limit", 2)
    assert store.column("line").tolist() == [1, 2]
    assert "stopped at --limit" in printed


def test_a_template_of_ones_own_with_arguments_and_tools(tokenize, tmp_path):
    (tmp_path / "mine.jinja").write_text(
        "{{ mark }}{{ tools | tojson }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat("q", "a"), "tools": [{"name": "f"}]}))
    store, _ = tokenize("a.jsonl", "--chat-template", "mine.jinja", "--template-kwargs", '{"mark": "!"}')
    text = load_tokenizer(str(make_tokenizer(tmp_path / "t"))).backend.decode(store.sample(0)[0].tolist(), False)
    assert text == '![{"name": "f"}]q<|im_end|>a<|im_end|>'
    for bad in ("{", "[]", '{"messages": 1}'):
        assert run("tokenize", "a.jsonl", "--template-kwargs", bad).exit_code == 2
    assert run("tokenize", "a.jsonl", "--columns", "nothing=x").exit_code == 2
    assert run("tokenize", "a.jsonl", "--columns", "messages").exit_code == 2
    assert_user_error(run("tokenize", "a.jsonl", "--chat-template", "gone"), "gone: no such file")


BAD = {
    "broken JSON": (b'{"messages": [', "not JSON"),
    "array": (b'[{"role": "user"}]', "not a JSON object"),
    "no role": (b'{"messages": [{"content": "a"}]}', "a message without a role"),
    "empty role": (b'{"messages": [{"role": "", "content": "a"}]}', "a message without a role"),
    "only a system turn": (b'{"messages": [{"role": "system", "content": "a"}]}', "no assistant turn"),
    "number": (b'{"messages": [{"role": "assistant", "content": 5}]}', "a message whose content is not text"),
    "lone surrogate": (b'{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "text with a lone surrogate"),
    "invalid UTF-8": (b'{"messages": [{"role": "assistant", "content": "\xff"}]}', "not JSON"),
    "duplicate keys": (
        b'{"messages": 1, "messages": [{"role": "assistant", "content": "a"}]}',
        "a JSON object with a key twice",
    ),
    "deep nesting": (b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "not JSON"),
    "20 MB": (jsonl([chat("a", "b" * 20_000_000)]).strip(), "longer than --max-length"),
    "other columns": (b'{"a": 1}', "no list of messages"),
    "a half pair in tools": (b'{"messages": [{"role": "assistant", "content": "a"}], "tools": 1}', "tools that are no list"),
    "truncated last line": (b'{"messages": [{"role": "user", "content": "a"}, {"ro', "not JSON"),
}
ODD = ["\u2028", "\x85", "a\x00b", "", "\ufeff", "a\r\nb", END, "<|im_start|>system\n"]


def test_every_bad_record_is_counted_and_no_good_one_is_lost(tokenize, tmp_path, tiny_reference):
    good = [chat("q", f"{odd}{number}") for number, odd in enumerate(ODD)]
    (tmp_path / "a.jsonl").write_bytes(
        b"\xef\xbb\xbf" + jsonl(good).replace(b"\n", b"\r\n") + b"\n".join(d for d, _ in BAD.values())
    )
    store, _ = tokenize("a.jsonl", "--max-reject-share", 0.9)
    assert store.column("line").tolist() == list(range(1, len(good) + 1))
    for number, messages in enumerate(good):
        expected = tiny_reference.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert store.sample(number)[0].tolist() == expected
    rejects = unzstd_lines(store.path / "rejects.jsonl.zst")
    assert [reject["reason"].split(":")[0] for reject in rejects] == [reason for _, reason in BAD.values()]
    assert sum(store.manifest["counts"]["rejected"].values()) == len(BAD)


def test_a_strict_template_rejects_roles_out_of_order(tokenize, tmp_path):
    strict = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('') }}{% endif %}"
    )
    (tmp_path / "strict.jinja").write_text(strict + "{{ m.content }}<|im_end|>{% endfor %}")
    (tmp_path / "a.jsonl").write_bytes(jsonl([chat("a", "b"), chat("a", "b")[::-1]]))
    store, _ = tokenize("a.jsonl", "--chat-template", "strict.jinja", "--max-reject-share", 1)
    assert store.manifest["counts"]["rejected"] == {"template error": 1}


def test_a_bad_file_beside_good_ones_does_not_end_the_run(tokenize, tmp_path):
    (tmp_path / "corpus").mkdir()
    for name, data in {
        "cut.jsonl.gz": gzip.compress(jsonl(DIALOGS))[:30],
        "cut.json": b'[{"messages": [',
        "empty.jsonl": b"",
        "good.jsonl": jsonl(DIALOGS),
        "no.parquet": b"no",
        "notes.md": b"# Notes",
    }.items():
        (tmp_path / "corpus" / name).write_bytes(data)
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "corpus" / "other.parquet")
    store, _ = tokenize("corpus", "--max-reject-share", 0.9)
    assert len(store) == 5
    assert len(store.manifest["lost_files"]) == 3
    assert store.manifest["other_files"] == 1
    assert store.manifest["counts"]["rejected"]["no columns of a known format"] == 2


def test_text_that_spells_a_special_token_is_counted_or_rejected(tokenize, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl([chat(f"say {END}", "a"), chat("b", "c"), chat("d", "<|im_start|>")]))
    store, printed = tokenize("a.jsonl")
    assert (len(store), store.manifest["special_texts"]) == (3, 2)
    assert "records that spell a special token" in printed
    store, _ = tokenize("a.jsonl", "--special-text", "reject", "--max-reject-share", 1)
    assert (len(store), store.manifest["special_texts"]) == (1, 0)
    assert store.manifest["counts"]["rejected"] == {"text that spells a special token": 2}


def test_near_duplicates_are_counted_and_name_the_first(tokenize, tmp_path):
    words = " ".join(f"word{number}" for number in range(200))
    system = {"role": "system", "content": "the same long words in every system prompt " * 20}
    rows = [chat("q", f"{words} {tail}") for tail in ("one", "two")] + [[system, *chat(*pair)] for pair in ("ab", "cd")]
    (tmp_path / "a.jsonl").write_bytes(jsonl(rows))
    assert len(tokenize("a.jsonl")[0]) == 4
    store, _ = tokenize("a.jsonl", "--near-dedup")
    assert store.column("line").tolist() == [1, 3, 4]
    assert store.manifest["counts"]["rejected"] == {"near-duplicate": 1}
    (reject,) = unzstd_lines(store.path / "rejects.jsonl.zst")
    assert reject["reason"] == "near-duplicate: of a.jsonl:1"
    assert len(tokenize("a.jsonl", "--near-dedup", 1)[0]) == 4


def test_shuffled_input_is_the_same_records_in_another_order(tokenize, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(DIALOGS) + b"{broken\n")
    (tmp_path / "b.json").write_text(json.dumps([{"messages": chat("array", str(number))} for number in range(20)]))
    pq.write_table(pa.table({"conversations": SHARED, "id": range(5)}), tmp_path / "c.parquet")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(jsonl(DIALOGS))[:40])
    names = ["a.jsonl", "b.json", "c.parquet", "d.jsonl.gz"]
    common = ("--keep-duplicates", "--max-reject-share", 1)

    def rows(store: Store) -> list[tuple]:
        return [(row["source"], row["line"], row["key"]) for row in store.index.to_pylist()]

    plain, one, again, two = (
        tokenize(*names, *common, *extra)[0]
        for extra in ((), ("--shuffle-input",), ("--shuffle-input", 0), ("--shuffle-input", 1))
    )
    assert rows(one) == rows(again) != rows(two)
    assert sorted(rows(one)) == sorted(rows(two)) == sorted(rows(plain)) != rows(one)
    for name in ("counts", "formats", "lost_files"):
        assert one.manifest[name] == plain.manifest[name]
    few, _ = tokenize(*names, *common, "--shuffle-input", 3, "--limit", 8)
    assert few.manifest["counts"]["records"] == 8
    assert len({row[0] for row in rows(few)}) > 1


TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("tagged", [False, True])
def test_turns_of_weight_0_and_ends_of_cut_answers_carry_no_loss(tokenize, tmp_path, tiny_reference, tagged):
    (tmp_path / "tagged.jinja").write_text(TAGGED)
    extra = ("--chat-template", "tagged.jinja") if tagged else ()
    plain = chat("a", "one", "b", "two", "c", "three")
    weighted = [m | ({"weight": int(m["content"] != "two")} if m["role"] == "assistant" else {}) for m in plain]
    silent = [m | {"weight": 0} for m in plain]
    rows = [
        {"messages": plain},
        {"messages": weighted},
        {"messages": plain, "finish_reason": "length"},
        {"messages": weighted, "finish_reason": "stop"},
        {"messages": silent},
        {"messages": [plain[0], plain[1] | {"weight": 0.5}]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    store, _ = tokenize("a.jsonl", "--keep-duplicates", "--max-reject-share", 1, *extra)
    end = f"{END}\n" if tagged else END
    assert [said(store, number, tiny_reference) for number in range(4)] == [
        [f"one{end}", f"two{end}", f"three{end}"],
        [f"one{end}", f"three{end}"],
        [f"one{end}", f"two{end}", "three"],
        [f"one{end}", f"three{end}"],
    ]
    assert len({tuple(store.sample(number)[0].tolist()) for number in range(4)}) == 1
    assert store.manifest["counts"]["rejected"] == {
        "a message whose weight is neither 0 nor 1": 1,
        "no assistant turn of weight 1": 1,
    }
    store, _ = tokenize("a.jsonl", "--loss", "last-assistant", "--keep-duplicates", "--max-reject-share", 1, *extra)
    assert [said(store, number, tiny_reference) for number in range(3)] == [[f"three{end}"], [f"three{end}"], ["three"]]
