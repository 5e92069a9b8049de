"""lab/experiments/last_rates.py: the figures on the page of the paper are what its controllers do."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from tests.processes import run_ranks

from hdet.ensemble.controller import AsPrinted

ROOT = Path(__file__).parents[3]
ROWS = json.loads((ROOT / "lab" / "experiments" / "results" / "last_rates.json").read_text())["rows"]


def row_of(name: str, rounds: int, slope: float) -> dict[str, float]:
    (found,) = (r for r in ROWS if (r["controller"], r["rounds"], r["slope"]) == (name, rounds, slope))
    return found  # type: ignore[no-any-return]


def test_without_a_signal_gamma_alone_decides() -> None:
    for rounds in (10, 50):
        for name, mended in (("printed, gamma mended", True), ("printed", False)):
            expected = (1 - AsPrinted(mend_gamma=mended).gamma(25 / 1e4, rounds)) ** rounds
            assert row_of(name, rounds, 0.0)["last_over_first"] == pytest.approx(expected, rel=1e-3)
        assert row_of("released", rounds, 0.0)["last_over_first"] == pytest.approx(400, rel=1e-3)
        for name in ("corrected", "normalised", "corrected, exponential"):
            assert row_of(name, rounds, 0.0)["last_over_onecycle"] == pytest.approx(1, rel=1e-3)


def test_the_page_has_these_figures() -> None:
    page = (ROOT / "docs" / "the-paper.md").read_text(encoding="utf-8")
    labels = {
        "printed": "as printed",
        "printed, gamma mended": "as printed, the sign of γ mended",
        "released, sigma as printed": "as released, σ = 0.1",
        "released": "as released, σ = 0.002",
        "corrected": "corrected",
        "corrected, exponential": "corrected, own decay",
        "normalised": "normalised",
    }
    for name, label in labels.items():
        (line,) = re.findall(rf"^\| {re.escape(label)} \|.*$", page, re.MULTILINE)
        numbers = "/".join(line.strip(" |").split(" | ")[2:]).split("/")
        asked = [(rounds, slope) for rounds in (10, 50) for slope in (0.0, 1.0, -1.0)]
        cells = [float(number.replace("−", "-")) for number in numbers]
        expected = [row_of(name, *one)["last_over_onecycle"] for one in asked]
        assert cells == pytest.approx(expected, rel=0.06), label


def test_one_controller_measured_again() -> None:
    for row in run_ranks(_measured, 4):
        for found in row:
            stored = row_of("printed, gamma mended", 10, found["slope"])["last_over_first"]
            assert found["last"] == pytest.approx(stored, rel=1e-3)


def _measured(rank: int) -> list[dict[str, float]]:
    sys.path.append(str(ROOT / "lab" / "experiments"))  # a process of its own, which has seen no conftest
    from last_rates import OURS, WARM, T, ended

    found = []
    for slope in (0.0, 1.0):
        warm, last = ended(OURS["printed, gamma mended"](WARM + 10 * T), WARM + 10 * T, slope)
        found.append({"slope": slope, "last": last / warm})
    return found
