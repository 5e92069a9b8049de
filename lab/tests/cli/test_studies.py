"""python -m lab ablate and python -m lab demo, tiny, as processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.cli.command import run

from lab.tests.cli.command import LAB, lab_here


def test_ablate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Quick; then again without two of its runs, which come out the same to the last bit."""
    out = tmp_path / "study"
    first = run(*LAB, "ablate", "--quick", "--replicas", 1, "--out", out, "--json")
    assert first.code == 0, first.err
    outcome = json.loads((out / "ablation.json").read_text())
    assert outcome["complete"]
    assert [len(row["runs"]) for row in outcome["configurations"]] == [1] * 20
    assert first.json["configurations"] == outcome["configurations"]
    assert "HDET without auto-LR" in (out / "table.md").read_text()
    assert "Ablation on feed" in (out / "report.html").read_text()

    other = lab_here(capsys, "ablate", "--quick", "--seeds", 2, "--out", out)
    assert other.code == 2
    assert "has another study" in other.complaint

    for key in ("placebo-0.15-T4-0", "corrected-0.15-T4-0"):
        shutil.rmtree(out / key)
    again = run(*LAB, "ablate", "--like", out / "ablation.json", "--out", out, "--json")  # its own process, as above
    assert again.code == 0, again.err
    assert (
        "[2/2] control: HDET with losses shuffled, 0.15, T = 4, seed 0: complete" in again.err
    )  # the other runs were kept
    for row, same in zip(outcome["configurations"], again.json["configurations"], strict=True):
        assert (row["loss"], row["train_loss"]) == (same["loss"], same["train_loss"])


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    sizes = ("--steps", 8, "--ensemble-steps", 4, "--replicas", 2)
    done = run(*LAB, "demo", *sizes, "--out", out, "--json")  # six runs, on three sets of processes
    assert done.code == 0, done.err
    guesses = {f"{whose}, 100× too {far}" for whose in ("torch", "hdet") for far in ("low", "high")}
    assert set(done.json["losses"]) == {"torch, a good rate", "ensemble"} | guesses
    pages = [Path(done.json[key]).read_text() for key in ("report", "ensemble")]
    assert "Scene one: a bad guess" in pages[0]
    assert "Scene two: the ensemble" in pages[1]
    assert max(map(len, pages)) <= 2_100_000
    assert done.json["rates"]["torch, 100× too low"] == 1e-4
    assert "rate that hdet found" in done.err
    assert "Scene two" in done.err
    again = lab_here(capsys, "demo", *sizes, "--out", out)
    assert again.code == 2
    assert "exists already" in again.complaint
