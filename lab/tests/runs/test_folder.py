"""A run's folder: what counts as a run, and what a new one removes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import hdet
from lab.runs.folder import Folder
from lab.tests.runs.small import a_plan


def test_begins_and_removes_the_run_that_was_there_and_nothing_else(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "a" / "run")
    assert not folder.taken
    folder.begin(a_plan())
    assert folder.taken
    assert folder.read()["name"] == "run"
    assert not folder.complete
    folder.journal.write_text("old")
    (folder.path / "notes.txt").write_text("mine")
    folder.begin(a_plan(steps=5))
    assert folder.read()["steps"] == 5
    assert not folder.journal.exists()
    assert (folder.path / "notes.txt").read_text() == "mine"


def test_a_journal_alone_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text("precious")
    assert Folder(tmp_path).taken


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(hdet.ArgumentError, match="must be a folder, but is a file"):
        Folder(tmp_path / "file").begin(a_plan())


def test_damaged_summary(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(hdet.ArgumentError, match="is not JSON"):
        Folder(tmp_path).read()


def test_numbers_that_json_does_not_know(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write({"final": {"loss": math.nan}})
    assert folder.read() == {"final": {"loss": None}}
