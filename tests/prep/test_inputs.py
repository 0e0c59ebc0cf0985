"""Inputs: directories, patterns and standard input become the files of a corpus; what is passed over is counted."""

import gzip
import io
import sys
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from dflash_prep.errors import UserError
from dflash_prep.inputs import open_corpus
from dflash_prep.records import read_records
from tests.prep.support import make_store


def found(*names: object) -> tuple[list[str], int]:
    """The names of the files that some inputs mean, and the number of others."""
    with open_corpus(tuple(map(str, names))) as corpus:
        return [file.name for file in corpus.files], corpus.others


@pytest.fixture
def folder(tmp_path):
    """A directory with corpora, other files and a directory inside."""
    for name in (
        "b.jsonl",
        "a.JSON",
        "c.json.gz",
        "d.jsonl.zst",
        "e.parquet",
        "README.md",
        "x.txt.gz",
        "sub/f.jsonl",
        "sub/g",
    ):
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    (tmp_path / "folder" / "like.json").mkdir()
    return tmp_path / "folder"


def test_a_directory_is_its_corpus_files_in_order(folder):
    names = ["a.JSON", "b.jsonl", "c.json.gz", "d.jsonl.zst", "e.parquet", "sub/f.jsonl"]
    assert found(folder) == ([str(folder / name) for name in names], 3)


def test_patterns(folder):
    assert found(folder / "*.jsonl*")[0] == [str(folder / name) for name in ("b.jsonl", "d.jsonl.zst")]
    assert found(folder / "[ab].*")[0] == [str(folder / name) for name in ("a.JSON", "b.jsonl")]
    assert found(folder / "**" / "f.*")[0] == [str(folder / "sub" / "f.jsonl")]
    assert found(folder / "s*", folder / "b.jsonl")[0] == [str(folder / "sub" / "f.jsonl"), str(folder / "b.jsonl")]
    with pytest.raises(UserError, match="no file matches"):
        found(folder / "*.csv")


def test_a_name_that_looks_like_a_pattern_but_is_there(tmp_path):
    (tmp_path / "a[1].jsonl").write_bytes(b"")
    assert found(tmp_path / "a[1].jsonl") == ([str(tmp_path / "a[1].jsonl")], 0)


def test_what_our_own_commands_wrote_is_no_part_of_a_corpus(tmp_path):
    make_store(tmp_path / "store", [5, 6])
    names = ["a.jsonl", "store.rejects.jsonl.zst", "other.partial/parts/rejects-00000.jsonl.zst", "plan/epoch-000.parquet"]
    for name in [*names, "plan/plan.json"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    files, others = found(tmp_path)
    assert files == [str(tmp_path / "a.jsonl")]
    assert others == 4 + len(list((tmp_path / "store").iterdir()))


def test_a_file_named_by_itself_may_be_called_anything(folder):
    assert found(folder / "sub" / "g") == ([str(folder / "sub" / "g")], 0)


def parquet(lines: bytes) -> bytes:
    """A Parquet file with each line as a text."""
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": lines.decode().split("\n")}), sink)
    return sink.getvalue()


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress, parquet])
def test_standard_input_of_any_kind(monkeypatch, pack):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(pack(b'"a"\n"b"'))))
    with open_corpus(("-",)) as corpus:
        (file,) = corpus.files
        for _ in range(2):
            data = [record.data for record in read_records(file, ["text"])]
            assert data == [b'"a"', b'"b"'] or [row.value()["text"] for row in data] == ['"a"', '"b"']
        assert file.name == "-"
    assert not file.path.exists()


def test_a_file_that_is_named_twice_is_refused_whatever_it_is_named_by(folder, monkeypatch):
    (folder.parent / "link.jsonl").symlink_to(folder / "b.jsonl")
    monkeypatch.chdir(folder)
    names = [folder, folder / "b.jsonl", "b.jsonl", "./b.jsonl", folder / "b*", "../link.jsonl"]
    for first in names:
        for second in names:
            with pytest.raises(UserError, match="is read twice, first as "):
                found(first, second)
    assert len(found("b.jsonl", "a.JSON")[0]) == 2


def test_closed_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="-: standard input is closed"):
        found("-")


def test_no_room_for_standard_input(monkeypatch):
    def full(**options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"{}")))
    monkeypatch.setattr("dflash_prep.inputs.tempfile.NamedTemporaryFile", full)
    with pytest.raises(UserError, match="No space left on device; make room there, set TMPDIR"):
        found("-")


def test_standard_input_twice_is_refused():
    with pytest.raises(UserError, match="once only"):
        found("-", "-")


def test_linked_directories_are_followed_and_none_twice(tmp_path):
    for name in ("in/a.jsonl", "elsewhere/b.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "in")
    assert found(tmp_path / "in") == ([str(tmp_path / "in/a.jsonl"), str(tmp_path / "in/link/b.jsonl")], 0)


def test_no_name_is_no_directory():
    with pytest.raises(UserError, match="names nothing"):
        found("")
