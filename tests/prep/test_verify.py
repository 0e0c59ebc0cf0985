"""Verify: a plan that holds passes, and each planted fault is caught with its own message."""

import ast
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dflash_prep
from dflash_prep.cost import CostModel
from dflash_prep.errors import UserError
from dflash_prep.files import file_digest
from dflash_prep.manifest import (
    BESIDE_SETTINGS,
    EPOCH_SCHEMA,
    TOTALS,
    Plan,
    joint_fingerprint,
    plan_fingerprint,
    table_fingerprint,
)
from dflash_prep.plan import write_plan
from dflash_prep.pool import from_lengths, from_stores
from dflash_prep.scheme import PlanOptions, settle
from dflash_prep.store import Store
from dflash_prep.store_writer import StoreWriter
from dflash_prep.stores import Stores
from dflash_prep.verify import open_stores, verify
from tests.prep.support import ORIGIN, add, assert_user_error, make_store, run

LENGTHS = [3 + 37 * i % 88 for i in range(60)]
CODE = [4 + 53 * i % 80 for i in range(41)]
TERMS = CostModel(c0=0.01, a=1e-6, b=2e-9, d=3e-5, e=4e-9)  # every term counts
MIXED = {"epochs": 3, "weights": (("made", 1.5), ("code", 0.3)), "holdout": 0.2, "cost": TERMS}
PLANS = {
    "bucketed": {"strategy": "bucketed", "buckets": 3},
    "step": {"strategy": "bucketed", "bucket_scope": "step"},
    "packed": {"strategy": "packed"},
    "shuffled": {"strategy": "shuffled"},
    "sorted": {"strategy": "sorted"},
    "aligned": {"strategy": "bucketed", "bucket_scope": "step", "align": 8, "cost": TERMS},
    "fixed": {"strategy": "bucketed", "fixed_shapes": True, "align": 8, "cost": TERMS},
    "packed fixed": {"strategy": "packed", "fixed_shapes": True, "align": 16, "cost": TERMS},
    "two stores": {"strategy": "packed", **MIXED},
    "lengths": {"strategy": "bucketed", **MIXED},
}
FIGURES = [
    "fewest_copies",
    "most_copies",
    "most_tokens",
    "most_anchors",
    "slots_per_step",
    "empty_slots",
    "real_token_share",
    "padding_share",
    "fill",
    "seconds",
    "gap_to_optimum",
    "straggler_share",
    "straggler_share_of_cost",
    "straggler_cost",
    "design_effect",
    "step_correlation",
    "jaccard",
    "jaccard_random",
]


@dataclass(frozen=True)
class Made:
    """A plan, what it was made from and the lengths of its samples; each has loss on all tokens but the first."""

    plan: Path
    data: list[Path]
    lengths: list[int]


def make_source(path: Path, lengths: Sequence[int], source: str) -> Path:
    """A store as make_store writes it, of a source of another name."""
    path.mkdir()
    writer = StoreWriter(path)
    for number, length in enumerate(lengths):
        add(writer, np.arange(number, number + length), [1, length], source, number + 1)
    writer.finish(ORIGIN)
    return path


def make(name: str, directory: Path) -> Made:
    """The plan of a name and its data."""
    options = PlanOptions(**{"epochs": 2, "slots": 3, "token_budget": 200, "anchor_budget": 60} | PLANS[name])
    if name == "lengths":
        data, lengths = [directory / "lengths.parquet"], [*LENGTHS, *CODE]
        columns = {
            "length": lengths,
            "loss_tokens": [length - 1 for length in lengths],
            "source": ["made"] * len(LENGTHS) + ["code"] * len(CODE),
        }
        pq.write_table(pa.table(columns), data[0])
        pool = from_lengths(data[0], options.holdout > 0)
    else:
        data, lengths = [make_store(directory / "store", LENGTHS, shard_bytes=2_000)], LENGTHS
        if name == "two stores":
            data, lengths = [*data, make_source(directory / "code", CODE, "code")], [*LENGTHS, *CODE]
        pool = from_stores(Stores(data), options.holdout > 0)
    write_plan(settle(pool, options), directory / "plan")
    return Made(directory / "plan", data, lengths)


@pytest.fixture(scope="module", params=PLANS)
def made(request, tmp_path_factory) -> Made:
    """A plan of every kind."""
    return make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=["bucketed", "packed fixed", "lengths"])
def typical(request, tmp_path_factory) -> Made:
    """A plan of three kinds that have all there is, for what is the same in all kinds."""
    return make(request.param, tmp_path_factory.mktemp("typical"))


@pytest.fixture(scope="module", params=["two stores", "lengths"])
def mixed(request, tmp_path_factory) -> Made:
    """A plan with weights and a hold-out."""
    return make(request.param, tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="module")
def bucketed(tmp_path_factory) -> Made:
    """A plan of one store, for faults that lie outside its tables."""
    return make("bucketed", tmp_path_factory.mktemp("bucketed"))


@pytest.fixture
def copy(tmp_path) -> Callable[[Made], Path]:
    """Copies a plan, to be spoilt."""
    return lambda made: shutil.copytree(made.plan, tmp_path / "plan")


@pytest.fixture
def plan(made, copy) -> Path:
    """A copy of a plan of every kind."""
    return copy(made)


@pytest.fixture
def example(typical, copy) -> Path:
    """A copy of a typical plan."""
    return copy(typical)


def manifest_of(plan: Path) -> dict:
    """What plan.json states."""
    return json.loads((plan / "plan.json").read_text())


def name_of(epoch: int | None) -> str:
    """An epoch's file; None: the hold-out's."""
    return "holdout.parquet" if epoch is None else f"epoch-{epoch:03d}.parquet"


def rows_of(plan: Path, epoch: int | None = 1) -> list[dict]:
    """An epoch's rows."""
    return pq.read_table(plan / name_of(epoch)).to_pylist()


def reason(plan: Path, data: Sequence[Path] = ()) -> str:
    """Why verify refuses a plan: one line that names the plan or its data."""
    with pytest.raises(UserError) as caught:
        list(verify(plan, data))
    message = str(caught.value)
    assert "\n" not in message and message.startswith("/") and ": " in message
    return message


def edit(plan: Path, change: Callable[[dict], None], sign: bool = True) -> None:
    """Change plan.json; `sign` makes its fingerprint fit again."""
    manifest = manifest_of(plan)
    change(manifest)
    if sign:
        options = {key: value for key, value in manifest.items() if key not in BESIDE_SETTINGS}
        origins = manifest.get("stores") or [manifest.get("store") or manifest.get("lengths")]
        data = joint_fingerprint([origin["fingerprint"] for origin in origins])
        held = manifest["holdout_set"]
        manifest["fingerprint"] = plan_fingerprint(options, data, manifest["epochs"] + ([held] if held else []))
    (plan / "plan.json").write_text(json.dumps(manifest))


def summary_in(manifest: dict, epoch: int | None) -> dict:
    """What a manifest states of an epoch."""
    return manifest["holdout_set"] if epoch is None else manifest["epochs"][epoch]


def replant(plan: Path, rows: list[dict], epoch: int | None = 1, **summary) -> None:
    """Write other rows for an epoch, with every checksum, fingerprint and total as if they had been planned."""
    table = pa.Table.from_pylist(rows, schema=EPOCH_SCHEMA)
    path = plan / name_of(epoch)
    pq.write_table(table, path)
    stated = {
        "checksum": file_digest(path),
        "fingerprint": table_fingerprint(table),
        "micro_batches": sum(bool(row["samples"]) for row in rows),
        "samples": sum(len(row["samples"]) for row in rows),
        "steps": len(rows) // 3,
        **{name: sum(row[name] for row in rows) for name in TOTALS},
    }
    edit(plan, lambda manifest: summary_in(manifest, epoch).update(stated | summary))


def restated(made: Made, plan: Path, row: dict, samples: list[int]) -> dict:
    """A row with other samples in the same bucket, and the true numbers of those, by the contract."""
    stated = manifest_of(plan)
    align, cost, packed = stated["align"], stated["cost"], stated["strategy"] == "packed"
    lengths = [made.lengths[sample] for sample in samples]
    anchors = [ceil((length - 2) / 4) for length in lengths]
    width = -(-(sum(lengths) if packed else max(lengths)) // align) * align
    if stated["fixed_shapes"]:
        width = max(width, 200 // align * align) if packed else stated["boundaries"][row["bucket"]]
    padded = width if packed else width * len(lengths)
    squares = sum(length**2 for length in (lengths if packed else [width] * len(lengths)))
    reach = sum(number * length for number, length in zip(anchors, lengths, strict=True))
    seconds = cost["c0"] + cost["a"] * padded + cost["b"] * squares + cost["d"] * sum(anchors) + cost["e"] * reach
    numbers = {"tokens": sum(lengths), "loss_tokens": sum(lengths) - len(lengths), "anchors": sum(anchors)}
    return row | numbers | {"samples": samples, "width": width, "padded_tokens": padded, "cost": seconds}


def laid_out(rows: list[dict]) -> list[dict]:
    """The micro-batches that hold a sample as whole steps, with empty slots at the end."""
    rows = [row for row in rows if row["samples"]]
    rows += [dict.fromkeys(rows[0], 0) | {"samples": []}] * (-len(rows) % 3)
    return [row | {"step": number // 3, "slot": number % 3} for number, row in enumerate(rows)]


def test_a_plan_holds_and_each_part_is_named(made):
    lines = list(verify(made.plan))
    stated = manifest_of(made.plan)
    parts = [("lengths" if stated.get("lengths") else f"store {path}") for path in made.data]
    parts += [epoch["file"] for epoch in stated["epochs"]]
    parts += ["holdout.parquet"] * (stated["holdout_set"] is not None) + ["certificate"]
    assert [line.split(":")[0] for line in lines] == parts
    result = run("verify", made.plan)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [*lines, f"{made.plan} holds"]


def test_the_plans_exercise_what_is_verified(mixed):
    """Samples are held out and not, drawn more and less often than once; every figure is defined."""
    stated = manifest_of(mixed.plan)
    assert stated["holdout_set"]["samples"] > 3
    assert [source["per_epoch"] > source["samples"] for source in stated["sources"].values()] == [False, True]
    assert None not in stated["certificate"].values()
    assert sorted(stated["certificate"]) == sorted(FIGURES)


def test_a_replanted_plan_without_a_fault_holds(made, plan):
    """What the tests below do to a plan is no fault by itself."""
    rows = rows_of(plan)
    replant(plan, [restated(made, plan, row, row["samples"]) if row["samples"] else row for row in rows])
    assert list(verify(plan))


def test_the_proof_shares_no_code_with_the_planner():
    forbidden = {"scheme", "certificate", "diversity", "packing", "schedule", "mixture", "batching", "buckets", "dealing"}
    forbidden |= {"cutting", "cost", "plan"}
    files = sorted(Path(dflash_prep.__file__).parent.glob("verify*.py"))
    assert len(files) == 4
    for file in files:
        nodes = ast.walk(ast.parse(file.read_text()))
        imported = {node.module.split(".")[-1] for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not imported & forbidden, (file, imported)


# Each sample as often as stated


def test_a_sample_twice(made, plan):
    rows = rows_of(plan)
    again = rows[1]["samples"][0]
    for _ in range(2):  # of a source that is repeated or thinned, once more may be right
        rows[0] = restated(made, plan, rows[0], [*rows[0]["samples"], again])
    replant(plan, rows)
    assert f"sample {again} occurs " in reason(plan) and " times, not " in reason(plan)


def test_a_sample_missing(plan):
    rows = rows_of(plan)
    gone = next(sample for row in rows for sample in row["samples"] if sample < len(LENGTHS))  # all of which occur
    for row in rows:
        row["samples"] = [sample for sample in row["samples"] if sample != gone]
    replant(plan, laid_out(rows))
    assert f"sample {gone} occurs 0 times, not 1" in reason(plan)


def test_a_sample_in_the_place_of_another(plan):
    rows = rows_of(plan)
    first, second = rows[0]["samples"][0], rows[1]["samples"][0]
    rows[0]["samples"][0] = second
    replant(plan, rows)
    assert (
        f"sample {first} occurs " in reason(plan)
        or f"sample {second} occurs " in reason(plan)
        or "once more" in reason(plan)
        or "had their turn" in reason(plan)
    )


@pytest.mark.parametrize("sample", [101, 2**32 - 1])
def test_a_sample_that_was_not_planned(made, plan, sample):
    rows = rows_of(plan)
    rows[0]["samples"].append(sample)
    replant(plan, rows)
    assert f"row 0 holds sample {sample}, there are {len(made.lengths)} samples" in reason(plan)


@pytest.mark.parametrize("source", ["made", "code"])
def test_a_wrong_number_of_copies(mixed, copy, source):
    """One copy less of a sample that has one more than it must."""
    plan = copy(mixed)
    rows = rows_of(plan)
    drawn = [sample for row in rows for sample in row["samples"]]
    if source == "made":
        extra = {sample for sample in drawn if sample < len(LENGTHS) and drawn.count(sample) == 2}
    else:
        extra = {sample for sample in drawn if sample >= len(LENGTHS)}
    row, gone = next((row, gone) for row in rows for gone in row["samples"] if gone in extra and len(row["samples"]) > 1)
    row["samples"].remove(gone)
    replant(plan, rows)
    part = manifest_of(plan)["sources"][source]
    more = part["per_epoch"] - (part["samples"] if source == "made" else 0)
    assert f"{more - 1} samples of source '{source}' occur once more, not {more}" in reason(plan)


def test_the_same_part_of_a_source_drawn_again(mixed, copy):
    plan = copy(mixed)
    replant(plan, rows_of(plan, 0), 1)
    assert "epoch-001.parquet: draws samples of source 'code' again before all of it had their turn" in reason(plan)


@pytest.mark.parametrize("key", ["samples", "weight", "per_epoch"])
def test_a_source_s_numbers_altered(made, plan, key):
    edit(plan, lambda manifest: manifest["sources"]["made"].update({key: 3}))
    assert "the source 'made' is" in reason(plan)


def test_a_source_that_was_not_planned(plan):
    edit(plan, lambda manifest: manifest["sources"].update(other=dict(manifest["sources"]["made"])))
    assert "names the source 'other', which is not in what was planned" in reason(plan)
    edit(plan, lambda manifest: (manifest["sources"].pop("other"), manifest["weights"].update(another=2.0)))
    assert "names the source 'another'" in reason(plan)


def test_a_source_that_is_not_stated(plan):
    edit(plan, lambda manifest: manifest["sources"].pop("made"))
    assert "the source 'made' is" in reason(plan)


def test_a_weight_altered(mixed, copy):
    plan = copy(mixed)
    edit(plan, lambda manifest: manifest["weights"].update(made=1.25))
    assert "the source 'made' is" in reason(plan)


def test_a_held_out_sample_trained_on(mixed, copy):
    plan = copy(mixed)
    held = rows_of(plan, None)[0]["samples"][0]
    rows = rows_of(plan)
    rows[0] = restated(mixed, plan, rows[0], [*rows[0]["samples"], held])
    replant(plan, rows)
    assert f"epoch-001.parquet: holds sample {held}, which belongs on the other side of the hold-out" in reason(plan)


def test_a_trained_sample_in_the_hold_out(mixed, copy):
    plan = copy(mixed)
    trained = rows_of(plan)[0]["samples"][0]
    rows = rows_of(plan, None)
    rows[0] = restated(mixed, plan, rows[0], [*rows[0]["samples"], trained])
    replant(plan, rows, None)
    assert f"holdout.parquet: holds sample {trained}, which belongs on the other side of the hold-out" in reason(plan)


@pytest.mark.parametrize("times", [0, 2])
def test_a_held_out_sample_missing_or_twice(mixed, copy, times):
    plan = copy(mixed)
    rows = rows_of(plan, None)
    row = next(row for row in rows if len(row["samples"]) > 1)
    sample = row["samples"].pop()
    row["samples"] += [sample] * times
    replant(plan, rows, None)
    assert f"holdout.parquet: sample {sample} occurs {times} times, not 1" in reason(plan)


def test_a_hold_out_of_another_share(mixed, copy):
    plan = copy(mixed)
    edit(plan, lambda manifest: manifest.update(holdout=0.25, sources={}))
    assert "the source" in reason(plan)
    edit(plan, lambda manifest: manifest.update(holdout=0.0))
    assert "presence of a hold-out is False, stated is True" in reason(plan)
    edit(plan, lambda manifest: manifest.update(holdout=0.2, holdout_set=None))
    assert "presence of a hold-out is True, stated is False" in reason(plan)


# Budgets


def test_a_token_budget_broken(plan):
    worst = max(row["padded_tokens"] for row in rows_of(plan))
    budget = worst - manifest_of(plan)["align"]
    edit(plan, lambda manifest: manifest.update(token_budget=budget))
    static = f"states width {worst}"  # of a packed plan, the budget's own
    assert f" padded_tokens, the budget is {budget}" in reason(plan) or static in reason(plan)


def test_an_anchor_budget_broken(plan):
    worst = max(row["anchors"] for epoch in (0, 1) for row in rows_of(plan, epoch))
    edit(plan, lambda manifest: manifest.update(anchor_budget=worst - 1))
    assert f"{worst} anchors, the budget is {worst - 1}" in reason(plan)


def overfull(made: Made, plan: Path, rows: list[dict], name: str, budget: int) -> list[dict]:
    """Micro-batches of a bucket merged until the first row passes a budget, every number true."""
    largest = sorted(rows, key=lambda row: sum(other[name] for other in rows if other["bucket"] == row["bucket"]))
    keep = largest.pop()
    while keep[name] <= budget:
        other = next(row for row in largest if row["samples"] and row["bucket"] == keep["bucket"])
        largest.remove(other)
        keep = restated(made, plan, keep, keep["samples"] + other["samples"])
    return laid_out([keep, *largest])


@pytest.mark.parametrize(("name", "budget"), [("padded_tokens", 200), ("anchors", 60)])
def test_micro_batches_that_together_pass_a_budget(made, plan, name, budget):
    """Samples and numbers agree, the budget alone does not."""
    if name == "anchors":
        edit(plan, lambda manifest: manifest.update(token_budget=10_000))
    if name == "anchors" and made.plan.parent.name.startswith("packed fixed"):
        pytest.skip("the static shape is the token budget's")
    rows = overfull(made, plan, rows_of(plan), name, budget)
    replant(plan, rows)
    assert f"epoch-001.parquet: row 0 has {rows[0][name]} {name}, the budget is {budget}" in reason(plan)


def test_a_budget_of_the_hold_out_broken(mixed, copy):
    plan = copy(mixed)
    edit(plan, lambda manifest: manifest.update(anchor_budget=None))
    rows = overfull(mixed, plan, rows_of(plan, None), "padded_tokens", 200)
    replant(plan, rows, None)
    assert f"holdout.parquet: row 0 has {rows[0]['padded_tokens']} padded_tokens, the budget is 200" in reason(plan)


# The tables' order and numbers


def test_a_checksum_of_an_epoch_file(plan):
    path = plan / "epoch-001.parquet"
    pq.write_table(pq.read_table(path), path, compression="none")  # the same rows in other bytes
    assert "epoch-001.parquet: its checksum differs" in reason(plan)


def test_a_fingerprint_of_an_epoch_s_columns(plan):
    edit(plan, lambda manifest: manifest["epochs"][0].update(fingerprint="0" * 32))
    assert "epoch-000.parquet: the fingerprint is" in reason(plan)


@pytest.mark.parametrize("distance", [1, 3])
def test_rows_out_of_order(example, distance):
    rows = rows_of(example)
    rows[2], rows[2 + distance] = rows[2 + distance], rows[2]
    replant(example, rows)
    assert "row 2 is out of order" in reason(example)


def test_an_empty_slot_in_an_earlier_step(plan):
    """A slot of the first step moved to a step more, so that every sample and total is still there."""
    rows = rows_of(plan)
    steps = rows[-1]["step"] + 1
    moved = rows[0] | {"step": steps, "slot": 0}
    empty = dict.fromkeys(rows[0], 0) | {"samples": []}
    rows[0] = empty | {"step": 0, "slot": 0}
    rows += [moved, empty | {"step": steps, "slot": 1}, empty | {"step": steps, "slot": 2}]
    replant(plan, rows)
    assert "step 0 has an empty slot" in reason(plan)


def test_a_step_too_few_rows(plan):
    replant(plan, rows_of(plan)[:-1], steps=manifest_of(plan)["epochs"][1]["steps"])
    assert "number of rows" in reason(plan)


@pytest.mark.parametrize("name", ["tokens", "width", "padded_tokens", "loss_tokens", "anchors"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_row_s_number_altered(example, name, change):
    rows = rows_of(example)
    rows[4][name] += change
    replant(example, rows)
    assert f"row 4 states {name} {rows[4][name]}, its samples have {rows[4][name] - change}" in reason(example)


@pytest.mark.parametrize("change", [1.01, 1.0001, 0.0, float("nan"), float("inf"), -1.0])
def test_a_row_s_cost_altered(example, change):
    rows = rows_of(example)
    rows[4]["cost"] *= change
    replant(example, rows)
    assert "row 4 states cost" in reason(example)


@pytest.mark.parametrize("coefficient", ["c0", "a", "b", "d", "e"])
def test_a_coefficient_altered(example, coefficient):
    edit(example, lambda manifest: manifest["cost"].update({coefficient: manifest["cost"][coefficient] * 1.5 + 1e-4}))
    assert "epoch-000.parquet: row 0 states cost" in reason(example)


@pytest.mark.parametrize("name", ["width", "tokens", "padded_tokens", "loss_tokens", "anchors", "cost", "bucket"])
def test_an_empty_slot_that_is_not_all_zeros(typical, example, name):
    rows = [row for row in rows_of(example) if row["samples"]]
    while len(rows) % 3 == 0:  # no slot is empty: split a micro-batch
        number = next(number for number, row in enumerate(rows) if len(row["samples"]) > 1)
        first, *others = rows[number]["samples"]
        rows[number] = restated(typical, example, rows[number], [first])
        rows.append(restated(typical, example, rows[number], others))
    rows = laid_out(rows)
    rows[-1][name] = 1
    replant(example, rows)
    assert f"epoch-001.parquet: row {len(rows) - 1} " in reason(example)


@pytest.mark.parametrize("name", [*TOTALS, "samples", "micro_batches"])
@pytest.mark.parametrize("epoch", [1, None])
def test_a_total_altered(example, name, epoch):
    if epoch is None and manifest_of(example)["holdout_set"] is None:
        pytest.skip("nothing is held out")
    edit(example, lambda manifest: summary_in(manifest, epoch).update({name: summary_in(manifest, epoch)[name] + 1}))
    words = {"samples": "number of samples", "micro_batches": "number of micro-batches"}
    assert f"{name_of(epoch)}: the {words.get(name, f'total of {name}')} is" in reason(example)


@pytest.mark.parametrize("change", [-1, 1, 999])
def test_a_bucket_altered(plan, change):
    rows = rows_of(plan)
    bounds = manifest_of(plan)["boundaries"]
    number = next((n for n, row in enumerate(rows) if len(bounds) > 1 and row["bucket"] + change in range(len(bounds))), 4)
    rows[number]["bucket"] = abs(rows[number]["bucket"] + change)
    replant(plan, rows)
    assert f"row {number} holds a sample outside its bucket" in reason(plan)


@pytest.mark.parametrize("bounds", [[], [5], [5, 60], [90, 80], [80, 80, 96]], ids=str)
def test_boundaries_altered(plan, bounds):
    """None, too few to reach the longest, not rising; none where each step is cut anew is right."""
    if manifest_of(plan)["boundaries"] == bounds:
        bounds = [96]
    edit(plan, lambda manifest: manifest.update(boundaries=bounds))
    assert f"the boundaries {bounds} are none for rows of up to" in reason(plan)


def test_boundaries_that_are_not_aligned(copy, tmp_path):
    plan = make("fixed", tmp_path).plan
    edit(plan, lambda manifest: manifest.update(boundaries=[20, *manifest["boundaries"][1:]]))
    assert "the boundaries [20, " in reason(plan)


@pytest.mark.parametrize("name", ["width", "cost", "samples"])
def test_numbers_that_are_not_there(example, name):
    """A null for a number, or for one of a micro-batch's samples."""
    path = example / "epoch-001.parquet"
    rows = rows_of(example)
    if name == "samples":
        rows[0]["samples"].append(None)
    else:
        rows[0][name] = None
    pq.write_table(pa.Table.from_pylist(rows, schema=EPOCH_SCHEMA), path)
    edit(example, lambda manifest: manifest["epochs"][1].update(checksum=file_digest(path)))
    assert "epoch-001.parquet: lacks some of its numbers" in reason(example)


def test_an_epoch_file_that_is_gone_or_no_parquet(example):
    (example / "epoch-001.parquet").write_bytes(b"PAR1")
    assert "plan changed or damaged" in reason(example)
    edit(example, lambda manifest: manifest["epochs"][1].update(checksum=file_digest(example / "epoch-001.parquet")))
    assert "cannot read the epoch" in reason(example)
    (example / "epoch-001.parquet").unlink()
    assert "epoch-001.parquet" in reason(example)


# plan.json


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_of_the_certificate_altered(example, figure):
    true = manifest_of(example)["certificate"][figure]
    wrong = [None, "", 3, 0.123] if true is None or isinstance(true, str) else [None, "", true + 1, true * 1.0001 + 1e-6]
    for value in wrong:
        if value != true:
            edit(example, lambda manifest, value=value: manifest["certificate"].update({figure: value}))
            assert f"plan: the certificate states {figure} {value}, the tables come to {true}"[:60] in reason(example)
    edit(example, lambda manifest: manifest["certificate"].pop(figure))
    assert "states no valid certificate" in reason(example)


def test_a_figure_that_no_certificate_has(example):
    edit(example, lambda manifest: manifest["certificate"].update(luck=0.5))
    assert "the certificate states luck 0.5, the tables come to nothing" in reason(example)


@pytest.mark.parametrize("name", ["longest", "fullest"])
def test_a_wrong_place_to_rehearse(plan, name):
    key = {"longest": "width", "fullest": "cost"}[name]
    most = max(row[key] for epoch in range(2) for row in rows_of(plan, epoch))
    lesser = next((row for row in rows_of(plan, 0) if row[key] < most), None)
    if lesser is None:
        pytest.skip("all micro-batches are of one shape")
    place = {column: lesser[column] for column in ("step", "slot", "width", "padded_tokens", "anchors")}
    edit(plan, lambda manifest: manifest["rehearse"].update({name: place | {"epoch": 0}}))
    assert f"the {name} micro-batch to rehearse is not where plan.json says" in reason(plan)


@pytest.mark.parametrize("name", ["longest", "fullest"])
@pytest.mark.parametrize("key", ["epoch", "step", "slot"])
def test_a_place_to_rehearse_that_is_nowhere(example, name, key):
    edit(example, lambda manifest: manifest["rehearse"][name].update({key: 10**9}))
    assert f"the {name} micro-batch to rehearse is not where plan.json says" in reason(example)


@pytest.mark.parametrize("name", ["longest", "fullest"])
@pytest.mark.parametrize("size", ["width", "padded_tokens", "anchors"])
def test_a_wrong_size_of_what_to_rehearse(example, name, size):
    true = manifest_of(example)["rehearse"][name][size]
    edit(example, lambda manifest: manifest["rehearse"][name].update({size: true + 1}))
    assert f"the {name} micro-batch to rehearse has {size} {true}, not {true + 1}" in reason(example)


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
        {"align": 2},
        {"holdout": 0.5},
        {"weights": {"made": 0.75}},
        {"added": True},
        {"fingerprint": "0" * 32},
    ],
    ids=lambda change: next(iter(change)),
)
def test_plan_json_altered(example, change):
    edit(example, lambda manifest: manifest.update(change), sign=False)
    assert "plan.json was changed after planning" in reason(example)


@pytest.mark.parametrize("key", ["slots", "store", "epochs", "fingerprint", "token_budget", "cost", "rehearse", "sources"])
def test_plan_json_without_a_key(bucketed, copy, key):
    plan = copy(bucketed)
    edit(plan, lambda manifest: manifest.pop(key), sign=False)
    assert_user_error(run("verify", plan), str(plan))


def test_an_epoch_removed(example):
    edit(example, lambda manifest: manifest["epochs"].pop(), sign=False)
    assert "plan.json was changed after planning" in reason(example)


# What was planned


def test_moved_data_is_named_with_data(made, plan, tmp_path):
    moved = [
        Path(
            shutil.move(
                shutil.copy2(path, tmp_path / "x") if path.is_file() else shutil.copytree(path, tmp_path / "x"),
                tmp_path / f"moved{number}",
            )
        )
        for number, path in enumerate(made.data)
    ]

    def lose(manifest: dict) -> None:
        for origin in manifest.get("stores") or [manifest.get("store") or manifest.get("lengths")]:
            origin["path"] = str(tmp_path / "gone")

    edit(plan, lose)
    assert "no token store here" in reason(plan) or "no such file" in reason(plan)
    assert list(verify(plan, tuple(moved)))
    assert run("verify", plan, *(word for path in moved for word in ("--data", path))).exit_code == 0


def test_other_data_in_its_place(made, plan, tmp_path):
    """The same lengths but one."""
    if made.data[0].is_file():
        table = pq.read_table(made.data[0]).to_pydict()
        table["length"][7] += 1
        pq.write_table(pa.table(table), tmp_path / "other.parquet")
        assert "other.parquet: not the lengths that" in reason(plan, [tmp_path / "other.parquet"])
    else:
        other = make_store(tmp_path / "other", [*LENGTHS[:-1], LENGTHS[-1] + 1])
        assert "other: not the store that" in reason(plan, [other, *made.data[1:]])


def test_too_many_or_too_few_data(made, plan):
    more = "stores" if made.data[0].is_dir() else "one table of lengths"
    assert f"made from {'' if more[0] == 'o' else f'{len(made.data)} '}{more}, --data names" in reason(
        plan, [*made.data] * 2
    )
    if len(made.data) > 1:
        assert "made from 2 stores, --data names 1" in reason(plan, made.data[:1])
        assert f"{made.data[1]}: not the store that" in reason(plan, made.data[::-1])


def test_what_the_trainer_opens(made, plan):
    opened = Plan(plan)
    if made.data[0].is_file():
        for data in ((), made.data):
            with pytest.raises(UserError, match="was planned from lengths alone; tokenize and plan again"):
                open_stores(opened, data)
        return
    stores = open_stores(opened, made.data)
    assert len(stores) == len(open_stores(opened)) == len(made.lengths)
    assert [len(stores.sample(sample)[0]) for sample in range(len(stores))] == made.lengths


@pytest.fixture
def store(bucketed, copy, tmp_path) -> Path:
    """A copy of a store, to be spoilt, that the plan beside it points to."""
    path = shutil.copytree(bucketed.data[0], tmp_path / "store")
    edit(copy(bucketed), lambda manifest: manifest["store"].update(path=str(path)))
    assert list(verify(tmp_path / "plan"))
    return path


@pytest.mark.parametrize("name", ["shard-00001.arrow", "index.parquet"])
def test_a_byte_changed_in_the_store(store, name):
    data = bytearray((store / name).read_bytes())
    data[len(data) // 2] ^= 1
    (store / name).write_bytes(data)
    assert f"{name}: its checksum differs" in reason(store.parent / "plan")


def edit_store(store: Path, change: Callable[[dict], None]) -> None:
    """Change store.json."""
    manifest = json.loads((store / "store.json").read_text())
    change(manifest)
    (store / "store.json").write_text(json.dumps(manifest))


def spoil_shard(store: Path, change: Callable[[list[dict]], None]) -> None:
    """Change the samples of the second shard, with a checksum as if they had been stored."""
    path = store / "shard-00001.arrow"
    table = pa.ipc.open_file(path).read_all()
    samples = table.to_pylist()
    change(samples)
    table = pa.Table.from_pylist(samples, schema=table.schema)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_batch(table.combine_chunks().to_batches()[0])
    stated = {"checksum": file_digest(path), "bytes": path.stat().st_size}
    edit_store(store, lambda manifest: manifest["shards"][1].update(stated))


def test_a_token_changed_behind_the_checksum(store):
    first = Store(store).column("shard").tolist().index(1)
    spoil_shard(store, lambda samples: samples[0]["input_ids"].__setitem__(0, 299))
    assert f"the key of sample {first} is" in reason(store.parent / "plan")


@pytest.mark.parametrize("spans", [[1], [5, 2], [1, 10_000], [1, 2, 3]])
def test_loss_spans_that_are_none(store, spans):
    spoil_shard(store, lambda samples: samples[2].update(loss_spans=spans))
    assert "the loss spans of row 2 in shard 1 are none of its sample" in reason(store.parent / "plan")


@pytest.mark.parametrize("name", ["length", "loss_tokens", "eligible", "shard", "row", "sample", "key"])
def test_an_index_changed_behind_the_checksum(store, name):
    table = pq.read_table(store / "index.parquet")
    rows = table.to_pylist()
    rows[7][name] = rows[8][name] if rows[7][name] != rows[8][name] else rows[8][name] + 1
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), store / "index.parquet")
    edit_store(store, lambda manifest: manifest.update(index_checksum=file_digest(store / "index.parquet")))
    assert f"the {name} of sample 7 is" in reason(store.parent / "plan")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tokens", "total of tokens"),
        ("loss_tokens", "total of loss_tokens"),
        ("eligible", "total of eligible"),
        ("longest", "longest sample"),
        ("records", "number of records"),
    ],
)
def test_a_store_s_total_altered(store, name, words):
    edit_store(store, lambda manifest: manifest["counts"].update({name: manifest["counts"][name] + 1}))
    assert words in reason(store.parent / "plan")


def test_a_store_swapped(store):
    shutil.rmtree(store)
    make_store(store, [*LENGTHS[:-1], LENGTHS[-1] + 1])
    assert "not the store that" in reason(store.parent / "plan")
    assert "not the store that" in reason(store.parent / "plan", [store])


def test_a_store_s_fingerprint_that_is_not_its_content_s(store):
    edit_store(store, lambda manifest: manifest.update(fingerprint="0" * 32))
    edit(store.parent / "plan", lambda manifest: manifest["store"].update(fingerprint="0" * 32))
    assert "the fingerprint is" in reason(store.parent / "plan")


# Edges


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    "lengths", [[7], [9] * 2, [90] * 40, [3] * 300, [3, 90]], ids=lambda lengths: f"{len(lengths)} of {lengths[0]}"
)
def test_a_plan_of_few_or_equal_samples_holds(tmp_path, name, lengths):
    options = {"slots": 3, "token_budget": 200, **PLANS[name], "epochs": 3, "weights": (), "holdout": 0.0}
    pool = from_stores(Stores([make_store(tmp_path / "store", lengths)]), False)
    write_plan(settle(pool, PlanOptions(**options)), tmp_path / "plan")
    assert list(verify(tmp_path / "plan"))
    certificate = manifest_of(tmp_path / "plan")["certificate"]
    if len(set(lengths)) == 1:
        assert certificate["design_effect"] is None and certificate["step_correlation"] is None
