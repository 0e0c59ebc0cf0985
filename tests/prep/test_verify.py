"""Verify: a plan that holds passes, and each planted fault is caught with its own message."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_prep.errors import UserError
from dflash_prep.files import file_digest
from dflash_prep.manifest import BESIDE_SETTINGS, EPOCH_SCHEMA, plan_fingerprint, table_fingerprint
from dflash_prep.plan import PlanOptions, write_plan
from dflash_prep.store import Store
from dflash_prep.verify import verify
from tests.prep.support import assert_user_error, make_store, run

LENGTHS = [3 + 37 * i % 88 for i in range(60)]


@pytest.fixture(scope="module", params=["bucketed", "step", "packed", "shuffled", "sorted"])
def made(request, tmp_path_factory) -> tuple[Path, Path]:
    """A store and a plan of each strategy."""
    directory = tmp_path_factory.mktemp("verify")
    store = make_store(directory / "store", LENGTHS, shard_bytes=2_000)
    chosen = {"strategy": "bucketed", "bucket_scope": "step"} if request.param == "step" else {"strategy": request.param}
    options = {"epochs": 2, "slots": 3, "token_budget": 200, "anchor_budget": 60}
    write_plan(Store(store), directory / "plan", PlanOptions(**chosen, **options))
    return store, directory / "plan"


@pytest.fixture
def plan(made, tmp_path) -> Path:
    """A copy of the plan, to be spoilt."""
    return shutil.copytree(made[1], tmp_path / "plan")


def rows_of(plan: Path, epoch: int = 1) -> list[dict]:
    """An epoch's rows."""
    return pq.read_table(plan / f"epoch-{epoch:03d}.parquet").to_pylist()


def reason(plan: Path, data: Path | None = None) -> str:
    """Why verify refuses a plan; each reason names the file and ends in what to do."""
    with pytest.raises(UserError) as caught:
        list(verify(plan, data))
    return str(caught.value)


def edit(plan: Path, change: Callable[[dict], None], sign: bool = True) -> None:
    """Change plan.json; `sign` makes its fingerprint fit again."""
    manifest = json.loads((plan / "plan.json").read_text())
    change(manifest)
    if sign:
        options = {key: value for key, value in manifest.items() if key not in BESIDE_SETTINGS}
        manifest["fingerprint"] = plan_fingerprint(options, manifest["store"]["fingerprint"], manifest["epochs"])
    (plan / "plan.json").write_text(json.dumps(manifest))


def replant(plan: Path, rows: list[dict], epoch: int = 1, **summary) -> None:
    """Write other rows for an epoch, with every checksum and fingerprint as if they had been planned."""
    table = pa.Table.from_pylist(rows, schema=EPOCH_SCHEMA)
    path = plan / f"epoch-{epoch:03d}.parquet"
    pq.write_table(table, path)
    prints = {"checksum": file_digest(path), "fingerprint": table_fingerprint(table)}
    edit(plan, lambda manifest: manifest["epochs"][epoch].update(prints | summary))


def test_a_plan_holds_and_each_part_is_named(made):
    lines = list(verify(made[1]))
    assert len(lines) == 3
    assert "60 samples" in lines[0] and "epoch-000" in lines[1] and "epoch-001" in lines[2]
    result = run("verify", made[1])
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [*lines, f"{made[1]} holds"]


def test_a_replanted_plan_without_a_fault_holds(plan):
    """What the tests below do to a plan is no fault by itself."""
    replant(plan, rows_of(plan))
    assert len(list(verify(plan))) == 3


def test_a_moved_store_is_named_with_data(made, plan, tmp_path):
    moved = shutil.copytree(made[0], tmp_path / "moved")
    edit(plan, lambda manifest: manifest["store"].update(path=str(tmp_path / "gone")))
    assert "no token store here" in reason(plan)
    assert len(list(verify(plan, moved))) == 3
    assert run("verify", plan, "--data", moved).exit_code == 0


def test_a_sample_twice(plan):
    rows = rows_of(plan)
    again = rows[1]["samples"][0]
    rows[0]["samples"].append(again)
    replant(plan, rows)
    assert f"sample {again} occurs 2 times" in reason(plan)


def test_a_sample_missing(plan):
    rows = rows_of(plan)
    wide = next(row for row in rows if len(row["samples"]) > 1)
    gone = wide["samples"].pop()
    replant(plan, rows)
    assert f"sample {gone} occurs 0 times" in reason(plan)


def test_a_sample_in_the_place_of_another(plan):
    rows = rows_of(plan)
    first, second = rows[0]["samples"][0], rows[1]["samples"][0]
    rows[0]["samples"][0] = second
    replant(plan, rows)
    low, count = min((first, 0), (second, 2))
    assert f"sample {low} occurs {count} times" in reason(plan)


@pytest.mark.parametrize("sample", [60, 2**32 - 1])
def test_a_sample_that_the_store_does_not_have(plan, sample):
    rows = rows_of(plan)
    rows[0]["samples"].append(sample)
    replant(plan, rows)
    assert "samples that the store does not have" in reason(plan)


def test_a_token_budget_broken(plan):
    worst = max(row["padded_tokens"] for row in rows_of(plan))
    edit(plan, lambda manifest: manifest.update(token_budget=worst - 1))
    assert f"{worst} padded_tokens, the budget is {worst - 1}" in reason(plan)


def test_an_anchor_budget_broken(plan):
    worst = max(row["anchors"] for row in rows_of(plan))
    edit(plan, lambda manifest: manifest.update(anchor_budget=worst - 1))
    assert f"{worst} anchors, the budget is {worst - 1}" in reason(plan)


def test_rows_that_together_pass_the_budget(plan):
    """Two micro-batches merged into one with true numbers: the samples and totals agree, the budget does not."""
    packed = json.loads((plan / "plan.json").read_text())["strategy"] == "packed"
    rows = rows_of(plan)
    last = rows[-1]["step"]
    keep = max(rows, key=lambda row: row["padded_tokens"])
    gone = max((row for row in rows if row["step"] == last and row is not keep), key=lambda row: row["padded_tokens"])
    for name in ("tokens", "loss_tokens", "anchors"):
        keep[name] += gone[name]
    keep["samples"] = keep["samples"] + gone["samples"]
    lengths = [LENGTHS[sample] for sample in keep["samples"]]
    keep["width"] = sum(lengths) if packed else max(lengths)
    keep["padded_tokens"] = sum(lengths) if packed else len(lengths) * max(lengths)
    work = [length * (1 + length / 24_576) for length in (lengths if packed else [max(lengths)] * len(lengths))]
    keep["cost"] = sum(work)
    empty = {"tokens": 0, "padded_tokens": 0, "loss_tokens": 0, "anchors": 0, "width": 0, "cost": 0, "bucket": 0}
    gone.update(empty, samples=[])
    replant(plan, rows)
    assert f"{keep['padded_tokens']} padded_tokens, the budget is 200" in reason(plan)


def test_a_checksum_of_an_epoch_file(plan):
    path = plan / "epoch-001.parquet"
    pq.write_table(pq.read_table(path), path, compression="none")  # the same rows in other bytes
    assert "epoch-001.parquet: its checksum differs" in reason(plan)


def test_a_fingerprint_of_an_epoch_s_columns(plan):
    edit(plan, lambda manifest: manifest["epochs"][0].update(fingerprint="0" * 32))
    assert "epoch-000.parquet: the fingerprint" in reason(plan)


@pytest.fixture
def store(made, plan, tmp_path) -> Path:
    """A copy of the store, to be spoilt, that the plan points to."""
    path = shutil.copytree(made[0], tmp_path / "store")
    edit(plan, lambda manifest: manifest["store"].update(path=str(path)))
    assert len(list(verify(plan))) == 3
    return path


@pytest.mark.parametrize("name", ["shard-00001.arrow", "index.parquet"])
def test_a_byte_changed_in_the_store(store, plan, name):
    data = bytearray((store / name).read_bytes())
    data[len(data) // 2] ^= 1
    (store / name).write_bytes(data)
    assert f"{name}: its checksum differs" in reason(plan)


def test_a_token_changed_behind_the_checksum(store, plan):
    path = store / "shard-00001.arrow"
    data = bytearray(path.read_bytes())
    ids = Store(store).sample(Store(store).column("shard").tolist().index(1))[0].tobytes()
    data[data.find(ids)] ^= 1
    path.write_bytes(data)
    manifest = json.loads((store / "store.json").read_text())
    manifest["shards"][1]["checksum"] = file_digest(path)
    (store / "store.json").write_text(json.dumps(manifest))
    assert "the keys found" in reason(plan)


def test_a_store_s_total_altered(store, plan):
    manifest = json.loads((store / "store.json").read_text())
    manifest["counts"]["tokens"] += 1
    (store / "store.json").write_text(json.dumps(manifest))
    assert "total of tokens" in reason(plan)


def test_a_store_swapped(store, plan):
    shutil.rmtree(store)
    make_store(store, [*LENGTHS[:-1], LENGTHS[-1] + 1])
    assert "not the store that" in reason(plan)
    assert "not the store that" in reason(plan, store)


@pytest.mark.parametrize("distance", [1, 3])
def test_rows_out_of_order(plan, distance):
    rows = rows_of(plan)
    rows[2], rows[2 + distance] = rows[2 + distance], rows[2]
    replant(plan, rows)
    assert "row 2 is out of order" in reason(plan)


def test_an_empty_slot_in_an_earlier_step(plan):
    """A slot of the first step moved to a step more, so that every sample and total is still there."""
    rows = rows_of(plan)
    steps = rows[-1]["step"] + 1
    moved = rows[0] | {"step": steps, "slot": 0}
    empty = dict.fromkeys(rows[0], 0) | {"samples": []}
    rows[0] = empty | {"step": 0, "slot": 0}
    rows += [moved, empty | {"step": steps, "slot": 1}, empty | {"step": steps, "slot": 2}]
    replant(plan, rows, steps=steps + 1)
    assert "step 0 has an empty slot" in reason(plan)


def test_a_step_too_few_rows(plan):
    rows = rows_of(plan)
    replant(plan, rows[:-1])
    assert "number of rows" in reason(plan)


@pytest.mark.parametrize("name", ["tokens", "width", "padded_tokens", "loss_tokens", "anchors"])
def test_a_row_s_number_altered(plan, name):
    rows = rows_of(plan)
    rows[4][name] -= 1
    replant(plan, rows)
    assert f"row 4 states {name} {rows[4][name]}" in reason(plan)


def test_a_row_s_cost_altered(plan):
    rows = rows_of(plan)
    rows[4]["cost"] *= 1.01
    replant(plan, rows)
    assert "row 4 states cost" in reason(plan)


@pytest.mark.parametrize("name", ["tokens", "padded_tokens", "loss_tokens", "anchors", "samples", "micro_batches"])
def test_a_total_altered(plan, name):
    edit(plan, lambda manifest: manifest["epochs"][1].update({name: manifest["epochs"][1][name] + 1}))
    words = {"samples": "number of samples", "micro_batches": "number of micro-batches"}
    assert words.get(name, f"total of {name}") in reason(plan)


@pytest.mark.parametrize("change", [-1, 1, 999])
def test_a_bucket_altered(plan, change):
    rows = rows_of(plan)
    bounds = json.loads((plan / "plan.json").read_text())["boundaries"]
    number = next((n for n, row in enumerate(rows) if len(bounds) > 1 and row["bucket"] + change in range(len(bounds))), 4)
    rows[number]["bucket"] = abs(rows[number]["bucket"] + change)
    replant(plan, rows)
    assert f"row {number} holds a sample outside its bucket" in reason(plan)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 77},
        {"block_size": 8},
        {"token_budget": 100_000},
        {"slots": 1},
        {"boundaries": [1]},
        {"strategy": "sorted", "bucket_scope": "step"},
        {"anchor_density": 0.3},
        {"added": True},
        {"fingerprint": "0" * 32},
    ],
    ids=lambda change: next(iter(change)),
)
def test_plan_json_altered(plan, change):
    edit(plan, lambda manifest: manifest.update(change), sign=False)
    assert "plan.json was changed after planning" in reason(plan)


@pytest.mark.parametrize("key", ["slots", "store", "epochs", "fingerprint", "token_budget", "boundaries"])
def test_plan_json_without_a_key(plan, key):
    edit(plan, lambda manifest: manifest.pop(key), sign=False)
    result = run("verify", plan)
    assert_user_error(result, str(plan))


def test_an_epoch_removed_or_repeated(plan):
    edit(plan, lambda manifest: manifest["epochs"].pop(), sign=False)
    assert "plan.json was changed after planning" in reason(plan)


def test_an_epoch_file_that_is_gone_or_no_parquet(plan):
    (plan / "epoch-001.parquet").write_bytes(b"PAR1")
    assert "plan changed or damaged" in reason(plan)
    edit(plan, lambda manifest: manifest["epochs"][1].update(checksum=file_digest(plan / "epoch-001.parquet")))
    assert "cannot read the epoch" in reason(plan)
    (plan / "epoch-001.parquet").unlink()
    assert "epoch-001.parquet" in reason(plan)
