"""What there is to plan, from stores and from tables of lengths; each bad table is refused in one line."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_prep.errors import UserError
from dflash_prep.pool import encode, from_lengths, from_stores
from dflash_prep.store import Store
from dflash_prep.stores import Stores
from tests.prep.support import assert_user_error, make_store, run


def table(path: Path, **columns: object) -> Path:
    """Write a table of lengths."""
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture
def file(tmp_path) -> Path:
    """Where a test writes its table."""
    return tmp_path / "lengths.parquet"


def refusal(path: Path) -> str:
    """Why a table is refused; the command says the same in one line."""
    with pytest.raises(UserError) as caught:
        from_lengths(path, chance=True)
    assert_user_error(run("plan-epochs", "--lengths", path, "-o", path.with_suffix(".plan")), str(caught.value))
    assert not path.with_suffix(".plan").exists()
    return str(caught.value)


def test_a_table_of_lengths(file):
    pool = from_lengths(table(file, length=[5, 9, 2, 7], loss_tokens=[4, 9, 0, 1], source=["b", "a", "b", "c"]), chance=True)
    assert pool.length.tolist() == [5, 9, 2, 7] and pool.length.dtype == np.int64
    assert pool.loss_tokens.tolist() == [4, 9, 0, 1]
    assert pool.eligible.tolist() == [3, 8, 0, 0]  # one span: its last position starts no block
    assert pool.sources == ["a", "b", "c"] and pool.source.tolist() == [1, 0, 1, 2]
    assert pool.chance.dtype == np.uint32 and len(set(pool.chance.tolist())) == 4
    assert pool.origin == {"lengths": {"path": str(file), "fingerprint": pool.fingerprint}}
    assert len(pool) == 4


def test_missing_columns_are_all_loss_and_one_source_without_a_name(file):
    pool = from_lengths(table(file, length=[5, 9], other=["x", "y"]), chance=False)
    assert pool.loss_tokens.tolist() == [5, 9] and pool.eligible.tolist() == [4, 8]
    assert pool.sources == [""] and pool.source.tolist() == [0, 0]
    assert pool.chance is None


def test_a_source_may_be_null_or_a_dictionary(file):
    source = pa.array(["b", None, "a", "b"]).dictionary_encode()
    pool = from_lengths(table(file, length=[1, 2, 3, 4], source=source), chance=False)
    assert [pool.sources[number] for number in pool.source] == ["b", "", "a", "b"]


@pytest.mark.parametrize("kind", [pa.uint8(), pa.int16(), pa.uint32(), pa.int64(), pa.uint64()], ids=str)
def test_any_whole_numbers_will_do(file, kind):
    pool = from_lengths(table(file, length=pa.array([1, 100], kind), loss_tokens=pa.array([0, 100], kind)), chance=False)
    assert pool.length.tolist() == [1, 100] and pool.loss_tokens.tolist() == [0, 100]
    assert pool.fingerprint == from_lengths(table(file, length=[1, 100], loss_tokens=[0, 100]), chance=False).fingerprint


def test_the_fingerprint_is_of_the_content_alone(file, tmp_path):
    columns = {"length": list(range(1, 2001)), "loss_tokens": list(range(2000)), "source": ["a", "b"] * 1000}
    first = from_lengths(table(file, **columns), chance=False).fingerprint
    pq.write_table(pa.table(columns), tmp_path / "again.parquet", compression="none", row_group_size=7)
    assert from_lengths(tmp_path / "again.parquet", chance=True).fingerprint == first
    for name, other in {
        "length": [2000, *range(2, 2001)],
        "loss_tokens": [1, *range(1, 2000)],
        "source": ["a"] * 2000,
    }.items():
        assert from_lengths(table(file, **columns | {name: other}), chance=False).fingerprint != first


def test_who_is_held_out_does_not_follow_the_lengths(file):
    """With no content to hash it is the row's number that decides: the same rows, whatever they hold."""
    chance = from_lengths(table(file, length=[5] * 50), chance=True).chance
    assert from_lengths(table(file, length=list(range(1, 101))), chance=True).chance[:50].tolist() == chance.tolist()


def test_no_column_of_lengths(file):
    assert "has no column 'length'" in refusal(table(file, lengths=[1, 2], loss_tokens=[1, 2]))


@pytest.mark.parametrize("name", ["length", "loss_tokens"])
@pytest.mark.parametrize(
    "values", [[1.5, 2.0], ["1", "2"], [True, False], [[1], [2]]], ids=["float", "text", "bool", "list"]
)
def test_what_is_not_whole_numbers(file, name, values):
    kind = str(pa.array(values).type).partition("<")[0]
    text = refusal(table(file, **{"length": [5, 5], name: values}))
    assert f"column '{name}' is {kind}" in text and " with 0 nulls; give whole numbers" in text


@pytest.mark.parametrize("name", ["length", "loss_tokens"])
def test_nulls(file, name):
    assert f"column '{name}' is int64 with 1 nulls" in refusal(table(file, **{"length": [5, 5], name: [1, None]}))


@pytest.mark.parametrize("length", [0, -1, 2**24 + 1, 2**31, 2**40])
def test_lengths_out_of_range(file, length):
    assert "column 'length' holds numbers outside 1 to 16777216" in refusal(table(file, length=[5, length]))


@pytest.mark.parametrize("loss", [-1, 2**31])
def test_loss_tokens_out_of_range(file, loss):
    assert "column 'loss_tokens' holds numbers outside 0 to" in refusal(table(file, length=[5, 5], loss_tokens=[5, loss]))


def test_lengths_beyond_int64(file):
    text = refusal(table(file, length=pa.array([5, 2**64 - 1], pa.uint64())))
    assert "column 'length' holds numbers outside" in text


def test_more_loss_tokens_than_tokens(file):
    assert "row 2 has 6 loss_tokens of 5" in refusal(table(file, length=[5, 5, 5], loss_tokens=[5, 6, 0]))


@pytest.mark.parametrize(
    "source", [[["a"], ["b"]], [{"name": "a"}, {"name": "b"}], [b"a", b"\xff"]], ids=["list", "struct", "bytes"]
)
def test_sources_that_are_no_text(file, source):
    assert "column 'source'" in refusal(table(file, length=[5, 5], source=source))


def test_no_rows(file):
    assert "lists no sample" in refusal(table(file, length=pa.array([], pa.int64())))


@pytest.mark.parametrize("content", [b"", b"length\n5\n", b"PAR1" * 10])
def test_what_is_not_parquet(file, content):
    file.write_bytes(content)
    assert "cannot be read as Parquet" in refusal(file)


def test_a_file_cut_short(file):
    table(file, length=list(range(1, 10_000)))
    file.write_bytes(file.read_bytes()[:-100])
    assert "cannot be read as Parquet" in refusal(file)


def test_a_column_that_stands_there_twice(file):
    pq.write_table(pa.table([[1, 2], [3, 4]], names=["length", "length"]), file)
    assert "several columns 'length'" in refusal(file)


def test_what_is_no_file(file):
    assert "no such file" in refusal(file)
    file.mkdir()
    assert "is a directory; name a file" in refusal(file)


@given(names=st.lists(st.sampled_from(["b", "a", "ä", "", "a/b", "𝔘"]), min_size=1), pieces=st.integers(1, 4))
def test_names_are_numbered_in_alphabetical_order(names, pieces):
    chunks = [names[start::pieces] for start in range(pieces)]
    column = pa.chunked_array([pa.array(chunk, pa.string()) for chunk in chunks])
    numbers, known = encode(column)
    assert [known[number] for number in numbers] == [name for chunk in chunks for name in chunk]
    assert known == sorted(set(names))


def test_the_samples_of_stores(tmp_path):
    stores = Stores([make_store(tmp_path / "a", [5, 9, 3]), make_store(tmp_path / "b", [8])])
    pool = from_stores(stores, chance=True)
    assert pool.length.tolist() == [5, 9, 3, 8]
    assert pool.loss_tokens.tolist() == [4, 8, 2, 7]
    assert pool.eligible.tolist() == [3, 7, 1, 6]
    assert pool.sources == ["made"] and pool.source.tolist() == [0, 0, 0, 0]
    keys = [key for name in "ab" for key in Store(tmp_path / name).index["key"].to_pylist()]
    assert pool.chance.tolist() == [int(key[:8], 16) for key in keys]
    assert pool.fingerprint == stores.fingerprint and pool.origin == stores.origin()
    assert from_stores(stores, chance=False).chance is None


def test_equal_samples_are_held_out_together(tmp_path):
    """By content: wherever a sample stands, and however often."""
    one = from_stores(Stores([make_store(tmp_path / "a", list(range(3, 60)))]), chance=True)
    two = from_stores(Stores([tmp_path / "a", make_store(tmp_path / "b", list(range(3, 40)))]), chance=True)
    assert two.chance[: len(one)].tolist() == one.chance.tolist()
    assert two.chance[len(one) :].tolist() == one.chance[:37].tolist()
