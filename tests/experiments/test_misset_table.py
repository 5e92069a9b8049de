"""experiments/misset_table.py: what follows from the losses, and what survives in the file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from misset_bench import Outcome
from misset_table import Book, add_row, mean_and_error, print_table, summarise

KEY = {"task": "feed", "optimizer": "adam", "length": "full"}


def filled(table: dict[str, Any]) -> dict[str, Any]:
    table["best"] = {"schedule": "onecycle", "rate": 0.1, "on_edge": False}
    table.update(factors=[0.1, 1.0], steps=10, seeds=[0, 1])
    add_row(table, "onecycle", "fixed", [0.1, 1.0], Outcome([[4.0, 8.0], [2.0, 4.0]], [[0.01] * 2, [0.1] * 2], 2.0, 40))
    add_row(table, "auto", "auto", [0.1, 1.0], Outcome([[2.0, 5.0], [math.nan, 4.0]], [[0.2] * 2] * 2, 3.0, 40))
    add_row(table, "dog", "DoG", [None], Outcome([[3.0, 6.0]], [[math.nan] * 2], 1.0, 20))
    summarise(table)
    return table


def test_ratios_are_taken_per_seed(tmp_path: Path) -> None:
    table = filled(Book(tmp_path / "a.json").table(KEY, {}))
    low, best = table["rows"]["onecycle"]["starts"]
    assert (low["ratio"], low["ratio_se"], best["ratio"]) == (2.0, 0.0, 1.0)
    assert low["rate"] == pytest.approx(0.01)
    auto = table["rows"]["auto"]
    assert auto["starts"][0]["ratio"] == pytest.approx((1.0 + 1.25) / 2)
    assert auto["starts"][0]["ratio_se"] == pytest.approx(0.125)
    assert auto["starts"][1]["failed"] == 1
    assert math.isinf(auto["worst"])
    assert auto["time_ratio"] == pytest.approx(1.5)
    assert table["rows"]["dog"]["worst"] == pytest.approx(1.5)


def test_file_is_strict_json_and_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = Book(tmp_path / "a.json")
    filled(book.table(KEY, {"seeds": [0, 1]}))
    book.save()
    content = json.loads(book.path.read_text())["tables"][0]
    assert content["rows"]["auto"]["starts"][1]["losses"] == [None, 4.0]
    again = Book(book.path)
    table = again.table(KEY, {"seeds": [0, 1]})
    assert set(table["rows"]) == {"onecycle", "auto", "dog"}
    summarise(table)
    print_table(table)
    assert "failed" in capsys.readouterr().out


def test_other_arguments_begin_anew(tmp_path: Path) -> None:
    book = Book(tmp_path / "a.json")
    filled(book.table(KEY, {"seeds": [0, 1]}))
    other = filled(book.table({**KEY, "length": "short"}, {}))
    assert book.table(KEY, {"seeds": [0]})["rows"] == {}
    assert len(book.tables) == 2
    assert book.table({**KEY, "length": "short"}, {}) is other


def test_mean_and_error_of_few() -> None:
    assert mean_and_error([2.0])[0] == 2.0
    assert math.isnan(mean_and_error([2.0])[1])
    assert mean_and_error([1.0, None]) == (math.inf, math.inf)
