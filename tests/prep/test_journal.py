"""The journal: what it holds after a kill at any byte, who may open it, and that it refuses another run's."""

from collections import Counter

import pytest

from dflash_prep.errors import UserError
from dflash_prep.journal import Entry, Journal

ORIGIN = {"model": "m", "options": {"seed": 0}, "inputs": [["a", "b"]]}
ENTRIES = [(4, True), (0, False), (2, True), (0, True), (1, True), (3, False)]


def entry(number: int, kept: bool) -> Entry:
    """An entry of some bytes."""
    return Entry(kept, Counter(answers=number), f'{{"row\\t": "é {number} {kept}"}}'.encode())


def fill(path) -> bytes:
    """Write all entries; returns the journal's bytes."""
    with Journal(path, ORIGIN) as journal:
        for number, kept in ENTRIES:
            journal.add(number, entry(number, kept))
    return (path / "journal").read_bytes()


def test_entries_come_in_order_and_the_last_of_a_record_counts(tmp_path):
    fill(tmp_path / "j")
    expected = [entry(0, True), entry(1, True), entry(2, True), entry(3, False), entry(4, True)]
    with Journal(tmp_path / "j", ORIGIN) as journal:
        assert list(journal.entries(5)) == expected
        assert [journal.kept(number) for number in range(7)] == [True, True, True, False, True, False, False]
        assert journal.failures() == 1


def test_cut_at_any_byte_it_holds_the_whole_lines_and_goes_on(tmp_path):
    whole = fill(tmp_path / "j")
    for size in range(len(whole)):
        (tmp_path / "j" / "journal").write_bytes(whole[:size])
        with Journal(tmp_path / "j", ORIGIN) as journal:
            known = dict(ENTRIES[: whole[:size].count(b"\n")])
            assert [journal.kept(number) for number in range(5)] == [known.get(number, False) for number in range(5)]
            journal.add(7, entry(7, True))
            assert journal.kept(7)
        with Journal(tmp_path / "j", ORIGIN) as journal:
            assert journal.kept(7)
            assert [journal.kept(number) for number in range(5)] == [known.get(number, False) for number in range(5)]


def test_a_flipped_byte_costs_its_line_at_most(tmp_path):
    whole = fill(tmp_path / "j")
    for place in range(0, len(whole), 3):
        (tmp_path / "j" / "journal").write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        with Journal(tmp_path / "j", ORIGIN) as journal:
            held = [number for number in range(5) if journal.kept(number)]
            assert set(held) <= {0, 1, 2, 4} and len(held) >= 2
            for number in held:
                assert journal._place(number) >= 0


def test_a_missing_record_is_an_error_and_not_left_out(tmp_path):
    fill(tmp_path / "j")
    with Journal(tmp_path / "j", ORIGIN) as journal, pytest.raises(UserError, match="record 6 is damaged"):
        list(journal.entries(6))


def test_one_process_at_a_time(tmp_path):
    with Journal(tmp_path / "j", ORIGIN), pytest.raises(UserError, match="another process is writing here"):
        Journal(tmp_path / "j", ORIGIN)
    Journal(tmp_path / "j", ORIGIN).__exit__()


def test_another_runs_journal_is_refused_and_stays(tmp_path):
    whole = fill(tmp_path / "j")
    with pytest.raises(UserError, match="finished with other model, options; run with those again"):
        Journal(tmp_path / "j", ORIGIN | {"model": "n", "options": {"seed": 1}})
    assert (tmp_path / "j" / "journal").read_bytes() == whole
    Journal(tmp_path / "j", ORIGIN).__exit__()


def test_a_directory_of_other_things_is_refused(tmp_path):
    (tmp_path / "j").mkdir()
    (tmp_path / "j" / "thesis").write_text("all of it")
    with pytest.raises(UserError, match="thesis"):
        Journal(tmp_path / "j", ORIGIN)
    assert (tmp_path / "j" / "thesis").read_text() == "all of it"


def test_a_file_in_its_place(tmp_path):
    (tmp_path / "j").write_text("")
    with pytest.raises(UserError, match="cannot create this directory"):
        Journal(tmp_path / "j", ORIGIN)
