"""Records: lines end at \\n alone, in plain, gzip and zstd files of one or many frames; damage is named."""

import gzip
import tempfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dflash_prep import corpus
from dflash_prep.corpus import read_records, split_lines
from dflash_prep.errors import UserError

LINES = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=12).map(str.encode), max_size=8)


def frames(data: bytes, parts: int) -> bytes:
    """Data as zstd frames of about equal size."""
    size = len(data) // parts + 1
    return b"".join(zstandard.compress(data[at : at + size]) for at in range(0, max(1, len(data)), size))


PACKERS = {
    "plain.jsonl": lambda data: data,
    "one.jsonl.gz": gzip.compress,
    "members.jsonl.gz": lambda data: gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :]),
    "one.jsonl.zst": zstandard.compress,
    "frames.jsonl.zst": lambda data: frames(data, 5),
}


def records(path: Path) -> list[tuple[str, int, bytes]]:
    """All records of one file."""
    return [tuple(record) for record in read_records((str(path),))]


@pytest.mark.parametrize("name", PACKERS)
@given(lines=LINES, ended=st.booleans(), chunk=st.integers(1, 64))
def test_every_line_that_is_not_blank_comes_back_with_its_number(name, lines, ended, chunk):
    lines = [*lines, b"\xe2\x80\xa8 and \xc2\x85 and \r and \x0c stay inside a line", b"", b" \t\r", b"last"]
    data = b"\n".join(lines) + b"\n" * ended
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "CHUNK", chunk)
        path = Path(directory, name)
        path.write_bytes(PACKERS[name](data))
        found = records(path)
    assert found == [(str(path), number, line) for number, line in enumerate(lines, start=1) if line.strip()]


@given(st.binary(max_size=60), st.integers(1, 9))
def test_split_lines_is_bytes_split(data, size):
    chunks = (data[at : at + size] for at in range(0, len(data), size))
    assert list(split_lines(chunks)) == data.split(b"\n")


def test_files_follow_one_another_each_with_its_own_numbers(tmp_path):
    paths = [tmp_path / name for name in ("b.jsonl", "a.jsonl.gz")]
    paths[0].write_bytes(b"1\n\n2")
    paths[1].write_bytes(gzip.compress(b"3\n"))
    found = list(read_records(tuple(map(str, paths))))
    assert [(Path(r.source).name, r.line, r.data) for r in found] == [
        ("b.jsonl", 1, b"1"),
        ("b.jsonl", 3, b"2"),
        ("a.jsonl.gz", 1, b"3"),
    ]


def test_a_zstd_file_may_hold_skippable_and_empty_frames(tmp_path):
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"abcd"
    path = tmp_path / "a.zst"
    path.write_bytes(skippable + zstandard.compress(b"a\n") + skippable + zstandard.compress(b"") + zstandard.compress(b"b"))
    assert [data for _, _, data in records(path)] == [b"a", b"b"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.gz", "a.zst"])
def test_an_empty_file_has_no_records(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    assert records(tmp_path / name) == []


NOISE = bytes((i * i * 31 + i // 7) % 251 for i in range(40_000))


@pytest.mark.parametrize("name", [name for name in PACKERS if name != "plain.jsonl"])
@pytest.mark.parametrize("share", [0.05, 0.45, 0.97, None])
def test_a_truncated_file_is_an_error_not_a_shorter_corpus(tmp_path, name, share):
    data = PACKERS[name](NOISE)
    path = tmp_path / name
    path.write_bytes(data[: int(len(data) * share)] if share else data[:-1])
    with pytest.raises(UserError, match="damaged or truncated"):
        records(path)


@pytest.mark.parametrize("name", ["a.gz", "a.zst"])
def test_a_file_that_is_not_what_its_name_says(tmp_path, name):
    (tmp_path / name).write_bytes(b'{"messages": []}\n' * 40)
    with pytest.raises(UserError, match="damaged or truncated"):
        records(tmp_path / name)


def test_damage_inside_a_gzip_file_is_found(tmp_path):
    data = bytearray(gzip.compress(NOISE))
    data[len(data) // 2] ^= 0x55
    (tmp_path / "a.gz").write_bytes(data)
    with pytest.raises(UserError, match="damaged or truncated"):
        records(tmp_path / "a.gz")


def test_a_missing_file_and_a_directory_are_named(tmp_path):
    with pytest.raises(UserError, match=r"gone\.jsonl"):
        records(tmp_path / "gone.jsonl")
    with pytest.raises(UserError, match="is a directory"):
        records(tmp_path)
