"""experiments/train_probe.py, tiny: leans and losses for every probe."""

from __future__ import annotations

import pytest

pytest.importorskip("sklearn")

import train_probe

from tests.experiments.small_tasks import SMALL


def test_leans_and_losses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(train_probe, "TASKS", SMALL)
    monkeypatch.setattr(train_probe, "RATES", (1e-2,))
    monkeypatch.setattr(train_probe, "STARTS", (0.01,))
    result = train_probe.measure(["digits"], [0], steps=106)
    (row,) = result["rows"]
    assert row["best"] == 1e-2
    assert {age: len(values) for age, values in row["lean"].items()} == dict.fromkeys(("0", "1", "3", "7"), 1)
    assert set(row["loss"]) == {"held-out", "train", "noise"}
    untrained = 2.3  # log of ten classes
    assert row["loss"]["train"]["0.01"][0] < 0.9 * untrained
    assert "train     0.01x" in capsys.readouterr().out
