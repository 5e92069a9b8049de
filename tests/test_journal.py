from __future__ import annotations

import json
import math
import pickle
from pathlib import Path

import pytest

from hdet import ArgumentError, Journal, JournalError, read_journal
from hdet.journal import SCHEMA, open_journal

HEADER = {"kind": "header", "schema": SCHEMA}


def a_round(k: int, **more: object) -> dict[str, object]:
    return {"kind": "round", "round": k, **more}


def test_round_trip_of_numbers_that_json_does_not_know(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "deep" / "run.jsonl")
    journal.write(HEADER)
    journal.write(a_round(0, loss=[math.nan, math.inf, -math.inf, 0.5, None]))
    for line in journal.path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict JSON
    (row,) = read_journal(journal.path).rounds
    assert math.isnan(row["loss"][0])
    assert row["loss"][1:] == [math.inf, -math.inf, 0.5, None]
    journal.close()


def test_last_line_of_a_round_wins_and_a_resume_is_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run.jsonl")
    for record in (HEADER, a_round(0, x=1), a_round(1, x=1), {"kind": "resume", "step": 7}, a_round(1, x=2)):
        journal.write(record)
    data = read_journal(journal.path)
    assert [(r["round"], r["x"]) for r in data.rounds] == [(0, 1), (1, 2)]
    assert [r["step"] for r in data.resumes] == [7]
    journal.close()


def test_readable_when_the_last_line_is_cut_off_and_when_the_run_goes_on_after_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(HEADER) + "\n" + json.dumps(a_round(0)) + "\n" + '{"kind":"round","rou')
    assert [r["round"] for r in read_journal(path).rounds] == [0]
    journal = Journal(path)
    journal.write({"kind": "resume", "step": 3})
    journal.write(a_round(1))
    assert [r["round"] for r in read_journal(path).rounds] == [0, 1]
    journal.close()


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(HEADER) + "\nnonsense\n" + json.dumps(a_round(0)) + "\n")
    with pytest.raises(JournalError, match="line 2 is not JSON"):
        read_journal(path)


def test_a_second_run_in_the_same_file_is_read_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run.jsonl")
    for record in (HEADER, a_round(0, x=1), a_round(1, x=1), HEADER, a_round(0, x=2)):
        journal.write(record)
    assert [r["x"] for r in read_journal(journal.path).rounds] == [2]
    journal.close()


@pytest.mark.parametrize(("text", "words"), [("", "no header"), ('{"kind":"header","schema":99}\n', "schema 99")])
def test_what_is_no_journal_says_so(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(JournalError, match=words):
        read_journal(path)


def test_an_open_journal_is_pickled_as_its_path(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run.jsonl")
    journal.write(HEADER)
    twin = pickle.loads(pickle.dumps(journal))
    assert twin == journal
    twin.write(a_round(0))
    assert len(read_journal(journal.path).rounds) == 1
    journal.close()
    twin.close()


def test_what_journal_may_be(tmp_path: Path) -> None:
    assert open_journal(None) is None
    assert open_journal(str(tmp_path / "a")) == Journal(tmp_path / "a")
    sink = Journal(tmp_path / "b")
    assert open_journal(sink) is sink
    with pytest.raises(ArgumentError, match="path"):
        open_journal(7)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="folder"):
        open_journal(tmp_path)
