"""The hidden-state cache: the same training with the target's features read as with them computed, whatever happens."""

import fcntl
import json
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_target, reported, same_tensors, state_of, write_corpus
from workers import Die

from dflash_prep.errors import UserError
from dflash_prep.sample_maker import Options
from dflash_prep.tokenize import tokenize
from dflash_prep.tokenizer import load_tokenizer
from dflash_trainer import hidden_cache
from dflash_trainer.checkpoint import newest_checkpoint
from dflash_trainer.hidden_cache import Claim, HiddenCache, planned_samples
from dflash_trainer.loop import take_steps
from dflash_trainer.target import FrozenTarget
from tests.prep.support import make_plan as write_plan

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def plan(make_plan):
    return make_plan(holdout=0.1, epochs=3, strategy="packed")


@pytest.fixture
def passes(monkeypatch) -> list[tuple[int, int]]:
    """(epoch, step) of each micro-batch that the target runs on once training has begun."""
    seen, training = [], []
    before = FrozenTarget.features

    def features(target, batch):
        if training:
            seen.append((batch.epoch, batch.step))
        return before(target, batch)

    def begin(run, *arguments):
        training.append(run)
        try:
            return take_steps(run, *arguments)
        finally:
            training.clear()

    monkeypatch.setattr(FrozenTarget, "features", features)
    monkeypatch.setattr("dflash_trainer.train.take_steps", begin)
    return seen


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in reported(run)]


def test_one_epoch_runs_the_target_and_no_other_does(train_here, plan, tmp_path, passes):
    """Against a run without a cache whose features are rounded as a cache rounds them."""
    cache = tmp_path / "cache"
    found = train_here(plan, tmp_path / "cached", "--hidden-cache", cache)
    assert found.exit_code == 0, found.output
    assert {epoch for epoch, _ in passes} == {0}
    wanted = planned_samples(plan, 60)
    size = sum(len(hidden_cache.load_file(shard)["samples"]) for shard in cache.glob("shard-*"))
    assert size == len(wanted) and f"features of {size} samples take" in found.output

    passes.clear()
    assert train_here(plan, tmp_path / "again", "--hidden-cache", cache).exit_code == 0
    assert not passes
    np.testing.assert_allclose(losses(tmp_path / "again"), losses(tmp_path / "cached"), rtol=1e-3)

    before = FrozenTarget.features
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrozenTarget, "features", lambda target, batch: before(target, batch).bfloat16().float())
        assert train_here(plan, tmp_path / "rounded").exit_code == 0
    np.testing.assert_allclose(losses(tmp_path / "cached"), losses(tmp_path / "rounded"), rtol=1e-3)
    assert state_of(newest_checkpoint(tmp_path / "cached"))["hidden_cache"]


def test_another_plan_computes_only_what_the_cache_lacks(train_here, make_plan, tmp_path, passes):
    cache, plan = tmp_path / "cache", make_plan(strategy="bucketed", seed=3)
    steps = plan["epochs"][0]["steps"] // 2
    half = train_here(plan, tmp_path / "half", "--hidden-cache", cache, "--max-steps", steps)
    assert half.exit_code == 0, half.output
    missing = [line for line in half.output.splitlines() if "still to be written" in line]
    passes.clear()
    whole = train_here(plan, tmp_path / "whole", "--hidden-cache", cache)
    assert whole.exit_code == 0 and set(passes) <= {(0, step) for step in range(steps, plan["epochs"][0]["steps"])}
    assert missing != [line for line in whole.output.splitlines() if "still to be written" in line]
    # epochs, seed, strategy: all the same to a cache
    passes.clear()
    assert train_here(make_plan(strategy="packed", seed=9), tmp_path / "other", "--hidden-cache", cache).exit_code == 0
    assert not passes


def test_killed_and_resumed_it_ends_the_same_on_two_ranks_sharded_or_not(run_ranks, plan, tmp_path):
    each = plan["epochs"][0]["steps"]
    options = ("--save-every", "2", "--hidden-cache")
    assert run_ranks(plan, tmp_path / "whole", *options, tmp_path / "a")[0] == 0
    for epoch, step in ((0, each - 2), (1, 1)):
        run = tmp_path / f"killed-{epoch}"
        cache = tmp_path / f"cache-{epoch}"
        run_ranks(plan, run, *options, cache, fault=Die(1, step, 1, epoch))
        code, said = run_ranks(plan, run, *options, cache, "--resume", "auto")
        assert code == 0, said
        assert same_tensors(run, tmp_path / "whole")
    code, said = run_ranks(plan, tmp_path / "sharded", *options, tmp_path / "c", "--shard-target")
    assert code == 0, said
    assert same_tensors(tmp_path / "sharded", tmp_path / "whole")


def test_what_is_not_the_same_is_refused_in_a_line(train_here, plan, target_dir, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    assert train_here(plan, tmp_path / "run", "--hidden-cache", cache, "--max-steps", "1").exit_code == 0
    before = sorted((file.name, file.stat().st_size) for file in cache.iterdir())

    def refusal(*options, of=plan):
        found = train_here(of, tmp_path / "refused", *options)
        assert found.exit_code == 1 and len(found.output.strip().splitlines()[-1].splitlines()) == 1, found.output
        return found.output.strip().splitlines()[-1]

    assert "another taps" in refusal("--hidden-cache", cache, "--taps", "0,2")
    assert "another target dtype" in refusal("--hidden-cache", cache, "--target-dtype", "bfloat16")
    assert "another target;" in refusal("--hidden-cache", cache, "--target", make_target(tmp_path / "other", seed=5))
    corpus = write_corpus(tmp_path / "corpus.jsonl", samples=20, seed=8)
    tokenize((str(corpus),), load_tokenizer(str(target_dir)), tmp_path / "tokens", Options())
    other = write_plan(tmp_path / "tokens", tmp_path / "plan", epochs=1, slots=4, token_budget=600, block_size=4)
    assert "another store fingerprint" in refusal("--hidden-cache", cache, of=other)
    assert "--loss kd" in refusal("--hidden-cache", cache, "--loss", "kd")
    assert "not empty" in refusal("--hidden-cache", tmp_path / "run")
    assert "cannot keep a cache here" in refusal("--hidden-cache", corpus)
    with (cache / ".lock").open() as other_run:
        fcntl.flock(other_run, fcntl.LOCK_EX)
        assert "another run writes" in refusal("--hidden-cache", cache)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 10**6 - 2000, 2000))
    assert "does not fit" in refusal("--hidden-cache", tmp_path / "small")
    assert not list((tmp_path / "small").glob("[!.]*"))
    assert before == sorted((file.name, file.stat().st_size) for file in cache.iterdir())


def test_a_damaged_shard_is_named_and_without_it_training_goes_on(train_here, plan, tmp_path):
    cache = tmp_path / "cache"
    assert train_here(plan, tmp_path / "run", "--hidden-cache", cache).exit_code == 0
    shard = next(cache.glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-10])
    found = train_here(plan, tmp_path / "next", "--hidden-cache", cache)
    assert found.exit_code == 1 and str(shard) in found.output.splitlines()[-1]
    shard.unlink()
    assert train_here(plan, tmp_path / "next", "--hidden-cache", cache).exit_code == 0


def test_many_read_a_cache_but_one_writes_it_and_then_alone(train_here, plan, make_plan, tmp_path):
    cache = tmp_path / "cache"
    assert train_here(plan, tmp_path / "run", "--hidden-cache", cache).exit_code == 0
    shard = next(cache.glob("shard-*"))
    key = {name: value for name, value in json.loads((cache / "cache.json").read_text()).items() if name != "version"}
    with Claim(cache, key) as first:
        with pytest.raises(UserError, match="another run writes"):
            Claim(cache, key)
        first.share()
        with Claim(cache, key) as second:
            assert not first.alone and not second.alone
        assert train_here(plan, tmp_path / "reads", "--hidden-cache", cache).exit_code == 0
        shard.unlink()
        found = train_here(plan, tmp_path / "lacks", "--hidden-cache", cache)
        assert found.exit_code == 1 and "lacks samples" in found.output.splitlines()[-1]


@pytest.mark.parametrize("seed", range(8))
def test_what_ranks_add_all_read_after_a_refresh_and_not_before(tmp_path, seed):
    draw = np.random.default_rng(seed)
    ranks, count, width = int(draw.integers(1, 4)), int(draw.integers(1, 40)), 6
    lengths = draw.integers(1, 9, count)
    truth = [torch.randn(length, width).bfloat16() for length in lengths]
    open_all = lambda: [HiddenCache(tmp_path, lengths, width, rank) for rank in range(ranks)]  # noqa: E731
    caches, written, pending = open_all(), set(), set()
    for _ in range(30):
        match int(draw.integers(0, 5)):
            case 0:
                for cache in caches:
                    cache.flush()
                for cache in caches:
                    cache.refresh()
                written, pending = written | pending, set()
            case 1:  # killed: what was not flushed is lost
                (tmp_path / "shard-0000-000099.safetensors.partial").write_bytes(b"torn")
                caches, pending = open_all(), set()
            case _:
                sample = int(draw.integers(0, count))
                if sample not in pending:  # each has one rank at a time
                    caches[int(draw.integers(0, ranks))].add(sample, truth[sample].float())
                    pending |= {sample} - written
        for cache in caches:
            assert set(cache.holds(range(count)).nonzero()[0].tolist()) == written
            assert all(torch.equal(cache.read(sample), truth[sample]) for sample in written)
    sizes = [len(hidden_cache.load_file(file)["samples"]) for file in tmp_path.glob("*.safetensors")]
    assert sum(sizes) == len(written)


def test_only_samples_in_slots_with_an_anchor_are_planned(plan):
    rows = [row for epoch in (0, 1, 2, None) for row in plan.rows(epoch) if row["anchors"]]
    assert planned_samples(plan, 60).tolist() == sorted({sample for row in rows for sample in row["samples"]})
    assert json.loads((plan.path / "plan.json").read_text())["holdout_set"]
