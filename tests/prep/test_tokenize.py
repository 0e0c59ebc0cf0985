"""Tokenizing: ids equal transformers' sample by sample, loss on what the assistant says, bad records set aside."""

import gzip
import json
import os
import shutil
import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dflash_prep.corpus import read_records
from dflash_prep.errors import UserError
from dflash_prep.sample_maker import Options
from dflash_prep.store import Store
from dflash_prep.tokenize import tokenize
from dflash_prep.tokenizer import ChatTokenizer, load_tokenizer
from tests.prep.support import END, chat, jsonl, run, unzstd_lines

ALL = Options(max_length=10**6, max_reject_share=1.0, keep_duplicates=True)
SPECIALS = ["\u2028", "\x85", "\u2029", "\r\n", "\n", "  ", "\t", "\x00", "\ufeff", "\u200b", "\u202e", "e\u0301", "ﬁ", "ß"]
SPECIALS += ["👩‍👩‍👧", "🇩🇪", "漢字", "12345", "one", " the", " user", "<|im_start|>"]
TRICKY = st.one_of(st.text(max_size=30), st.lists(st.sampled_from(SPECIALS), max_size=8).map("".join))


def build(directory: Path, data: bytes, tokenizer: ChatTokenizer, options: Options = ALL, name="c.jsonl") -> Store:
    """Tokenize a corpus given as bytes."""
    (directory / name).write_bytes(data)
    tokenize((str(directory / name),), tokenizer, directory / "store", options)
    return Store(directory / "store")


def loss_texts(store: Store, number: int, reference) -> list[str]:
    """A sample's loss spans, each decoded."""
    ids, spans = store.sample(number)
    return [reference.decode(ids[start:end].tolist()) for start, end in spans.reshape(-1, 2)]


def assert_equals_transformers(store: Store, conversations: list[list[dict]], reference, end: str) -> None:
    """Ids are those of `apply_chat_template`, and the loss lies on each assistant content and its end-of-turn token."""
    assert len(store) == len(conversations)
    for number, messages in enumerate(conversations):
        expected = reference.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert store.sample(number)[0].tolist() == expected
        contents = [message["content"] for message in messages if message["role"] == "assistant"]
        assert loss_texts(store, number, reference) == [content + end for content in contents]


@given(st.lists(st.lists(TRICKY.filter(lambda text: END not in text), min_size=2, max_size=7), min_size=1, max_size=5))
def test_tiny_tokenizer_equals_transformers(tiny, tiny_reference, contents):
    conversations = [chat(*turns) for turns in contents]
    with tempfile.TemporaryDirectory() as directory:
        store = build(Path(directory), jsonl(conversations), tiny)
        # content and end of turn are found token by token: the template has a newline before either
        assert_equals_transformers(store, conversations, tiny_reference, END)


@pytest.mark.parametrize("lead", ["", "\n", "\n\n", " ", "  \n ", "\t"])
@pytest.mark.parametrize("tail", ["", "\n", " ", "\n\n \n"])
def test_default_target_equals_transformers_whatever_surrounds_an_answer(
    target_directory, target_reference, tmp_path, lead, tail
):
    """A newline of the answer may melt into the template's own: such a token belongs to the prompt."""
    conversations = [chat("Hi", f"{lead}Hello 2024{tail}", "and?", f"{lead}é👩‍👩‍👧{tail}")]
    store = build(tmp_path, jsonl(conversations), load_tokenizer(str(target_directory)))
    expected = target_reference.apply_chat_template(conversations[0], tokenize=True, return_dict=False)
    assert store.sample(0)[0].tolist() == expected
    for text, content in zip(loss_texts(store, 0, target_reference), (f"Hello 2024{tail}", f"é👩‍👩‍👧{tail}"), strict=True):
        assert text.endswith(f"{content}<|im_end|>")
        assert (lead + content).endswith(text.removesuffix("<|im_end|>"))
        assert lead or text == f"{content}<|im_end|>"


@pytest.mark.parametrize("name", ["oasst.messages.jsonl.zst", "gsm8k-train.messages.jsonl.zst"])
def test_real_corpora_equal_transformers(real_data, target_directory, target_reference, tmp_path, name):
    records = list(islice(read_records((str(real_data / name),)), 200))
    assert_corpus_equals_transformers(records, target_directory, target_reference, tmp_path)


def assert_corpus_equals_transformers(records, target_directory, reference, directory):
    """The ids of real records; the loss is where each assistant content is."""
    store = build(directory, b"\n".join(record.data for record in records), load_tokenizer(str(target_directory)))
    lines = store.column("line").tolist()
    assert len(lines) > 0.9 * len(records)
    for number, line in enumerate(lines):
        messages = json.loads(records[line - 1].data)["messages"]
        assert store.sample(number)[0].tolist() == reference.apply_chat_template(messages, tokenize=True, return_dict=False)
        contents = [message["content"] for message in messages if message["role"] == "assistant"]
        texts = loss_texts(store, number, reference)
        assert len(texts) == len(contents)
        for text, content in zip(texts, contents, strict=True):
            assert text == f"{content}<|im_end|>" or (
                content[:1].isspace() and f"{content}<|im_end|>".endswith(text) and len(text) > len(content.lstrip())
            )


def test_whitespace_between_content_and_end_of_turn_carries_loss(tiny, tiny_reference, tmp_path):
    template = tiny.template.replace("'<|im_end|>'", "'\n\n<|im_end|>'")
    store = build(tmp_path, jsonl([chat("a", "b", "c", "d")]), replace(tiny, template=template))
    assert loss_texts(store, 0, tiny_reference) == [f"b\n\n{END}", f"d\n\n{END}"]


@pytest.mark.parametrize(
    ("tail", "learnt"), [("]<|im_end|>", f"]{END}"), ("</a>\n<|pad|><|im_end|>\n", f"</a>\n<|pad|>{END}")]
)
def test_what_a_template_writes_before_the_end_token_is_learnt_too(tiny, tiny_reference, tmp_path, tail, learnt):
    """At serving the model writes it itself, or it would never come to the end token."""
    template = tiny.template.replace("'<|im_end|>'", json.dumps(tail))
    store = build(tmp_path, jsonl([chat("a", "b", "c", "d")]), replace(tiny, template=template))
    assert loss_texts(store, 0, tiny_reference) == [f"b{learnt}", f"d{learnt}"]


def test_a_template_without_end_of_turn_gives_loss_to_the_content_alone(tiny, tiny_reference, tmp_path):
    template = tiny.template.replace("'<|im_end|>'", "'|'")
    store = build(tmp_path, jsonl([chat("a", "b", "c", "d")]), replace(tiny, template=template))
    assert loss_texts(store, 0, tiny_reference) == ["b", "d"]


def test_turns_that_touch_share_one_span(tiny, tiny_reference, tmp_path):
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    messages = [{"role": role, "content": role} for role in ("user", "assistant", "assistant", "user", "assistant")]
    store = build(tmp_path, jsonl([messages]), replace(tiny, template=template))
    assert loss_texts(store, 0, tiny_reference) == [f"assistant{END}assistant{END}", f"assistant{END}"]


BAD = {
    "not JSON": b'{"messages": [',
    "not a JSON object": b"[1]",
    "no list of messages": b'{"text": "a"}',
    "a message without a role": b'{"messages": [{"content": "a"}]}',
    "a message whose content is not text": b'{"messages": [{"role": "user", "content": null}]}',
    "text with a lone surrogate": b'{"messages": [{"role": "assistant", "content": "\\ud800"}]}',
    "no assistant turn": b'{"messages": [{"role": "user", "content": "a"}]}',
    "longer than --max-length": jsonl([chat("a", "many words " * 200)]).strip(),
}


def test_bad_records_are_set_aside_with_their_reason(tiny, tmp_path):
    good = jsonl([chat("a", "b")]).strip()
    lines = [good, *(line for bad in BAD.values() for line in (bad, good))]
    store = build(tmp_path, b"\n".join(lines), tiny, ALL._replace(max_length=100, max_reject_share=0.5))
    assert store.manifest["counts"]["rejected"] == dict.fromkeys(sorted(BAD), 1)
    assert store.manifest["counts"]["records"] == len(lines)
    assert store.column("line").tolist() == list(range(1, len(lines) + 1, 2))
    rejects = unzstd_lines(tmp_path / "store" / "rejects.jsonl.zst")
    assert [(reject["line"], reject["reason"].split(":")[0]) for reject in rejects] == [
        (2 * number, reason) for number, reason in enumerate(BAD, start=1)
    ]
    for reject, data in zip(rejects, BAD.values(), strict=True):
        assert reject["source"] == str(tmp_path / "c.jsonl")
        assert data.decode().startswith(reject["excerpt"])


@pytest.mark.parametrize("length", [2, 15, 16, 17, 18])
def test_max_length_is_inclusive(tiny, tiny_reference, tmp_path, length):
    conversations = [chat("a", "b" * count) for count in range(1, 8)]
    sizes = [len(tiny_reference.apply_chat_template(c, tokenize=True, return_dict=False)) for c in conversations]
    fitting = [size for size in sizes if size <= length]
    if not fitting:
        with pytest.raises(UserError, match="longer than --max-length"):
            build(tmp_path, jsonl(conversations), tiny, Options(length, 1.0))
        return
    assert build(tmp_path, jsonl(conversations), tiny, Options(length, 1.0)).column("length").tolist() == fitting


def test_too_many_rejects_leave_nothing_but_the_rejects(tiny, tmp_path):
    data = jsonl([chat("a", str(n)) for n in range(3)]) + b"x\n"
    with pytest.raises(UserError, match=r"1 of 4 records rejected \(1 not JSON\)"):
        build(tmp_path, data, tiny, Options(100, 0.24))
    assert sorted(os.listdir(tmp_path)) == ["c.jsonl", "store.rejects.jsonl.zst"]
    assert [reject["line"] for reject in unzstd_lines(tmp_path / "store.rejects.jsonl.zst")] == [4]
    assert len(build(tmp_path, data, tiny, Options(100, 0.25))) == 3


def test_a_corpus_of_which_nothing_is_kept_is_an_error_at_any_share(tiny, tmp_path):
    with pytest.raises(UserError, match="1 of 1 records rejected"):
        build(tmp_path, b"x\n", tiny, Options(100, 1.0))


@pytest.mark.parametrize("data", [b"", b"\n\n \n"])
def test_a_corpus_without_records_is_an_error(tiny, tmp_path, data):
    with pytest.raises(UserError, match="no records"):
        build(tmp_path, data, tiny)
    assert os.listdir(tmp_path) == ["c.jsonl"]


SPELLINGS = {
    "plain.jsonl": lambda data: data,
    "unended.jsonl": lambda data: data.rstrip(b"\n"),
    "crlf.jsonl": lambda data: data.replace(b"\n", b"\r\n"),
    "bom.jsonl": lambda data: b"\xef\xbb\xbf" + data,
    "blank.jsonl": lambda data: b"\n \n" + data.replace(b"\n", b"\n\n\r\n"),
    "a.jsonl.gz": gzip.compress,
    "a.jsonl.zst": zstandard.compress,
    "frames.jsonl.zst": lambda data: b"".join(zstandard.compress(data[at : at + 100]) for at in range(0, len(data), 100)),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_same_records_give_the_same_store_in_any_spelling(tiny, tmp_path, name):
    data = jsonl([chat("a", f"b\u2028{n}\x85", "c\r", "d") for n in range(20)])
    (tmp_path / "plain").mkdir()
    expected = build(tmp_path / "plain", data, tiny)
    store = build(tmp_path, SPELLINGS[name](data), tiny, name=name)
    assert store.fingerprint == expected.fingerprint
    assert len(store) == 20
    assert not store.manifest["counts"]["rejected"]


def test_several_files_follow_one_another(tiny, tmp_path):
    for name, content in (("a.jsonl", "x"), ("b.jsonl", "y")):
        (tmp_path / name).write_bytes(jsonl([chat("q", content)] * 2))
    inputs = tuple(str(tmp_path / name) for name in ("b.jsonl", "a.jsonl"))
    tokenize(inputs, tiny, tmp_path / "store", ALL)
    rows = Store(tmp_path / "store").index.to_pylist()
    assert [(row["source"], row["line"]) for row in rows] == [(inputs[0], 1), (inputs[0], 2), (inputs[1], 1), (inputs[1], 2)]


def test_of_equal_samples_the_first_is_kept_and_the_others_name_it(tiny, tmp_path):
    """What a template does not show makes no difference, and duplicates are not held against --max-reject-share."""
    data = jsonl([chat("a", "b"), chat("c", "d")] * 3) + b'{"id": 1, "messages": [{"role": "assistant", "content": "d"}]}\n'
    store = build(tmp_path, data, tiny, Options(max_reject_share=0))
    assert store.column("line").tolist() == [1, 2, 7]
    assert store.manifest["counts"]["rejected"] == {"duplicate": 4}
    rejects = unzstd_lines(store.path / "rejects.jsonl.zst")
    name = tmp_path / "c.jsonl"
    assert [(r["line"], r["reason"]) for r in rejects] == [
        (line, f"duplicate: of {name}:{first}") for line, first in ((3, 1), (4, 2), (5, 1), (6, 2))
    ]


def test_equal_samples_are_all_kept_on_demand(tiny, tmp_path):
    store = build(tmp_path, jsonl([chat("a", "b")] * 2), tiny, Options(keep_duplicates=True))
    assert len(store) == 2
    assert len(set(store.index["key"].to_pylist())) == 1


def test_more_records_than_one_batch(tiny, tiny_reference, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_prep.tokenize.BATCH", 4)
    lines = [jsonl([chat("a", f"b{number}")]).strip() if number % 5 else b"x" for number in range(1, 24)]
    store = build(tmp_path, b"\n".join(lines), tiny)
    assert store.column("line").tolist() == [number for number in range(1, 24) if number % 5]
    texts = [loss_texts(store, number, tiny_reference) for number in range(len(store))]
    assert texts == [[f"b{number}{END}"] for number in range(1, 24) if number % 5]


def snapshot(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Inode, time of change and bytes of each file."""
    stats = {path: path.stat() for path in sorted(directory.iterdir())}
    return {path.name: (stat.st_ino, stat.st_mtime_ns, path.read_bytes()) for path, stat in stats.items()}


def test_the_same_request_again_leaves_the_store_as_it_is(tiny_directory, tmp_path):
    (tmp_path / "c.jsonl").write_bytes(jsonl([chat("a", "b")]))
    request = ["tokenize", tmp_path / "c.jsonl", "--tokenizer", tiny_directory, "-o", tmp_path / "store"]
    assert run(*request).exit_code == 0
    before = snapshot(tmp_path / "store")
    again = run(*request)
    assert again.exit_code == 0
    assert "already holds this store" in again.stdout
    assert snapshot(tmp_path / "store") == before


@pytest.mark.parametrize("change", ["corpus", "options", "tokenizer", "template"])
def test_another_request_is_refused_and_leaves_the_store_as_it_is(tiny, tmp_path, change):
    data = jsonl([chat("a", "b")])
    build(tmp_path, data, tiny)
    before = snapshot(tmp_path / "store")
    other = {"tokenizer": tiny, "options": ALL}
    if change == "corpus":
        data += jsonl([chat("c", "d")])
    elif change == "options":
        other["options"] = ALL._replace(max_length=1000)
    elif change == "template":
        other["tokenizer"] = replace(tiny, template=tiny.template + "\n")
    else:
        backend = type(tiny.backend).from_str(tiny.backend.to_str())
        backend.add_special_tokens(["<|extra|>"])
        other["tokenizer"] = replace(tiny, backend=backend)
    with pytest.raises(UserError, match="holds a store of other inputs or options"):
        build(tmp_path, data, **other)
    assert snapshot(tmp_path / "store") == before


@pytest.mark.parametrize("name", ["c.jsonl.zst", "c.jsonl.gz", "c.json.gz"])
def test_a_truncated_file_gives_what_is_before_the_damage_and_says_so(tiny, tmp_path, name):
    messages = [chat("a", f"{number * 7919 % 1000003:x}" * 20) for number in range(9_000)]
    data = jsonl(messages) if "jsonl" in name else json.dumps([{"messages": m} for m in messages]).encode()
    packed = zstandard.compress(data) if name.endswith("zst") else gzip.compress(data)
    (tmp_path / "b.jsonl").write_bytes(jsonl([chat("next", "file")]))
    (tmp_path / name).write_bytes(packed[: len(packed) // 2])
    manifest = tokenize((str(tmp_path / name), str(tmp_path / "b.jsonl")), tiny, tmp_path / "store", ALL).manifest
    assert manifest["counts"]["rejected"] == {"damaged or truncated compressed file": 1}
    assert 1 < len(Store(tmp_path / "store")) < 9_000
    assert Store(tmp_path / "store").index["line"].to_pylist()[-1] == 1, "the next file is read"
    assert manifest["lost_files"][0].startswith(
        f"{tmp_path / name} from record {len(Store(tmp_path / 'store'))} on: damaged"
    )


def test_a_fault_halfway_leaves_nothing(tiny, tmp_path):
    def full(status) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "c.jsonl").write_bytes(jsonl([chat("a", "b")]))
    with pytest.raises(UserError, match="cannot write: No space left on device"):
        tokenize((str(tmp_path / "c.jsonl"),), tiny, tmp_path / "store", ALL, full)
    assert os.listdir(tmp_path) == ["c.jsonl"]


def test_special_tokens_are_counted(tiny, tmp_path):
    manifest = build(tmp_path, jsonl([chat("a", "b")] * 3), tiny).manifest
    assert manifest["special_tokens"] == {"0": 3, "1": 6, "2": 6}


def test_spans_are_ascending_within_the_sample_and_apart(tiny, tmp_path):
    store = build(tmp_path, jsonl([chat(*"abcdef"), chat("x", "")]), tiny)
    for number in range(len(store)):
        ids, spans = store.sample(number)
        assert (np.diff(spans.astype(int)) > 0).all()
        assert spans[-1] <= len(ids)


@pytest.mark.parametrize("name", ["shard-00000.arrow", "index.parquet", "store.json"])
def test_a_damaged_store_is_not_taken_for_the_one_asked_for(tiny, tmp_path, name):
    data = jsonl([chat("a", "b")])
    path = build(tmp_path, data, tiny).path / name
    spoilt = bytearray(path.read_bytes())
    spoilt[len(spoilt) // 2] ^= 0x80
    path.write_bytes(spoilt)
    with pytest.raises(UserError, match=r"remove it"):
        build(tmp_path, data, tiny)
    assert path.read_bytes() == spoilt


def test_a_store_that_appears_meanwhile_is_left_as_it_is(tiny, tmp_path):
    (tmp_path / "c.jsonl").write_bytes(jsonl([chat("a", "b")]))
    store = tmp_path / "store"

    def appear(status) -> None:
        store.mkdir()
        (store / "store.json").write_text("theirs")

    with pytest.raises(UserError, match=r"appeared meanwhile.*what is finished is in .*store\.partial"):
        tokenize((str(tmp_path / "c.jsonl"),), tiny, store, ALL, appear)
    assert (store / "store.json").read_text() == "theirs"
    shutil.rmtree(store)
    assert len(tokenize((str(tmp_path / "c.jsonl"),), tiny, store, ALL).manifest["shards"]) == 1
    assert sorted(os.listdir(tmp_path)) == ["c.jsonl", "store"]


def test_a_corpus_that_changes_while_it_is_read_is_refused(tiny, tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_bytes(jsonl([chat("a", str(number)) for number in range(5)]))

    def cut(status):
        with path.open("ab") as file:
            file.write(b"more")

    with pytest.raises(UserError, match=r"c\.jsonl: changed while it was read"):
        tokenize((str(path),), tiny, tmp_path / "store", ALL, cut)
    assert os.listdir(tmp_path) == ["c.jsonl"]


def test_an_empty_file_among_plain_texts_asks_for_no_template(tiny, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}')
    (tmp_path / "b.jsonl").write_text("")
    bare = replace(tiny, template=None)
    made = tokenize((str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")), bare, tmp_path / "store", ALL)
    assert made.manifest["counts"]["samples"] == 1


@pytest.mark.parametrize("name", ["c.JSONL.GZ", "c.jsonl.Zst"])
def test_endings_count_in_any_case(tiny, tmp_path, name):
    data = jsonl([chat("a", "b")])
    packed = gzip.compress(data) if name.endswith("GZ") else zstandard.compress(data)
    assert len(build(tmp_path, packed, tiny, name=name)) == 1
