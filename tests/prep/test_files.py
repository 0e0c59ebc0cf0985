"""Directories that are whole or absent, whatever happens beside them meanwhile, and JSON files that are none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_prep import files
from dflash_prep.errors import UserError
from dflash_prep.files import Appeared, new_directory, read_json


def put(path: Path, text: str) -> Path:
    """A directory that holds one file."""
    path.mkdir(parents=True)
    (path / "a.txt").write_text(text)
    return path


def write(path: Path, replace: bool = True, meanwhile=lambda: None) -> None:
    """Write a new directory, something happening before it is done."""
    with new_directory(path, replace) as directory:
        (directory / "a.txt").write_text("new")
        meanwhile()


@pytest.fixture
def dead() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("swaps", [True, False])
def test_an_older_directory_gives_way(tmp_path, monkeypatch, swaps):
    if not swaps:
        monkeypatch.setattr(files, "exchange", lambda one, other: False)
    write(put(tmp_path / "out", "old"))
    assert (tmp_path / "out" / "a.txt").read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_an_exchange_leaves_no_moment_with_neither(tmp_path):
    one, other = put(tmp_path / "one", "1"), put(tmp_path / "other", "2")
    if not files.exchange(one, other):
        pytest.skip("this system cannot exchange directories")
    assert ((one / "a.txt").read_text(), (other / "a.txt").read_text()) == ("2", "1")
    assert not files.exchange(one, tmp_path / "gone")


@pytest.mark.parametrize(("kind", "replace"), [("directory", False), ("file", False), ("file", True)])
def test_what_appeared_meanwhile_and_may_not_be_replaced_stays(tmp_path, kind, replace):
    path = tmp_path / "out"
    appear = {"directory": lambda: put(path, "theirs"), "file": lambda: path.write_text("theirs")}[kind]
    with pytest.raises(Appeared, match=r"appeared meanwhile.*run again"):
        write(path, replace=replace, meanwhile=appear)
    assert (path / "a.txt" if kind == "directory" else path).read_text() == "theirs"
    assert os.listdir(tmp_path) == ["out"]


def test_an_empty_directory_is_no_hindrance(tmp_path):
    write(tmp_path / "out", replace=False, meanwhile=(tmp_path / "out").mkdir)
    assert (tmp_path / "out" / "a.txt").read_text() == "new"


def test_leftovers_of_dead_processes_are_removed_and_no_others(tmp_path, dead):
    out = tmp_path / "out"
    kept = [f".out.{os.getppid()}.partial", f".other.{dead}.partial", f".out.{dead}.partial.x", ".out.x.partial"]
    for name in [*kept, f".out.{dead}.partial", f".out.{dead}.old"]:
        put(tmp_path / name, "left")
    write(out)
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, f".out.{dead}.old", "out"])  # it might have been the only one
    write(out)
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "out"])


def test_a_link_stays_and_what_it_names_is_replaced(tmp_path):
    put(tmp_path / "there" / "real", "old")
    (tmp_path / "out").symlink_to(tmp_path / "there" / "real")
    write(tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "there" / "real" / "a.txt").read_text() == "new"
    assert os.listdir(tmp_path / "there") == ["real"]


@pytest.mark.parametrize("name", ["", ".", "../here"])
def test_the_working_directory_can_be_written(tmp_path, monkeypatch, name):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write(Path(name))
    assert (tmp_path / "here" / "a.txt").read_text() == "new"


def test_a_mount_point_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "out")
    with pytest.raises(UserError, match="is a mount point"):
        write(tmp_path / "out", meanwhile=pytest.fail)
    with pytest.raises(UserError, match="is a mount point"):
        monkeypatch.undo()
        write(Path("/"), meanwhile=pytest.fail)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "cannot read the thing: No such file"),
        (Path.mkdir, "is a directory"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.write_text("[" * 100_000), "not valid JSON"),
        (lambda path: path.write_text("1" * 10_000), "not valid JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe{"), "not valid JSON"),
        (lambda path: path.write_text("3"), "not a JSON object"),
    ],
)
def test_json_that_is_none_is_a_user_error(tmp_path, make, words):
    make(tmp_path / "a.json")
    with pytest.raises(UserError, match=words):
        read_json(tmp_path / "a.json", "thing")
