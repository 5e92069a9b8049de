"""A run's folder: what may be overwritten, and by whom."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import hdet
from hdet import files as locks
from lab.runs import folder as module
from lab.runs.curve import CurveFile
from lab.runs.folder import Folder
from lab.tests.runs.small import a_plan


def test_begins_once(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "a" / "run")
    folder.begin(a_plan())
    assert folder.plan() == a_plan()
    assert folder.read()["name"] == "run"
    assert not folder.complete
    with pytest.raises(hdet.ArgumentError, match="has a run already; name another folder, go on with --resume"):
        folder.begin(a_plan())


def test_force_removes_the_run_and_nothing_else(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.begin(a_plan())
    folder.journal.write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    folder.begin(a_plan(steps=5), force=True)
    assert folder.plan().steps == 5
    assert not folder.journal.exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_force_removes_only_checkpoints_of_the_run(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.begin(a_plan())
    for number in range(3):
        hdet.save(folder.checkpoint, number=number)
    folder.checkpoint.rename(tmp_path / "checkpoint.pt.1")  # as an earlier hdet kept it
    hdet.save(folder.checkpoint, number=3)
    others = ("checkpoint.pt.best", "checkpoint.pt.2", "checkpoint.pt.bak", "checkpoint.pth")
    for name in others:
        (tmp_path / name).write_text("mine")
    hdet.save(tmp_path / "checkpoint.pt.best-of-all", number=4)
    folder.begin(a_plan(steps=5), force=True)
    left = {file.name for file in tmp_path.iterdir() if file.name.startswith("checkpoint")}
    assert left == {*others, "checkpoint.pt.best-of-all"}
    assert all((tmp_path / name).read_text() == "mine" for name in others)


def test_a_copy_of_a_checkpoint_alone_is_not_overwritten(tmp_path: Path) -> None:
    for number in range(2):
        hdet.save(Folder(tmp_path).checkpoint, number=number)
    Folder(tmp_path).checkpoint.unlink()
    with pytest.raises(hdet.ArgumentError, match="has a run already"):
        Folder(tmp_path).begin(a_plan())


def test_a_journal_alone_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text("precious")
    with pytest.raises(hdet.ArgumentError, match="has a run already"):
        Folder(tmp_path).begin(a_plan())


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(hdet.ArgumentError, match="has no run to go on with"):
        Folder(tmp_path).plan()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(hdet.ArgumentError, match="must be a folder, but is a file"):
        Folder(tmp_path / "file").begin(a_plan())


def test_damaged_summary(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(hdet.ArgumentError, match="is not JSON"):
        Folder(tmp_path).plan()


@pytest.mark.skipif(locks.fcntl is None, reason="no locks on this system")
def test_one_writer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.2)
    with Folder(tmp_path).held():
        with pytest.raises(hdet.HdetError, match="another process is writing"):
            with Folder(tmp_path).held():
                pass
    with Folder(tmp_path).held():
        pass


def test_numbers_that_json_does_not_know(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write({"final": {"loss": math.nan}})
    assert folder.read() == {"final": {"loss": None}}


def test_curve_goes_on_from_a_step(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    curve = CurveFile(path, after=0)
    curve.add(0, validation=3.0)
    for step in range(1, 6):
        curve.add(step, train=float(step), rate=0.1)
    curve.close()
    with path.open("a") as file:
        file.write("6,1.2")  # cut off by a kill
    again = CurveFile(path, after=3)
    again.close()
    assert again.train == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert again.validation == [(0, 3.0)]
    assert path.read_text() == "step,train_loss,validation_loss,rate\n0,,3.0,\n1,1.0,,0.1\n2,2.0,,0.1\n3,3.0,,0.1\n"
    assert again.last_tenth(steps=3) == 3.0
    assert math.isnan(again.last_tenth(steps=20))  # the run has not come so far
