"""--wandb: a made-up package in place of W&B's own, which the project does not need."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from conftest import reported

FAKE = '''
"""Records every call in the file `calls` beside it; raises where the file `faults` names a call."""

import json
from pathlib import Path

HERE = Path(__file__).parent


def note(name, /, **given):
    with (HERE / "calls").open("a") as file:
        file.write(json.dumps([name, given], default=str) + "\\n")
    if name in (HERE / "faults").read_text().split():
        raise RuntimeError("no network\\nbehind the wall")


class Run:
    def __init__(self, step):
        self.step = step

    def log(self, values, step):
        note("log", step=step, values=values)
        self.step = step

    def finish(self):
        note("finish")


def init(**options):
    logged = [given["step"] for name, given in map(json.loads, (HERE / "calls").open()) if name == "log"]
    note("init", **options)
    return Run(max(logged, default=-1) + 1 if options["resume"] == "allow" else 0)
'''


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Install the fake; returns what reads its calls, and sets those that fail."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "wandb.py").write_text(FAKE)
    (folder / "calls").write_text("")
    (folder / "faults").write_text("")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    for name in ("WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)

    def calls(name: str, faults: str = "") -> list[dict]:
        (folder / "faults").write_text(faults)
        return [given for each, given in map(json.loads, (folder / "calls").open()) if each == name]

    yield calls
    sys.modules.pop("wandb", None)
    importlib.invalidate_caches()


@pytest.fixture(scope="module")
def plan(make_plan):
    return make_plan(strategy="packed", token_budget=250, holdout=0.2)


def test_it_logs_the_rows_of_the_metrics(plan, train_here, fake, tmp_path):
    done = train_here(plan, tmp_path / "run", "--max-steps", "3", "--eval-every", "2", "--wandb")
    assert done.exit_code == 0, done.output
    (opened,) = fake("init")
    assert (opened["project"], opened["name"], opened["resume"]) == ("dflash", "run", "allow")
    assert Path(opened["dir"]) == tmp_path / "run"
    assert opened["config"]["plan_fingerprint"] == plan["fingerprint"]
    steps = {}
    for call in fake("log"):
        steps.setdefault(call["step"], {}).update(call["values"])
    assert list(steps) == [1, 2, 3]
    for row in reported(tmp_path / "run"):
        found = steps[row["step"]]
        assert all(found[f"train/{key}"] == row[key] for key in ("loss", "gradient_norm", "tokens", "memory_bytes"))
        assert found["slot_accuracy/02"] == row["slot_accuracy"][1]
        assert ("validation/loss" in found) == (row["step"] in (2, 3))
    assert len(fake("finish")) == 1


def test_a_resumed_run_goes_on_under_its_id(plan, train_here, fake, tmp_path):
    """Also after a crash: the steps that it takes once more are not sent once more."""
    common = ("--wandb", "--save-every", "2", "--max-steps")
    assert train_here(plan, tmp_path / "run", *common, "4").exit_code == 0
    assert train_here(plan, tmp_path / "run", *common, "5", "--resume", str(step_2(tmp_path))).exit_code == 0
    assert train_here(plan, tmp_path / "other", *common, "1").exit_code == 0
    first, second, other = (call["id"] for call in fake("init"))
    assert first == second != other
    sent = [call["step"] for call in fake("log") if "train/loss" in call["values"]]
    assert sent[:5] == [1, 2, 3, 4, 5]


def step_2(tmp_path: Path) -> Path:
    """The checkpoint after two steps."""
    return tmp_path / "run" / "checkpoints" / "step-00000002"


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_its_failures_are_said_once_and_end_nothing(call, plan, train_here, fake, tmp_path):
    fake("init", faults=call)
    done = train_here(plan, tmp_path / "run", "--max-steps", "3", "--wandb")
    assert done.exit_code == 0, done.output
    assert done.output.count("wandb") == 1
    assert "warning: wandb: no network behind the wall; the run goes on without it" in done.stderr
    assert [row["step"] for row in reported(tmp_path / "run")] == [1, 2, 3]
    assert len(fake(call)) == 1


def test_its_environment_variables_hold(plan, train_here, fake, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_PROJECT", "drafts")
    monkeypatch.setenv("WANDB_NAME", "seventh")
    assert train_here(plan, tmp_path / "run", "--max-steps", "1", "--wandb").exit_code == 0
    assert [(call["project"], call["name"]) for call in fake("init")] == [("drafts", "seventh")]


def test_only_rank_0_logs_and_only_if_asked(plan, run_ranks, train_here, fake, monkeypatch, tmp_path):
    assert train_here(plan, tmp_path / "without", "--max-steps", "1").exit_code == 0
    assert not fake("init")
    code, said = run_ranks(plan, tmp_path / "two", "--max-steps", "2", "--wandb", fault=Reached(tmp_path / "packages"))
    assert code == 0, said
    assert len(fake("init")) == 1


class Reached:
    """Brings the fake to the ranks, which are processes of their own: unpickling it is the first thing they do."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __setstate__(self, state: dict) -> None:
        self.__dict__ = state
        sys.path.insert(0, str(self.folder))

    def __call__(self, rank, stepper, batch) -> None:
        pass


@pytest.mark.parametrize("folder", [False, True], ids=["nothing", "a folder of its runs"])
def test_without_the_package_nothing_starts(folder, plan, train_here, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "wandb").is_dir()])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    if folder:
        (tmp_path / "wandb" / "run-1").mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path)
    done = train_here(plan, tmp_path / "run", "--wandb")
    assert done.exit_code == 1
    assert done.output == "error: --wandb: the package wandb is not installed; pip install wandb, or leave --wandb out\n"
    assert not (tmp_path / "run").exists()
