"""What a run has left in its folder, read and drawn."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tests.report.made_up import a_header, a_round, write_folder

from lab.runs.folder import Folder
from lab.runs.result import Curve, Result, figures_of, result_of

HEAD = "step,train_loss,validation_loss,rate\n"


def read(folder: Path) -> Result:
    return result_of(Folder(folder))


def test_a_run_of_torchs_scheduler_has_no_journal(tmp_path: Path) -> None:
    curve = f"{HEAD}0,,5.0,\n1,4.0,,0.1\n2,nan,,0.2\n"
    run = read(write_folder(tmp_path / "fixed", final={"loss": 3.294}, name="", curve=curve))
    assert (run.name, run.journal, run.final["loss"]) == ("fixed", None, 3.294)
    expected = Curve((0.0, 1.0, 2.0), (None, 4.0, None), (5.0, None, None), (None, 0.1, 0.2))
    assert run.curve == expected
    loss, rate = figures_of([run])
    assert (loss.traces[0].line.y, rate.traces[0].line.x) == ((5.0,), (1.0, 2.0))


def test_a_run_with_a_journal_has_the_name_of_its_plan(tmp_path: Path) -> None:
    run = read(write_folder(tmp_path / "x", a_header(), a_round(0), name="hot", final={"loss": "NaN"}))
    assert run.journal is not None
    assert (run.journal.name, run.final, run.curve) == ("hot", {"loss": None}, Curve())
    assert [figure.title for figure in figures_of([run])] == ["Learning rate"]


@pytest.mark.parametrize("curve", ["", HEAD])
def test_a_run_that_crashed_early_has_an_empty_journal_and_curve(tmp_path: Path, curve: str) -> None:
    folder = write_folder(tmp_path, crashed=True, curve=curve)
    (folder / "journal.jsonl").touch()
    assert read(folder)[2:] == ({}, Curve(), None)


def test_the_lowest_of_several_rates_is_seen_too(tmp_path: Path) -> None:
    curves = [f"{HEAD}1,1.0,,{rate / 25}\n2,1.0,,{rate}\n" for rate in (1.0, 1e-4)]
    runs = [read(write_folder(tmp_path / str(i), name=str(i), curve=one)) for i, one in enumerate(curves)]
    (rates,) = figures_of(runs)
    assert rates.y_range[0] < math.log10(4e-6)
