"""Records of every kind of file: lines, arrays and Parquet rows, whatever is wrong with the file behind them."""

import gzip
import json
import pickle
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dflash_prep import corpus, jsontext
from dflash_prep.errors import Reject
from dflash_prep.formats import COLUMNS
from dflash_prep.jsontext import from_json
from dflash_prep.records import CorpusFile, Lost, Record, read_records

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


def records(path: Path, columns=COLUMNS) -> list[Record]:
    """All records of one file."""
    return list(read_records(CorpusFile("c", path), columns))


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@given(
    values=st.lists(VALUES, max_size=6),
    indent=st.sampled_from([None, 0, 2]),
    escaped=st.booleans(),
    chunk=st.integers(1, 40),
)
def test_an_array_gives_its_elements(packed, values, indent, escaped, chunk):
    data = b"\xef\xbb\xbf" * escaped + json.dumps(values, indent=indent, ensure_ascii=escaped).encode() + b" \r\n"
    data = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[packed](data)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "CHUNK", chunk)
        path = Path(directory, f"a.json{packed}")
        path.write_bytes(data)
        found = records(path)
        assert [record[:2] for record in found] == [("c", number) for number in range(1, len(values) + 1)]
        assert [json.loads(record.data) for record in found] == values


@pytest.mark.parametrize(
    ("data", "kept", "reason"),
    [
        (b'[{"a": 1}, {"a": 2}', 2, "ends early"),
        (b'[{"a": 1}, {"a": ', 1, "broken or ends early"),
        (b'[{"a": 1}, ', 1, "broken or ends early"),
        (b'[{"a": 1} {"a": 2}]', 1, "out of place"),
        (b'[{"a": 1}, {a: 2}, {"a": 3}]', 1, "broken or ends early"),
        (b'[{"a": 1}] []', 1, "something follows"),
        (b"[", 0, "broken or ends early"),
        (b"[" * 100_000, 0, "broken or ends early"),
    ],
)
def test_a_broken_array_gives_what_is_before_the_fault(tmp_path, data, kept, reason):
    (tmp_path / "a.json").write_bytes(data)
    *before, last = records(tmp_path / "a.json")
    assert [json.loads(record.data) for record in before] == [{"a": number} for number in range(1, kept + 1)]
    assert isinstance(last.data, Lost)
    assert reason in str(last.data)
    assert last.line == kept + 1


def test_an_element_without_end_is_not_read_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK", 10)
    monkeypatch.setattr(jsontext, "LONGEST", 100)
    (tmp_path / "a.json").write_bytes(b'["' + b"x" * 10_000 + b'", 1]')
    (only,) = records(tmp_path / "a.json")
    assert isinstance(only.data, Reject)


def test_a_bad_element_costs_itself_alone(tmp_path):
    (tmp_path / "a.json").write_bytes(b'[{"a": 1, "a": 2}, {"b": "\xff"}, [3], {"c": 3}]')
    twice, invalid, array, good = records(tmp_path / "a.json")
    with pytest.raises(Reject, match="twice"):
        from_json(twice.data)
    assert from_json(invalid.data) == {"b": "\udcff"}, "a lone surrogate, which is refused later"
    assert (from_json(array.data), from_json(good.data)) == ([3], {"c": 3})


def test_lines_in_a_file_that_is_called_json(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\n{"a": 1}\n{"a": 2}')
    assert [(record.line, record.data) for record in records(tmp_path / "a.json")] == [(2, b'{"a": 1}'), (3, b'{"a": 2}')]


def test_a_long_window_and_many_frames(tmp_path):
    """`zstd --ultra --long=27` and beyond: the window is larger than decoders allow by themselves."""
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True, write_content_size=False)
    packer = zstandard.ZstdCompressor(compression_params=parameters)
    lines = [b"%d" % number for number in range(50_000)]
    half = packer.compressobj()
    data = half.compress(b"\n".join(lines[:25_000])) + half.flush() + zstandard.compress(b"\n" + b"\n".join(lines[25_000:]))
    (tmp_path / "a.jsonl.zst").write_bytes(data)
    assert [record.data for record in records(tmp_path / "a.jsonl.zst")] == lines


def test_a_record_of_20_megabytes(tmp_path):
    value = {"text": "x" * 20_000_000}
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps(value).encode(), 1))
    (tmp_path / "a.json").write_text(json.dumps([1, value]))
    assert json.loads(records(tmp_path / "a.jsonl.gz")[0].data) == value
    assert json.loads(records(tmp_path / "a.json")[1].data) == value


def test_parquet_rows_of_known_columns(tmp_path):
    messages = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "name": "x"}], None]
    table = pa.table({"messages": messages * 300, "picture": [b"large"] * 600, "tools": ["[]", None] * 300})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=250)
    found = records(tmp_path / "a.parquet")
    assert [record.line for record in found] == list(range(1, 601))
    assert found[0].data.value() == {"messages": [messages[0][0] | {"name": None}, messages[0][1]], "tools": "[]"}
    assert found[599].data.value() == {"messages": None, "tools": None}
    assert "assistant" in found[0].excerpt()


def test_parquet_of_other_columns_names_them(tmp_path):
    pq.write_table(pa.table({"a": [1, 2], "b": [3, 4]}), tmp_path / "a.parquet")
    assert [record.data.value() for record in records(tmp_path / "a.parquet")] == [{"a": None, "b": None}] * 2


@pytest.mark.parametrize("damage", ["text", "cut", "flipped"])
def test_a_damaged_parquet_file_is_one_lost_record(tmp_path, damage):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"text {number * number}" for number in range(3_000)]}), path, compression="zstd")
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[20:400] = bytes(380)
    path.write_bytes({"text": b"text", "cut": data[: len(data) // 2], "flipped": data}[damage])
    *_, last = records(path)
    assert isinstance(last.data, Reject)
    assert str(last.data).startswith("no Parquet file, or damaged: ")


def test_an_unreadable_file_is_one_lost_record(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(b"{}")

    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    (only,) = records(tmp_path / "a.jsonl")
    assert str(only.data) == "cannot read the corpus: Permission denied"
    assert (only.line, only.excerpt()) == (1, "")


def test_a_zst_that_repeats_itself_is_not_unpacked_at_once(tmp_path):
    """A megabyte of it could hold gigabytes."""
    line = b"x" * 4_000 + b"\n"
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(line * 40_000))
    chunks = [len(chunk) for chunk in corpus.read_chunks(tmp_path / "a.jsonl.zst")]
    assert sum(chunks) == len(line) * 40_000
    assert max(chunks) < 64 << 20
    assert (tmp_path / "a.jsonl.zst").stat().st_size < corpus.CHUNK


def test_rows_travel_as_what_they_hold(tmp_path):
    """Not with all the rows that were read with them."""
    pq.write_table(pa.table({"text": [str(number) * 200_000 for number in range(10)] * 6}), tmp_path / "a.parquet")
    rows = [record.data for record in records(tmp_path / "a.parquet")]
    sizes = [len(pickle.dumps(row)) for row in rows]
    assert max(sizes) < 1_000_000
    assert [pickle.loads(pickle.dumps(row)).value() for row in rows] == [row.value() for row in rows]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, 2**62], pa.timestamp("us")),
        pa.array([1, 1_000_000_001], pa.timestamp("ns")),
        pa.array([1, 3], pa.duration("ns")),
        pa.array([1, 2**31 - 1], pa.date32()),
        pa.array([1, 2], pa.timestamp("s", tz="Mars/Phobos")),
    ],
    ids=str,
)
def test_values_that_python_has_not_cost_no_more_than_their_row(tmp_path, column):
    struct = pa.StructArray.from_arrays(
        [pa.array(["user", "user"]), pa.array(["a", "b"]), column], ["role", "content", "at"]
    )
    messages = pa.ListArray.from_arrays([0, 1, 2], struct)
    pq.write_table(pa.table({"messages": messages}), tmp_path / "a.parquet")
    for record in records(tmp_path / "a.parquet"):
        assert isinstance(record.excerpt(), str)
        try:
            record.data.value()
        except Reject as reject:
            assert str(reject).startswith("a value that cannot be read")
