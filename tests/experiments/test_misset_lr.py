"""experiments/misset_lr.py as it is called, tiny: its file, and that it goes on where it stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from misset_lr import parsed

from tests.examples.launch import ROOT, output_of

SIZES = ("users=64", "items=64", "batch_size=64")
pytestmark = pytest.mark.timeout(300)
ROWS = "auto,placebo,trained,population,prodigy"
CALL = ("--task", "feed", "--quick", "--steps", 24, "--points", 3, "--starts", "0.01,1", "--options", *SIZES)


def call(path: Path, *more: object) -> str:
    script = ROOT / "experiments" / "misset_lr.py"
    return output_of(sys.executable, script, *CALL, "--device", "cpu", "--json", path, *more, timeout=250)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp("misset") / "feed.json"
    return path, call(path, "--rows", ROWS)


def table_of(path: Path) -> dict[str, Any]:
    (table,) = json.loads(path.read_text())["tables"]
    return table


def test_file(made: tuple[Path, str]) -> None:
    table = table_of(made[0])
    assert {"versions", "arguments", "grid", "best", "reference", "rows", "skipped"} <= set(table)
    assert len(table["grid"]["rates"]) == len(table["grid"]["cosine"]) == 3
    assert {"onecycle", "cosine", "auto", "placebo", "trained", "population"} <= set(table["rows"])
    assert ("prodigy" in table["rows"]) != ("prodigy" in table["skipped"])
    auto = table["rows"]["auto"]
    assert [cell["start"] for cell in auto["starts"]] == [0.01, 1.0]
    assert {"rate", "losses", "found", "mean", "se", "ratio", "ratio_se"} <= set(auto["starts"][0])
    assert {"worst", "time_ratio", "seconds", "run_steps"} <= set(auto)
    assert [cell["start"] for cell in table["rows"]["population"]["starts"]] == [None]


def test_best_is_scored_on_other_seeds(made: tuple[Path, str]) -> None:
    table = table_of(made[0])
    assert not {*table["arguments"]["choosing"]} & {*table["seeds"]}
    cells = table["rows"][table["best"]["schedule"]]["starts"]
    assert next(cell["ratio"] for cell in cells if cell["start"] == 1) == 1.0


def test_last_line_is_the_file(made: tuple[Path, str]) -> None:
    path, printed = made
    assert printed.splitlines()[-1] == str(path)
    assert "fixed rate, OneCycle" in printed


def test_goes_on_where_it_stopped(made: tuple[Path, str]) -> None:
    path, _ = made
    before = table_of(path)["rows"]
    printed = call(path, "--rows", "auto,held")
    after = table_of(path)["rows"]
    assert "full held:" in printed
    assert "full auto:" not in printed
    assert after["auto"] == before["auto"]
    assert set(after) == {*before, "held"}


def test_arguments() -> None:
    digits = parsed(["--task", "digits"])
    assert (digits.optimizers, digits.lengths, len(digits.seeds)) == (["adam", "sgd"], ["short", "full"], 16)
    assert digits.steps == (600, 60)
    text = parsed(["--task", "text", "--seeds", "3", "--starts", "0.001"])
    assert (text.starts, len(text.seeds), text.points) == ((0.001, 1.0), 3, 9)
    assert parsed(["--task", "feed"]).options == {"batch_size": 1024}
    with pytest.raises(SystemExit):
        parsed(["--task", "text", "--rows", "auto,nothing"])
