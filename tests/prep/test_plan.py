"""Plans: the files as the contract states them, a pure function of store, options and seed."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_prep.errors import UserError
from dflash_prep.files import file_digest, stream_digest
from dflash_prep.manifest import Plan
from dflash_prep.plan import PlanOptions, write_plan
from dflash_prep.store import Store
from dflash_prep.verify import verify
from tests.prep.support import make_store

STRATEGIES = {
    "sorted": {"strategy": "sorted"},
    "shuffled": {"strategy": "shuffled"},
    "bucketed": {"strategy": "bucketed"},
    "three buckets": {"strategy": "bucketed", "buckets": 3},
    "boundaries": {"strategy": "bucketed", "boundaries": (20, 50, 300)},
    "step": {"strategy": "bucketed", "bucket_scope": "step"},
    "packed": {"strategy": "packed"},
}


def plan(store: Path, output: Path, **options) -> Plan:
    """Write a plan and open it."""
    write_plan(Store(store), output, PlanOptions(**options))
    return Plan(output)


def files(path: Path) -> dict[str, bytes]:
    """Every file of a plan."""
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("name", STRATEGIES)
@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(2, 300), min_size=1, max_size=60),
    slots=st.integers(1, 6),
    budget=st.none() | st.integers(300, 900),
    anchor_budget=st.none() | st.integers(75, 200),
    density=st.sampled_from([0.25, 1e-6, 0.1]),
    seed=st.integers(0, 2**63),
)
def test_a_plan_holds_and_is_a_pure_function(name, lengths, slots, budget, anchor_budget, density, seed):
    options = STRATEGIES[name] | {
        "slots": slots,
        "token_budget": budget,
        "anchor_budget": anchor_budget,
        "anchor_density": density,
        "seed": seed,
    }
    with tempfile.TemporaryDirectory() as directory:
        store = make_store(Path(directory, "store"), lengths, shard_bytes=500)
        first = plan(store, Path(directory, "a"), epochs=2, **options)
        again = plan(store, Path(directory, "b"), epochs=2, **options)
        more = plan(store, Path(directory, "c"), epochs=3, **options)
        assert list(verify(Path(directory, "a")))
        assert files(first.path) == files(again.path)
        assert first["fingerprint"] == again["fingerprint"] != more["fingerprint"]
        assert more["epochs"][:2] == first["epochs"]
        assert files(more.path).items() >= {k: v for k, v in files(first.path).items() if k != "plan.json"}.items()
        check_contract(first, lengths, slots)


def check_contract(plan: Plan, lengths: list[int], slots: int) -> None:
    """What a reader may rely on, row by row, with the store's samples known."""
    for number, summary in enumerate(plan["epochs"]):
        rows = list(plan.rows(number))
        assert [(row["step"], row["slot"]) for row in rows] == [divmod(n, slots) for n in range(summary["steps"] * slots)]
        samples = [sample for row in rows for sample in row["samples"]]
        assert sorted(samples) == list(range(len(lengths)))
        assert all(row["samples"] for row in rows if row["step"] < summary["steps"] - 1)
        for row in rows:
            assert row["padded_tokens"] <= plan["token_budget"]
            assert row["anchors"] <= (plan["anchor_budget"] or row["anchors"])
            assert row["tokens"] == sum(lengths[sample] for sample in row["samples"])
            assert row["loss_tokens"] == sum(lengths[sample] - 1 for sample in row["samples"])
        for total in ("tokens", "padded_tokens", "loss_tokens", "anchors"):
            assert summary[total] == sum(row[total] for row in rows)
        assert summary["samples"] == len(lengths)
        assert summary["micro_batches"] == sum(bool(row["samples"]) for row in rows)


def test_plan_json_states_what_was_planned(tiny_store, tmp_path):
    made = plan(tiny_store, tmp_path / "plan", epochs=2, slots=4, seed=9, anchor_density=0.5, max_anchors=20)
    manifest = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert manifest["store"] == {"path": str(tiny_store.resolve()), "fingerprint": Store(tiny_store).fingerprint}
    stated = {"strategy": "bucketed", "bucket_scope": "epoch", "slots": 4, "seed": 9, "block_size": 16}
    stated |= {"anchor_density": 0.5, "max_anchors": 20, "anchor_budget": None}
    assert manifest.items() >= stated.items()
    assert manifest["boundaries"] == sorted(set(manifest["boundaries"]))
    assert manifest["boundaries"][-1] == max(Store(tiny_store).column("length"))
    assert set(manifest["certificate"]) >= {"real_token_share", "straggler_share", "design_effect"}
    for number, epoch in enumerate(manifest["epochs"]):
        assert epoch["file"] == f"epoch-{number:03d}.parquet"
        assert {"checksum", "steps", "micro_batches", "samples"} < set(epoch)
    assert sorted(os.listdir(made.path)) == ["epoch-000.parquet", "epoch-001.parquet", "plan.json"]
    lengths = Store(tiny_store).column("length")
    expected = [min(20, max(0, -(-(int(length) - 2) // 2))) for length in lengths]
    for row in made.rows(0):
        assert row["anchors"] == sum(expected[sample] for sample in row["samples"])


@pytest.mark.parametrize(("name", "bounds"), [("sorted", [90]), ("shuffled", [90]), ("packed", [90]), ("step", [])])
def test_boundaries_without_buckets(tiny_store, tmp_path, name, bounds):
    assert max(Store(tiny_store).column("length")) == 90
    made = plan(tiny_store, tmp_path / "plan", epochs=1, **STRATEGIES[name])
    assert made["boundaries"] == bounds
    assert {row["bucket"] for row in made.rows(0)} == {0}


def test_columns_have_exactly_the_stated_types(tiny_store, tmp_path):
    made = plan(tiny_store, tmp_path / "plan", epochs=1)
    schema = pq.read_schema(made.path / "epoch-000.parquet")
    assert {field.name: field.type for field in schema} == {
        "step": pa.uint32(),
        "slot": pa.uint16(),
        "bucket": pa.uint16(),
        "samples": pa.list_(pa.uint32()),
        "width": pa.uint32(),
        "tokens": pa.uint32(),
        "padded_tokens": pa.uint32(),
        "loss_tokens": pa.uint32(),
        "anchors": pa.uint32(),
        "cost": pa.float32(),
    }


def test_row_groups_are_cut_at_steps_and_rows_can_start_anywhere(tiny_store, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_prep.manifest.ROWS_PER_GROUP", 7)
    made = plan(tiny_store, tmp_path / "plan", epochs=1, slots=3, token_budget=100)
    metadata = pq.read_metadata(made.path / "epoch-000.parquet")
    assert metadata.num_row_groups > 2
    assert {metadata.row_group(group).num_rows % 3 for group in range(metadata.num_row_groups)} == {0}
    everything = list(made.rows(0))
    for step in range(made["epochs"][0]["steps"] + 1):
        assert list(made.rows(0, step)) == everything[3 * step :]


def test_a_global_step_is_located_in_its_epoch(tiny_store, tmp_path):
    made = plan(tiny_store, tmp_path / "plan", epochs=3, slots=2, token_budget=100)
    steps = [epoch["steps"] for epoch in made["epochs"]]
    assert made.total_steps == sum(steps)
    located = [made.locate(step) for step in range(sum(steps) + 1)]
    assert located == [(epoch, step) for epoch in range(3) for step in range(steps[epoch])] + [(3, 0)]


def test_the_place_of_the_store_is_no_part_of_the_plan(tiny_store, tmp_path):
    moved = shutil.copytree(tiny_store, tmp_path / "moved")
    first, second = (plan(store, tmp_path / store.name / "plan", epochs=2) for store in (tiny_store, moved))
    assert first["fingerprint"] == second["fingerprint"]
    assert first["epochs"] == second["epochs"]


def test_every_option_is_part_of_the_fingerprint(tiny_store, tmp_path):
    changes = [{}, {"seed": 1}, {"slots": 4}, {"block_size": 8}, {"anchor_density": 0.5}, {"max_anchors": 9}, {"epochs": 2}]
    changes += [{"token_budget": 200}, {"anchor_budget": 50}, *STRATEGIES.values()]
    prints = [
        plan(tiny_store, tmp_path / str(number), **{"epochs": 1} | change)["fingerprint"]
        for number, change in enumerate(changes)
        if change != {"strategy": "bucketed"}
    ]
    assert len(set(prints)) == len(prints)


def test_an_auto_budget_gives_64_steps_where_the_longest_sample_allows(tmp_path):
    lengths = np.random.default_rng(0).integers(20, 60, 6_000).tolist()
    store = make_store(tmp_path / "store", lengths)
    for name in ("packed", "shuffled"):
        made = plan(store, tmp_path / name, epochs=1, slots=2, **STRATEGIES[name])
        assert 60 < made["token_budget"] < 32_768
        assert made["epochs"][0]["steps"] >= 64
    assert plan(store, tmp_path / "wide", epochs=1, slots=128)["token_budget"] == max(lengths)


def test_a_plan_takes_the_place_of_a_plan_and_of_nothing_else(tiny_store, tmp_path):
    first = plan(tiny_store, tmp_path / "plan", epochs=3)
    second = plan(tiny_store, tmp_path / "plan", epochs=1, seed=4)
    assert first["fingerprint"] != second["fingerprint"]
    assert sorted(os.listdir(tmp_path / "plan")) == ["epoch-000.parquet", "plan.json"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious.txt").write_text("x")
    with pytest.raises(UserError, match="other"):
        plan(tiny_store, tmp_path / "other", epochs=1)
    assert (tmp_path / "other" / "precious.txt").read_text() == "x"
    assert sorted(os.listdir(tmp_path)) == ["other", "plan"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"token_budget": 89}, "90 tokens, the budget is 89"),
        ({"anchor_budget": 3}, "anchors, the budget is 3"),
        ({"boundaries": (10, 89)}, "longest sample has 90"),
        ({"bucket_scope": "step", "buckets": 4}, "leave --boundaries and --buckets out"),
        ({"bucket_scope": "step", "boundaries": (10, 90)}, "leave --boundaries and --buckets out"),
    ],
)
def test_what_cannot_be_planned_is_refused_and_an_older_plan_stays(tiny_store, tmp_path, options, words):
    plan(tiny_store, tmp_path / "plan", epochs=1)
    before = files(tmp_path / "plan")
    with pytest.raises(UserError, match=words):
        plan(tiny_store, tmp_path / "plan", epochs=1, **options)
    assert files(tmp_path / "plan") == before
    assert os.listdir(tmp_path) == ["plan"]


def test_a_failure_halfway_leaves_the_older_plan(tiny_store, tmp_path, monkeypatch):
    plan(tiny_store, tmp_path / "plan", epochs=1)
    before = files(tmp_path / "plan")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dflash_prep.plan.write_json", full)
    with pytest.raises(UserError, match="No space left"):
        plan(tiny_store, tmp_path / "plan", epochs=2)
    assert files(tmp_path / "plan") == before
    assert os.listdir(tmp_path) == ["plan"]


@pytest.mark.parametrize("fault", ["nothing", "damaged", "another version", "epoch gone", "other columns"])
def test_a_plan_that_is_none_is_refused(tiny_store, tmp_path, fault):
    path = tmp_path / "plan"
    if fault != "nothing":
        plan(tiny_store, path, epochs=1)
    manifest = path / "plan.json"
    if fault == "damaged":
        manifest.write_text(manifest.read_text()[:-20])
    elif fault == "another version":
        manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 99'))
    elif fault == "epoch gone":
        (path / "epoch-000.parquet").unlink()
    elif fault == "other columns":
        pq.write_table(pa.table({"step": [0]}), path / "epoch-000.parquet")
    with pytest.raises(UserError, match=str(path)):
        list(Plan(path).rows(0))


BROKEN = {
    "slots": (0, 1.5, True, "8", None),
    "seed": (-1, "0"),
    "block_size": (1, None),
    "anchor_density": (0, 1.5, float("nan"), "0.25"),
    "max_anchors": (0, [512]),
    "anchor_budget": (0, "none"),
    "token_budget": (0, None, 2**63),
    "boundaries": (None, 5, ["5"], [0]),
    "strategy": ("best", ["packed"], None),
    "bucket_scope": ("all", None),
    "store": ("data/tokens", {}, {"path": 3, "fingerprint": "0" * 32}, {"path": "data", "fingerprint": None}),
    "fingerprint": (None, "x", "\ud800" * 32),
    "certificate": (None,),
    "epochs": ([], {}, None, [3], [{}]),
}
EPOCH_BROKEN = {
    "file": (None, "", "../epoch-000.parquet", "/epoch-000.parquet", "plan.json", "epoch-000.parquet\n"),
    "checksum": (None, 5),
    "fingerprint": (None, "short"),
    "steps": (0, 1.0, "2"),
    "micro_batches": (0, None),
    "samples": (-1, True),
    "tokens": (-1, "many"),
    "padded_tokens": (None,),
    "loss_tokens": ({},),
    "anchors": (2**64,),
}
CASES = [("plan", key, value) for key, values in BROKEN.items() for value in values]
CASES += [("epoch", key, value) for key, values in EPOCH_BROKEN.items() for value in values]
CASES += [("plan", key, KeyError) for key in BROKEN] + [("epoch", key, KeyError) for key in EPOCH_BROKEN]


@pytest.fixture(scope="module")
def written(tiny_store, tmp_path_factory) -> Path:
    """A plan of two epochs."""
    return plan(tiny_store, tmp_path_factory.mktemp("written") / "plan", epochs=2, slots=3, token_budget=200).path


@pytest.fixture
def copy(written, tmp_path) -> Path:
    """A copy of it, to be spoilt."""
    return shutil.copytree(written, tmp_path / "copy")


@pytest.mark.parametrize(("where", "key", "value"), CASES)
def test_plan_json_that_states_what_cannot_be_is_refused(written, tmp_path, where, key, value):
    manifest = json.loads((written / "plan.json").read_text())
    part = manifest if where == "plan" else manifest["epochs"][1]
    if value is KeyError:
        del part[key]
    else:
        part[key] = value
    (tmp_path / "plan.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=f"states no valid {key if where == 'plan' else 'epochs'};.* remove it"):
        Plan(tmp_path)


def test_a_setting_changed_after_planning_is_refused_by_every_reader(copy):
    manifest = json.loads((copy / "plan.json").read_text())
    (copy / "plan.json").write_text(json.dumps(manifest | {"seed": 1}))
    with pytest.raises(UserError, match="changed after planning"):
        Plan(copy)


@pytest.mark.parametrize("change", [-1, 1])
def test_steps_that_the_file_does_not_have_are_refused(copy, change):
    manifest = json.loads((copy / "plan.json").read_text())
    manifest["epochs"][1]["steps"] += change
    (copy / "plan.json").write_text(json.dumps(manifest))
    assert list(Plan(copy).rows(0))
    with pytest.raises(UserError, match=r"number of rows.*plan changed"):
        list(Plan(copy).rows(1))


@pytest.mark.parametrize(
    "way", ["exchanged", "one byte", "planned again", "other steps, planned again", "a directory", "a FIFO"]
)
def test_an_epoch_that_changes_while_a_plan_is_open_is_refused(copy, tiny_store, way):
    opened = Plan(copy)
    assert list(opened.rows(1))
    epoch = copy / "epoch-001.parquet"
    if way == "exchanged":
        os.replace(copy / "epoch-000.parquet", epoch)
    elif way == "one byte":
        data = bytearray(epoch.read_bytes())
        data[len(data) // 2] ^= 1
        epoch.write_bytes(data)
    elif way == "planned again":
        plan(tiny_store, copy, epochs=2, slots=3, token_budget=200, seed=5)
    elif way == "other steps, planned again":
        plan(tiny_store, copy, epochs=1, slots=3, token_budget=150)
    else:
        epoch.unlink()
        (os.mkdir if way == "a directory" else os.mkfifo)(epoch)
    with pytest.raises(UserError, match=r"epoch-001\.parquet: .*(plan changed|cannot read|is a directory|not a regular)"):
        list(opened.rows(1))


def test_an_open_epoch_is_read_to_its_end_while_the_plan_is_replaced(copy, tiny_store):
    expected = list(Plan(copy).rows(1))
    rows = Plan(copy).rows(1)
    first = next(rows)
    plan(tiny_store, copy, epochs=1, slots=2)
    assert [first, *rows] == expected


def test_a_checksum_is_taken_once(copy, monkeypatch):
    taken = []
    monkeypatch.setattr("dflash_prep.manifest.stream_digest", lambda raw: taken.append(raw) or stream_digest(raw))
    opened = Plan(copy)
    for _ in range(3):
        assert list(opened.rows(0)) and list(opened.rows(1))
    assert len(taken) == 2


def test_rows_that_cannot_be_decoded_are_a_user_error(copy):
    path = copy / "epoch-000.parquet"
    data = bytearray(path.read_bytes())
    data[4:400] = bytes(396)
    path.write_bytes(data)
    manifest = json.loads((copy / "plan.json").read_text())
    manifest["epochs"][0]["checksum"] = file_digest(path)
    (copy / "plan.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="cannot read the epoch"):
        list(Plan(copy).rows(0))
