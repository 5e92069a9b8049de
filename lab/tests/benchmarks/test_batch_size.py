"""lab/benchmarks/batch_size.py, in a few steps."""

from __future__ import annotations

import batch_size
import pytest

pytest.importorskip("sklearn.datasets")


def test_a_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size, "STEPS", 60)
    monkeypatch.setattr(batch_size, "CHANGE", 30)
    batch_size.stream.cache_clear()
    row = batch_size.row_of("two layers, Adam", "1/4", (0.01, 0.03), range(1))
    assert row["best_rate"] in (0.01, 0.03)
    assert row["best_factor"] in (0.25, 0.5, 1.0)
    assert row["root"]["factor"] == pytest.approx(0.5)
    assert row["linear"]["factor"] == pytest.approx(0.25)
    assert all(row[way]["ratios"][0] > 0 for way in batch_size.WAYS)
    batch_size.stream.cache_clear()


def test_the_schedule_is_that_of_the_search() -> None:
    assert batch_size.shape(0) < 0.01
    assert batch_size.shape(119) == batch_size.shape(239) == 1
    assert batch_size.shape(300) == pytest.approx(1 - (61 / 160) ** 0.5)
