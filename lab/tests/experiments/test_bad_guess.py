"""lab/experiments/bad_guess.py, tiny: three ways, a file that the picture can be drawn from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

import bad_guess
from tests.examples.launch import ROOT


def test_three_ways_from_one_guess(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bad_guess, "RATES", (1e-2,))
    monkeypatch.setattr(bad_guess, "CHOOSING", (1000,))
    result = bad_guess.measure([0], steps=44, every=22, all_of=map)
    assert result["best"] == 1e-2
    low, tuned, auto = result["lines"]
    assert low["given"] == auto["given"] == tuned["given"] / bad_guess.FAR
    assert low["steps"] == [0, 22, 44]
    assert auto["losses"][0][-1] < low["losses"][0][-1]
    assert max(auto["rates"][0]) > 2 * auto["given"]
    assert "validation loss" in bad_guess.table(result)

    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from make_front_picture import draw
    finally:
        sys.path.remove(str(ROOT / "docs"))
    draw(json.loads(json.dumps(result))).write(tmp_path / "front.svg")
    assert "final loss" in (tmp_path / "front.svg").read_text(encoding="utf-8")
