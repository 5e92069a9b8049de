"""lab/experiments/apart.py in miniature: its outer steps by hand, and the table says what it says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import apart
import pytest
import torch
from apart import (
    METHODS,
    ROWS,
    SETTINGS,
    Apart,
    Line,
    Method,
    Setting,
    lines_of,
    main,
    markdown,
    run_setting,
    sent,
    show,
)

from lab.tests.experiments.small_tasks import bench

WORD = "4x5"


class Rows:
    """Two arms of one weight, which nobody trains."""

    def __init__(self) -> None:
        self.theta = torch.zeros(2, 1, 1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        (METHODS["local"], [-2.0, -4.0, -2.0, 0.0]),
        (METHODS["grid0.5"], [-1.0, -2.0, -1.0, 0.0]),
        # d = 2, 2, -2, -2, so v = 2, 3, -0.5, -2.25, and a step is -0.5 (d + 0.5 v)
        (Method("Nesterov", 0.5, 0.5), [-1.5, -3.25, -2.125, -0.5625]),
    ],
)
def test_outer_steps_by_hand(method: Method, weights: list[float]) -> None:
    """The arms go by -1 and -3 in two rounds, mean -2; then by 1 and 3."""
    rows = Rows()
    runs = Apart(rows, [method], Setting(2, 1), 4)  # type: ignore[arg-type]  # its weights are all that is needed
    seen = []
    for t, way in enumerate([-1, -1, 1, 1]):
        rows.theta += way * torch.tensor([1.0, 3.0])[:, None, None]
        runs.after_step(t + 1)
        assert rows.theta.flatten().tolist() == [runs.last.item()] * 2
        seen.append(runs.last.item())
    assert seen == pytest.approx(weights)


def test_arms_that_share_gradients_train_as_one() -> None:
    """DDP over four quarters of a batch is training on the whole batch; so are arms that meet at every step of SGD."""
    small = bench("sgd", "text", steps=10)
    methods = {name: METHODS[name] for name in ("ddp", "local")}
    together = run_setting(small, Setting(4, 1), methods, 0.1, [1.0])[1]
    alone = run_setting(small, Setting(1, 10), {"ddp": METHODS["ddp"]}, 0.1, [1.0])[1]
    for name in methods:
        assert together[name]["1"]["losses"] == pytest.approx(alone["ddp"]["1"]["losses"], rel=1e-6)
    apart_for_long = run_setting(small, Setting(4, 10), methods, 0.1, [1.0])[1]
    assert apart_for_long["local"]["1"]["losses"] != pytest.approx(alone["ddp"]["1"]["losses"], rel=1e-4)


def test_what_is_sent() -> None:
    found = {word: sent(METHODS["local"], Setting.named(word), 1000, 10) for word in SETTINGS}
    assert found == {"4x20": 3000.0, "1x20": 0.0, "8x20": 3500.0, "4x100": 600.0}
    assert sent(METHODS["ddp"], Setting(4, 20), 1000, 10) == 60000.0
    assert sent(METHODS["local"], Setting(4, 300), 1000, 10) == 4 * 60.0  # at 300, 600, 900 and at the end


def test_in_miniature(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--workloads", "adult-mlp", "--settings", WORD, "--results", str(tmp_path), "--synthetic", "--seeds", "2"]
    words += ["--steps", "20", "--samples", "16", "--device", "cpu"]
    main([*words, "--rows", "ddp,local"])
    content = json.loads((tmp_path / "adult-mlp.json").read_text())
    assert set(content["settings"][WORD]) == {"ddp", "local"}
    main([*words, "--inner", "1,3"])  # what is there is not run again
    capsys.readouterr()
    monkeypatch.setattr(apart, "run_setting", None)
    main(words)
    full = json.loads((tmp_path / "adult-mlp.json").read_text())
    assert full["settings"][WORD]["local"]["1"] == content["settings"][WORD]["local"]["1"]
    assert {name for name, rows in full["settings"][WORD].items() if set(rows) == {"1", "3"}} == set(METHODS)
    main(["--table", "--results", str(tmp_path)])
    table = capsys.readouterr().out
    assert "adult-mlp, K x H = 4x5, inner rate 3 of the best" in table
    assert table.count("| local SGD (mean) |") == 2
    assert table.strip() == show(tmp_path).strip()


def test_the_table_by_hand() -> None:
    losses = {"ddp": [1.0, 2.0], "local": [1.1, 2.2], "grid0.5": [1.0, 2.0], "grid1": [2.0, None]}
    rows: dict[str, Any] = {name: {"1": {"losses": row}} for name, row in losses.items()}
    content = {"steps": 100, "parameters": 1000, "settings": {"4x20": rows}, "density": False, "initial": 4.0}
    ddp, local, *grid = lines_of(content, "4x20", "1")
    assert (ddp.loss, ddp.best, ddp.bytes) == (1.0, 1.0, 1.0)
    assert local == Line(
        "local SGD (mean)",
        pytest.approx(1.1),
        pytest.approx(0.0, abs=1e-12),
        pytest.approx(1.1),
        pytest.approx(0.0, abs=1e-12),
        0.05,
        {"10 Gb/s": 30000 / 1.25e9, "100 Mb/s": 30000 / 1.25e7},
    )
    assert [line.best for line in grid] == [1.0, 2.0]
    assert markdown([local]).splitlines()[-1].startswith("| local SGD (mean) | 1.1000 ± 0.0000 | 1.1000")
    assert lines_of({**content, "settings": {"4x20": {}}}, "4x20", "1") == []


def test_rows_and_columns() -> None:
    assert set(ROWS) == {"grid", *(name for name in METHODS if not name.startswith("grid"))}
    assert all(isinstance(method, Method) for method in METHODS.values())
    assert math.isclose(METHODS["grid1.5"].rate or 0, 1.5)
