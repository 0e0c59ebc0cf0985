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

from dflash_prep.cost import CostModel
from dflash_prep.errors import UserError
from dflash_prep.files import file_digest, stream_digest
from dflash_prep.manifest import Plan, table_fingerprint
from dflash_prep.plan import dry_run, write_plan
from dflash_prep.pool import from_lengths, from_stores
from dflash_prep.scheme import PlanOptions, settle
from dflash_prep.store import Store
from dflash_prep.stores import Stores
from dflash_prep.verify import verify
from tests.prep.support import make_plan as plan
from tests.prep.support import make_store

STRATEGIES = {
    "sorted": {"strategy": "sorted"},
    "shuffled": {"strategy": "shuffled"},
    "bucketed": {"strategy": "bucketed"},
    "three buckets": {"strategy": "bucketed", "buckets": 3},
    "boundaries": {"strategy": "bucketed", "boundaries": (20, 50, 300)},
    "fixed shapes": {"strategy": "bucketed", "buckets": 3, "fixed_shapes": True},
    "step": {"strategy": "bucketed", "bucket_scope": "step"},
    "packed": {"strategy": "packed"},
    "static": {"strategy": "packed", "fixed_shapes": True},
}


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
    seed=st.integers(0, 2**63 - 1),
    align=st.sampled_from([1, 1, 16]),
)
def test_a_plan_holds_and_is_a_pure_function(name, lengths, slots, budget, anchor_budget, density, seed, align):
    options = STRATEGIES[name] | {
        "slots": slots,
        "token_budget": budget,
        "anchor_budget": anchor_budget,
        "anchor_density": density,
        "seed": seed,
        "align": align if budget is None or budget >= 320 else 1,
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
        ({"strategy": "packed", "buckets": 4}, "packed has no buckets"),
        ({"boundaries": (10, 90), "buckets": 4}, "both given"),
        ({"strategy": "sorted", "fixed_shapes": True}, "--fixed-shapes"),
        ({"boundaries": (10, 5_000), "fixed_shapes": True, "token_budget": 900}, "above the budget of 900"),
        ({"token_budget": 95, "align": 64}, "96|128"),
        ({"weights": (("made", 0.0),)}, "no sample is left"),
        ({"weights": (("other", 2.0),)}, "names no source; there are made"),
        ({"holdout": 1e-9}, "holds none"),
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
        manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 99'))
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
    "align": (0, None),
    "fixed_shapes": (1, None),
    "holdout": (-0.1, "1", None),
    "weights": ([], {"made": "2"}, None),
    "cost": ({}, {"a": 1}, None),
    "rehearse": ({}, {"longest": {}}, None),
    "fingerprint": (None, "x", "\ud800" * 32),
    "certificate": (None, {}, {"seconds": 1}),
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
CASES += [("plan", key, KeyError) for key in BROKEN if key not in ("anchor_budget", "store")] + [
    ("epoch", key, KeyError) for key in EPOCH_BROKEN
]


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


def test_a_plan_without_a_store_is_refused(written, tmp_path):
    manifest = json.loads((written / "plan.json").read_text())
    del manifest["store"]
    (tmp_path / "plan.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="changed after planning"):
        Plan(tmp_path)


LENGTHS = np.random.default_rng(8).lognormal(4.5, 0.6, 900).astype(int).clip(4, 400).tolist()
GOLDEN = {
    "sorted": "6f607d020146",
    "shuffled": "e0661ccdd0b6",
    "bucketed": "a6a5ba0fd79a",
    "fixed shapes": "d69067fc3f98",
    "step": "58a7fc111ed1",
    "packed": "e5ee16ff7c33",
}


def pool_of(lengths: list[int], path: Path):
    """A pool of lengths alone, two sources of them."""
    table = pa.table({"length": lengths, "loss_tokens": [n // 2 for n in lengths], "source": [f"s{n % 2}" for n in lengths]})
    pq.write_table(table, path)
    return from_lengths(path, True)


@pytest.mark.parametrize("name", GOLDEN)
def test_fingerprints_are_the_same_everywhere_and_for_good(tmp_path, name):
    """A change here means that users' plans change: the golden values were written once, on another machine."""
    options = PlanOptions(epochs=2, slots=4, token_budget=2_000, seed=3, weights=(("s1", 1.5),), **STRATEGIES[name])
    assert dry_run(settle(pool_of(LENGTHS, tmp_path / "lengths.parquet"), options))["fingerprint"][:12] == GOLDEN[name]


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_epoch_is_made_without_the_others(tmp_path, name):
    boundaries = {"boundaries": (20, 50, 400)} if name == "boundaries" else {}
    options = PlanOptions(epochs=5, slots=4, token_budget=2_000, weights=(("s0", 0.4),), **STRATEGIES[name] | boundaries)
    pool = pool_of(LENGTHS, tmp_path / "lengths.parquet")
    whole = dry_run(settle(pool, options))
    assert table_fingerprint(settle(pool, options).table(4)) == whole["epochs"][4]["fingerprint"]


def test_the_number_of_threads_changes_nothing(tiny_store, tmp_path, monkeypatch):
    written = []
    for threads in (1, 2, 7):
        monkeypatch.setattr("os.cpu_count", lambda threads=threads: threads)
        written.append(files(plan(tiny_store, tmp_path / str(threads), epochs=5, slots=3, token_budget=200).path))
    assert written[0] == written[1] == written[2]


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_any_number_of_ranks_reads_the_same_steps(tiny_store, tmp_path, world_size):
    made = plan(tiny_store, tmp_path / "plan", epochs=2, slots=8, token_budget=120)
    for epoch in range(2):
        rows = list(made.rows(epoch))
        of_rank = [[row for row in rows if row["slot"] % world_size == rank] for rank in range(world_size)]
        assert len({len(own) for own in of_rank}) == 1
        per_step = 8 // world_size
        for step in range(made["epochs"][epoch]["steps"]):
            together = [row for own in of_rank for row in own[step * per_step : (step + 1) * per_step]]
            assert sorted(row["slot"] for row in together) == list(range(8))
            assert {row["step"] for row in together} == {step}


def test_copies_and_a_hold_out_are_stated_and_kept(tmp_path):
    store = make_store(tmp_path / "store", LENGTHS)
    made = plan(store, tmp_path / "plan", epochs=3, weights=(("made", 1.5),), holdout=0.1)
    held = [sample for row in made.rows(None) for sample in row["samples"]]
    assert 0.05 * len(LENGTHS) < len(held) < 0.15 * len(LENGTHS) and len(set(held)) == len(held)
    kept = sorted(set(range(len(LENGTHS))) - set(held))
    again = []
    for epoch in range(3):
        counts = np.bincount([sample for row in made.rows(epoch) for sample in row["samples"]], minlength=len(LENGTHS))
        assert set(counts[kept]) == {1, 2} and not counts[held].any()
        again.append({sample for sample in kept if counts[sample] == 2})
        assert len(again[-1]) == round(len(kept) / 2) == made["epochs"][epoch]["samples"] - len(kept)
    assert len(again[0] & again[1]) <= 1  # a fresh half each epoch
    assert made["sources"] == {"made": {"samples": len(kept), "weight": 1.5, "per_epoch": made["epochs"][0]["samples"]}}
    assert sorted(os.listdir(made.path))[-2:] == ["holdout.parquet", "plan.json"]


def test_a_hold_out_is_of_the_content_alone(tmp_path):
    first = make_store(tmp_path / "first", LENGTHS)
    other = make_store(tmp_path / "other", LENGTHS[:300])
    held = []
    for number, stores in enumerate((first, other, [first, other])):
        for seed in range(2):
            made = plan(stores, tmp_path / f"plan{number}{seed}", epochs=1, holdout=0.2, seed=seed)
            held.append({sample for row in made.rows(None) for sample in row["samples"]})
    assert held[0] == held[1] and held[2] == held[3] == {sample for sample in held[0] if sample < 300}
    assert held[4] == held[5] == held[0] | {len(LENGTHS) + sample for sample in held[2]}  # twins stay together


def test_widths_are_aligned_and_shapes_fixed(tmp_path):
    store = make_store(tmp_path / "store", LENGTHS)
    made = plan(store, tmp_path / "a", epochs=2, align=16, buckets=5, token_budget=2_000)
    widths = {row["width"] for epoch in range(2) for row in made.rows(epoch)}
    assert all(width % 16 == 0 for width in widths) and len(widths) > 5
    made = plan(store, tmp_path / "b", epochs=2, align=16, buckets=5, token_budget=2_000, fixed_shapes=True)
    assert {row["width"] for epoch in range(2) for row in made.rows(epoch)} == set(made["boundaries"])
    made = plan(store, tmp_path / "c", epochs=2, align=16, strategy="packed", token_budget=2_001, fixed_shapes=True)
    assert {row["padded_tokens"] for epoch in range(2) for row in made.rows(epoch) if row["samples"]} == {2_000}


def test_hand_made_boundaries_say_how_far_off_they_are(tmp_path):
    store = make_store(tmp_path / "store", LENGTHS)
    options = {"epochs": 1, "token_budget": 2_000, "cost": CostModel(0, 1, 0, 0, 0)}
    best = plan(store, tmp_path / "best", buckets=4, **options)
    own = plan(store, tmp_path / "own", boundaries=(30, 40, 50, 500), **options)
    assert best["curve"]["chosen"] == best["curve"]["optimum"] == own["curve"]["optimum"] < 0.9 * own["curve"]["chosen"]
    assert own["boundaries"] == [30, 40, 50, 500]
    seconds = [epoch["padded_tokens"] for plan in (best, own) for epoch in plan["epochs"]]
    assert seconds[0] < seconds[1]


def test_two_stores_are_planned_as_one(tmp_path):
    first, second = make_store(tmp_path / "first", LENGTHS[:200]), make_store(tmp_path / "second", LENGTHS[200:500])
    made = plan([first, second], tmp_path / "plan", epochs=2, slots=2)
    assert [Path(origin["path"]).name for origin in made["stores"]] == ["first", "second"]
    assert sorted(sample for row in made.rows(0) for sample in row["samples"]) == list(range(500))
    assert list(verify(made.path))


def test_a_dry_run_states_what_the_plan_would(tiny_store, tmp_path):
    made = plan(tiny_store, tmp_path / "plan", epochs=2, slots=3)
    scheme = settle(from_stores(Stores([tiny_store]), False), PlanOptions(epochs=2, slots=3))
    dry = dry_run(scheme)
    assert dry["fingerprint"] == made["fingerprint"]
    assert dry["certificate"] == made["certificate"]


@pytest.mark.parametrize("name", ["sorted", "shuffled", "bucketed", "step", "packed"])
@pytest.mark.parametrize("budget", [2**24, 2**31])
def test_the_longest_rows_and_the_largest_budgets_hold(tmp_path, name, budget):
    lengths = [2**24] * 30 + [3] * 100 + [2**23] * 20
    pq.write_table(pa.table({"length": lengths}), tmp_path / "lengths.parquet")
    options = PlanOptions(epochs=2, slots=3, token_budget=budget, **STRATEGIES[name])
    write_plan(settle(from_lengths(tmp_path / "lengths.parquet", False), options), tmp_path / "plan")
    assert list(verify(tmp_path / "plan"))


def test_no_plan_is_put_into_a_plan(tiny_store, tmp_path):
    made = plan(tiny_store, tmp_path / "plan", epochs=1)
    before = files(made.path)
    for place in (tmp_path / "plan" / "in", tmp_path / "plan" / "deep" / "er"):
        with pytest.raises(UserError, match="lies inside"):
            plan(tiny_store, place, epochs=1)
    assert files(made.path) == before


def test_steps_cut_anew_mix_heavy_tails_too(tmp_path):
    lengths = np.random.default_rng(3).lognormal(5, 2, 6_000).clip(1, 30_000).astype(int).tolist()
    pool = pool_of(lengths, tmp_path / "lengths.parquet")
    made = dry_run(settle(pool, PlanOptions(epochs=2, slots=8, **STRATEGIES["step"])))
    assert made["certificate"]["design_effect"] < 4
