"""A target sharded over ranks: the same bits as one that each rank holds whole, whatever the ranks have to do."""

import json
import multiprocessing
import socket
from pathlib import Path

import pytest
from conftest import BLOCK, reported, same_tensors
from workers import Die, NoMemory, Poison, compare_sharded

from dflash_prep.sample_maker import Options
from dflash_prep.store import Store
from dflash_prep.tokenize import tokenize
from dflash_prep.tokenizer import load_tokenizer
from tests.prep.support import make_plan as write_and_open

SHARDED = "--shard-target"


@pytest.fixture(scope="module")
def few(tmp_path_factory, target_dir) -> Store:
    """Ten samples of which no two fit a micro-batch of 80 tokens; the longer ones have fewer anchors."""
    folder = tmp_path_factory.mktemp("few")
    turns = [("x" * (6 - 2 * (n % 3)), "".join(chr(97 + n * k % 26) for k in range(20 + n % 3))) for n in range(10)]
    with (folder / "corpus.jsonl").open("w") as file:
        for asked, said in turns:
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            file.write(json.dumps({"messages": messages}) + "\n")
    tokenize((str(folder / "corpus.jsonl"),), load_tokenizer(str(target_dir)), folder / "tokens", Options())
    return Store(folder / "tokens")


@pytest.fixture(scope="module", params=["packed", "bucketed"])
def plan(request, tmp_path_factory, few):
    """Two epochs of three steps with four slots; an epoch's last step and the hold-out have one slot that is not empty."""
    how = {"strategy": request.param, "slots": 4, "token_budget": 80, "holdout": 0.1, "epochs": 2, "block_size": BLOCK}
    made = write_and_open(few.path, tmp_path_factory.mktemp("plan") / "plan", **how)
    for epoch, last in ((0, 2), (1, 2), (None, 0)):
        assert [row["slot"] for row in made.rows(epoch) if row["step"] == last and row["samples"]] == [0]
    return made


@pytest.mark.usefixtures("start_ranks")  # whose server has everything imported
def test_families_give_the_same_bits_from_shards(tmp_path):
    """Each rank with a batch of its own, or none; what a rank keeps of the layers is a half."""
    context = multiprocessing.get_context("forkserver")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = [context.Process(target=compare_sharded, args=(rank, port, tmp_path)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=120)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert {"Llama", "Qwen3", "Gemma3", "Qwen3Moe", "Qwen3_5"} <= set(found)
        for family, said in found.items():
            assert said["equal"] == [True] * 3, (family, said)
            assert said["tied_and_whole"], (family, said)
            assert 0.5 <= said["share"] < 0.55, (family, said)


def test_a_run_is_the_same_with_and_without_also_in_parts(plan, run_ranks, tmp_path):
    """Empty slots in the last step of each epoch and of the hold-out; the sharded run resumes."""
    often = ("--eval-every", 1)
    assert run_ranks(plan, tmp_path / "whole", *often)[0] == 0
    code, said = run_ranks(plan, tmp_path / "parts", SHARDED, "--max-steps", 2, *often)
    assert code == 0, said
    code, said = run_ranks(plan, tmp_path / "parts", SHARDED, "--resume", "auto", *often)
    assert code == 0, said
    assert same_tensors(tmp_path / "whole", tmp_path / "parts")
    for name, left_out in (("metrics.jsonl", "loss"), ("validation.jsonl", "loss")):
        whole, parts = (
            [json.loads(line)[left_out] for line in (tmp_path / run / name).open()] for run in ("whole", "parts")
        )
        assert whole == parts
        assert len(whole) == plan.total_steps == 6


def test_bad_steps_are_named_where_a_rank_has_only_empty_slots(plan, run_ranks, tmp_path):
    code, said = run_ranks(plan, tmp_path / "run", SHARDED, "--max-bad-steps", 1, fault=Poison((2, 0)))
    assert code == 1
    (sample,) = next(row["samples"] for row in plan.rows(0) if row["step"] == 2)
    for text in said:
        (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
        assert f"step 3: the loss or gradient of samples {sample} is not finite" in line


@pytest.mark.parametrize("fault", [Die(1, 1, 3), NoMemory(1)], ids=["death", "no memory in rehearsal"])
def test_others_do_not_wait_for_a_rank_that_has_stopped(fault, plan, start_ranks, tmp_path):
    if plan["strategy"] == "packed":
        pytest.skip("once is enough")
    assert plan["rehearse"]["longest"] != plan["rehearse"]["fullest"]  # there is a second one that the others go on with
    ranks = start_ranks(plan, tmp_path / "run", SHARDED, fault=fault)
    for each in ranks:
        each.join(timeout=60)
    assert [each.exitcode for each in ranks] == [1, 3 if isinstance(fault, Die) else 1]
    errors = [
        [line for line in Path(f"{tmp_path / 'run'}.{rank}").read_text().splitlines() if line.startswith("error: ")]
        for rank in range(2)
    ]
    assert len(errors[0]) == 1
    assert "another worker has ended" in errors[0][0]
    if isinstance(fault, NoMemory):
        assert len(errors[1]) == 1
        assert "does not fit the memory" in errors[1][0]


def test_one_worker_holds_the_whole_target(plan, train_here, tmp_path):
    """The command of a run is the same on any number of workers."""
    done = train_here(plan, tmp_path / "run", SHARDED, "--max-steps", 1)
    assert done.exit_code == 0, done.output
    assert "--shard-target: there is one worker, which holds the whole target" in done.stdout
    assert len(reported(tmp_path / "run")) == 1
