"""lab/experiments/group_order.py: rank correlations by hand, and the script in miniature."""

from __future__ import annotations

import json
from pathlib import Path

import group_order
import pytest
from group_order import agreement, correlation, described, main, of_the_ablation


def test_correlations_by_hand() -> None:
    assert correlation([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert agreement([[1, 2, 3], [2, 4, 6], [3, 2, 1]]) == pytest.approx((1 - 1 - 1) / 3)


def test_a_row() -> None:
    row = described("a", [[0.9, 1.0], [0.8, 1.1], [1.2, 1.0]], ["x", "y"])
    assert row["orders"] == ["x < y", "x < y", "y < x"]
    assert (row["different_orders"], row["agreement"]) == (2, pytest.approx(-1 / 3))


def test_in_miniature(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = tmp_path / "order.json", tmp_path / "ablation"
    main(["--steps", "60", "--seeds", "2", "--results", str(path), "--device", "cpu"])
    content = json.loads(path.read_text())
    assert [len(row["learned"]) for row in content["rows"]] == [2] * 4
    assert all(row["groups"] == ["embedding", "no_decay", "non_embedding", "transformer"] for row in content["rows"])
    assert any(value != 1 for row in content["rows"] for run in row["learned"] for value in run)
    folder.mkdir()
    learned = [[0.9, 1.0, 1.1, 1.2], [0.8, 0.9, 1.0, 1.1]]
    rows = [{"row": "hdet", "label": "HDET", "rate": 0.1, "T": 20, "learned": learned}, {"row": "arms"}]
    (folder / "feed.json").write_text(json.dumps({"task": "feed", "rows": rows}))
    assert [row["agreement"] for row in of_the_ablation(folder)] == [1.0]
    monkeypatch.setattr(group_order, "ABLATION", folder)
    main(["--ablation", "--results", str(path)])
    capsys.readouterr()
    main(["--table", "--results", str(path)])
    assert "| feed, rate 0.1, T = 20: HDET | 0.800 to 1.200 | 1 of 2 | +1.00 |" in capsys.readouterr().out
    for bad in (["--seeds", "1"], ["--ablation", "--results", str(tmp_path / "none.json")]):
        with pytest.raises(SystemExit):
            main(bad)


def test_what_is_added_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "order.json"
    rows = [described("a", [[0.9, 1.0], [0.8, 1.1]], ["x", "y"])]
    about = {"replicas": 8, "steps": 40, "every": 20, "seeds": 2, "versions": {"device": "a machine"}, "rows": rows}
    path.write_text(json.dumps(about))
    monkeypatch.setattr(group_order, "AGAIN", (("placebo",), (7, 8)))
    main(["--again", "--steps", "40", "--results", str(path), "--device", "cpu"])
    content = json.loads(path.read_text())
    assert content["rows"] == rows
    assert [len(row["learned"]) for row in content["again"]] == [2]
    assert "losses shuffled, other seeds |" in capsys.readouterr().out
