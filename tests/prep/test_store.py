"""The token store: what goes in comes out, in the stated types, mapped without a copy."""

import json
import tempfile
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_prep.errors import Reject, UserError
from dflash_prep.files import file_digest
from dflash_prep.sample import Outcome
from dflash_prep.store import Store
from dflash_prep.store_writer import StoreWriter
from tests.prep.support import ORIGIN, add, unzstd_lines

SPECIAL = np.array([0, 2**32 - 1], np.uint32)
SAMPLES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30),
        st.lists(st.integers(1, 9), max_size=6).filter(lambda steps: len(steps) % 2 == 0),
    ),
    min_size=1,
    max_size=12,
)


def write(path: Path, samples, shard_bytes: int) -> dict:
    """Write a store of (ids, steps between span borders)."""
    path.mkdir()
    writer = StoreWriter(path, SPECIAL, shard_bytes=shard_bytes)
    for number, (ids, steps) in enumerate(samples):
        add(writer, ids, np.cumsum(steps, dtype=np.int64), f"file-{number % 2}", number + 1)
    return writer.finish(ORIGIN)


@given(SAMPLES, st.integers(1, 300))
def test_samples_come_back_and_the_shards_do_not_matter(samples, shard_bytes):
    with tempfile.TemporaryDirectory() as directory:
        whole = write(Path(directory, "whole"), samples, 1 << 20)
        parts = write(Path(directory, "parts"), samples, shard_bytes)
        assert whole["fingerprint"] == parts["fingerprint"]
        assert len(whole["shards"]) == 1
        assert sum(shard["samples"] for shard in parts["shards"]) == len(samples)
        store = Store(Path(directory, "parts"))
        assert len(store) == len(samples)
        for number, (ids, steps) in enumerate(samples):
            got_ids, got_spans = store.sample(number)
            assert got_ids.dtype == got_spans.dtype == np.uint32
            assert got_ids.tolist() == ids
            assert got_spans.tolist() == np.cumsum(steps, dtype=int).tolist()


@given(SAMPLES)
def test_index_and_counts_say_what_the_samples_are(samples):
    with tempfile.TemporaryDirectory() as directory:
        manifest = write(Path(directory, "store"), samples, 60)
        rows = Store(Path(directory, "store")).index.to_pylist()
    loss = [[set(range(start, end)) for start, end in pairs(steps)] for _, steps in samples]
    for number, (row, (ids, _)) in enumerate(zip(rows, samples, strict=True)):
        assert (row["sample"], row["length"], row["source"], row["line"]) == (
            number,
            len(ids),
            f"file-{number % 2}",
            number + 1,
        )
        assert row["loss_tokens"] == sum(map(len, loss[number]))
        assert row["eligible"] == sum(at + 1 in span for span in loss[number] for at in span)
        assert len(bytes.fromhex(row["key"])) == 16
    places = [(row["shard"], row["row"]) for row in rows]
    assert places == [(s, r) for s, shard in enumerate(manifest["shards"]) for r in range(shard["samples"])]
    counts = manifest["counts"]
    assert counts["samples"] == counts["records"] == len(samples)
    assert counts["tokens"] == sum(len(ids) for ids, _ in samples)
    assert counts["longest"] == max(len(ids) for ids, _ in samples)
    for name in ("loss_tokens", "eligible"):
        assert counts[name] == sum(row[name] for row in rows)
    flat = [token for ids, _ in samples for token in ids]
    assert manifest["special_tokens"] == {str(t): flat.count(t) for t in SPECIAL.tolist() if t in flat}


def pairs(steps) -> list[tuple[int, int]]:
    """The spans between borders given by their distances."""
    borders = np.cumsum(steps, dtype=int).tolist()
    return list(zip(borders[::2], borders[1::2], strict=True))


@given(SAMPLES, st.data())
def test_fingerprint_changes_with_the_content(samples, data):
    number = data.draw(st.integers(0, len(samples) - 1))
    ids, steps = samples[number]
    position = data.draw(st.integers(0, len(ids) - 1))
    other = [*ids[:position], ids[position] ^ 1, *ids[position + 1 :]]
    with tempfile.TemporaryDirectory() as directory:
        first = write(Path(directory, "a"), samples, 100)["fingerprint"]
        changed = write(Path(directory, "b"), [*samples[:number], (other, steps), *samples[number + 1 :]], 100)
        spans = write(Path(directory, "c"), [*samples[:number], (ids, [*steps, 1, 1]), *samples[number + 1 :]], 100)
        longer = write(Path(directory, "d"), [*samples, samples[0]], 100)
    assert len({first, changed["fingerprint"], spans["fingerprint"], longer["fingerprint"]}) == 4


def test_fingerprint_depends_on_the_order(tmp_path):
    samples = [([1, 2, 3], [1, 2]), ([4, 5], [1, 1])]
    first, turned = (write(tmp_path / name, part, 100) for name, part in (("a", samples), ("b", samples[::-1])))
    assert first["fingerprint"] != turned["fingerprint"]


def test_columns_have_exactly_the_stated_types(tiny_store):
    for shard in Store(tiny_store).manifest["shards"]:
        with ipc.open_file(tiny_store / shard["file"]) as file:
            assert file.num_record_batches == 1
            assert file.schema.names == ["input_ids", "loss_spans"]
            assert [field.type for field in file.schema] == [pa.list_(pa.uint32())] * 2
    schema = pq.read_schema(tiny_store / "index.parquet")
    assert {field.name: field.type for field in schema} == {
        "sample": pa.uint32(),
        "length": pa.uint32(),
        "loss_tokens": pa.uint32(),
        "shard": pa.uint32(),
        "row": pa.uint32(),
        "source": pa.dictionary(pa.int32(), pa.string()),
        "line": pa.uint64(),
        "key": pa.string(),
        "eligible": pa.uint32(),
    }
    metadata = pq.read_metadata(tiny_store / "index.parquet")
    assert {metadata.row_group(0).column(i).compression for i in range(metadata.num_columns)} == {"ZSTD"}
    assert pl.read_parquet(tiny_store / "index.parquet").height == 60


def test_samples_are_views_into_the_mapped_file(tiny_store):
    store = Store(tiny_store)
    before = pa.total_allocated_bytes()
    for number in range(len(store)):
        for array in store.sample(number):
            assert not array.flags.owndata
            assert not array.flags.writeable
    assert pa.total_allocated_bytes() - before < 20_000  # the index alone
    assert store.sample(5)[0].ctypes.data == store.sample(5)[0].ctypes.data
    shard = tiny_store / store.manifest["shards"][0]["file"]
    assert shard.read_bytes().find(store.sample(0)[0].tobytes()) > 0


def test_shards_are_cut_where_they_are_full_and_have_their_checksums(tiny_store):
    store = Store(tiny_store)
    shards = store.manifest["shards"]
    assert len(shards) > 2
    assert [shard["file"] for shard in shards] == [f"shard-{n:05d}.arrow" for n in range(len(shards))]
    sizes = [sum(array.nbytes for array in store.sample(number)) for number in range(len(store))]
    owner = store.column("shard")
    for number, shard in enumerate(shards):
        held = np.array(sizes)[owner == number]
        assert held[:-1].sum() < 2_000
        assert held.sum() >= 2_000 or number == len(shards) - 1
        path = tiny_store / shard["file"]
        assert path.stat().st_size == shard["bytes"]
        assert file_digest(path) == shard["checksum"]


def test_rejects_are_counted_by_reason_and_listed(tmp_path):
    path = tmp_path / "store"
    path.mkdir()
    writer = StoreWriter(path)
    add(writer, [1, 2], [0, 2], "a", 1)
    writer.take(Outcome("a", 2, (Reject("template error: first"),), "x" * 100))
    writer.take(Outcome("b", 9, (Reject("template error: second"),), "\ufffd\x00"))
    writer.take(Outcome("b", 10, (Reject("not JSON"),), "\u2028"))
    counts = writer.finish(ORIGIN)["counts"]
    assert counts["rejected"] == {"not JSON": 1, "template error": 2}
    assert (counts["records"], counts["samples"]) == (4, 1)
    lines = unzstd_lines(path / "rejects.jsonl.zst")
    assert [(line["source"], line["line"], line["reason"]) for line in lines] == [
        ("a", 2, "template error: first"),
        ("b", 9, "template error: second"),
        ("b", 10, "not JSON"),
    ]
    assert [line["excerpt"] for line in lines] == ["x" * 100, "\ufffd\x00", "\u2028"]


@pytest.mark.parametrize("fault", ["nothing", "no manifest", "damaged", "a list", "another version", "shard gone", "short"])
def test_a_store_that_is_none_is_refused(tmp_path, fault):
    path = tmp_path / "store"
    if fault != "nothing":
        write(path, [([1, 2, 3], [1, 2])], 100)
    manifest = path / "store.json"
    if fault == "no manifest":
        manifest.unlink()
    elif fault == "damaged":
        manifest.write_text(manifest.read_text()[:-20])
    elif fault == "a list":
        manifest.write_text("[]")
    elif fault == "another version":
        manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    elif fault == "shard gone":
        (path / "shard-00000.arrow").unlink()
    elif fault == "short":
        (path / "shard-00000.arrow").write_bytes(b"ARROW1")
    with pytest.raises(UserError, match=str(path)):
        Store(path)


def test_a_damaged_index_or_shard_is_a_fault_of_the_input(tmp_path):
    path = tmp_path / "store"
    write(path, [([1, 2, 3], [1, 2])], 100)
    shard = path / "shard-00000.arrow"
    shard.write_bytes(b"x" * shard.stat().st_size)
    with pytest.raises(UserError, match=r"shard-00000\.arrow"):
        Store(path).sample(0)
    (path / "index.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"index\.parquet"):
        Store(path).column("length")


BROKEN = {
    "fingerprint": (None, "x"),
    "tokenizer": (None, {}, {"name": "a", "fingerprint": 3}, {"fingerprint": "0" * 32}),
    "counts": (None, {}, {"samples": 2}),
    "special_tokens": (None, [], {"0": "many"}),
    "index_checksum": (None, 7),
    "shards": (None, [], [{}], ["shard-00000.arrow"]),
}
CASES = [(key, value) for key, values in BROKEN.items() for value in (*values, KeyError)]


@pytest.fixture
def made(tmp_path) -> Path:
    """A store of three samples in several shards, to be spoilt."""
    write(tmp_path / "store", [([1, 2, 3], [1, 2]), ([4, 5], [0, 2]), ([6, 7, 8, 9], [1, 3])], 20)
    return tmp_path / "store"


def edit(path: Path, change) -> None:
    """Change store.json."""
    manifest = json.loads((path / "store.json").read_text())
    change(manifest)
    (path / "store.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(("key", "value"), CASES)
def test_store_json_that_states_what_cannot_be_is_refused(made, key, value):
    edit(made, lambda manifest: manifest.pop(key) if value is KeyError else manifest.update({key: value}))
    with pytest.raises(UserError, match=f"states no valid {key};.* remove it and tokenize again"):
        Store(made)


@pytest.mark.parametrize(
    ("key", "value"),
    [("file", "../a.arrow"), ("file", None), ("samples", 0), ("samples", "1"), ("bytes", -1), ("checksum", None)],
)
def test_a_shard_that_is_not_described_is_refused(made, key, value):
    edit(made, lambda manifest: manifest["shards"][0].update({key: value}))
    with pytest.raises(UserError, match="states no valid shards"):
        Store(made)


def test_numbers_of_samples_agree(made):
    edit(made, lambda manifest: manifest["counts"].update(samples=4))
    with pytest.raises(UserError, match="another number of samples"):
        Store(made)
    edit(made, lambda manifest: manifest["shards"][0].update(samples=manifest["shards"][0]["samples"] + 1))
    with pytest.raises(UserError, match="has 3 rows"):
        Store(made).column("length")
    with pytest.raises(UserError, match="number of samples"):
        Store(made).batch(0)


@pytest.mark.parametrize("name", ["index.parquet", "shard-00000.arrow", "shard-00001.arrow"])
def test_a_changed_or_missing_file_is_found(made, name):
    Store(made).check_files()
    opened = Store(made)
    data = bytearray((made / name).read_bytes())
    data[len(data) // 2] ^= 1
    (made / name).write_bytes(data)
    with pytest.raises(UserError, match=r"its checksum differs.*remove it and tokenize again"):
        opened.check_files()
    (made / name).unlink()
    with pytest.raises(UserError, match="missing"):
        opened.check_files()


def test_an_index_that_is_another_s_is_refused(made, tmp_path):
    write(tmp_path / "other", [([1, 2, 4], [1, 2]), ([4, 5], [0, 2]), ([6, 7, 8, 9], [1, 3])], 20)
    (made / "index.parquet").write_bytes((tmp_path / "other" / "index.parquet").read_bytes())
    with pytest.raises(UserError, match="checksum differs"):
        Store(made).column("length")
