"""lab/experiments/apart.py in miniature: its outer step is the library's, and the table says what it says."""

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
from torch import Tensor

import hdet
from lab.tests.experiments.small_tasks import bench

WORD = "4x5"


class Rows:
    """A stack that nobody trains."""

    def __init__(self, arms: int, columns: int) -> None:
        self.theta = torch.randn(arms, columns, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("name", ["local", "diloco", "found", "grid0.35"])
def test_the_outer_step_is_the_librarys(name: str) -> None:
    """Five meetings of three arms with made-up weights, against hdet's Outer with a mean by hand."""
    method, rows = METHODS[name], Rows(3, 1)
    rows.theta[:] = rows.theta[:1]
    runs = Apart(rows, [method], Setting(3, 1), 5)  # type: ignore[arg-type]  # its weights are all that is needed
    outer: Any = hdet.experimental.Outer("auto" if method.rate is None else method.rate, momentum=method.momentum)
    weight = torch.nn.Parameter(rows.theta[0, 0].clone())
    outer.begin([weight])
    generator = torch.Generator().manual_seed(1)
    pull = torch.randn(7, generator=generator, dtype=torch.float64)
    for t in range(5):
        moves = pull + torch.randn(3, 7, generator=generator, dtype=torch.float64)
        own = weight.detach() + moves
        rows.theta.add_(moves[:, None])

        def average(parameters: list[Tensor], numbers: list[Tensor], own: Tensor = own) -> None:
            parameters[0].data.copy_(own.mean(0))
            if numbers:
                last, v = outer._last[weight], outer._velocity[weight]
                d = last - own
                mean = [(d * v).sum(-1).mean(), d.square().sum(-1).mean(), v.square().sum()]
                numbers[0].copy_(torch.stack(mean))

        losses = torch.tensor([1.0, 1.1, 1.2]) * (5 if t == 3 else 1)
        outer.merge([weight], average, losses.tolist())
        runs.observe(losses[:, None])
        runs.after_step(t + 1)
        torch.testing.assert_close(runs.last[0, 0], weight.detach(), rtol=1e-6, atol=1e-6)
        assert runs.history[-1][0][0] == pytest.approx(outer.rate, rel=1e-6)
    assert (len({row[0][0] for row in runs.history}) > 1) == (name == "found")


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
    found = {word: sent(METHODS["found"], Setting.named(word), 1000, 10) for word in SETTINGS}
    assert found == {"4x20": 3000.0, "1x20": 0.0, "8x20": 3500.0, "4x100": 600.0}
    assert sent(METHODS["ddp"], Setting(4, 20), 1000, 10) == 60000.0
    assert sent(METHODS["found"], Setting(4, 300), 1000, 10) == 4 * 60.0  # at 300, 600, 900 and at the end


def test_in_miniature(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--workloads", "adult-mlp", "--settings", WORD, "--results", str(tmp_path), "--synthetic", "--seeds", "2"]
    words += ["--steps", "20", "--samples", "16", "--device", "cpu"]
    main([*words, "--rows", "ddp,found"])
    content = json.loads((tmp_path / "adult-mlp.json").read_text())
    assert set(content["settings"][WORD]) == {"ddp", "found"}
    assert len(content["settings"][WORD]["found"]["1"]["outer"]) == 4
    main([*words, "--inner", "1,3"])  # what is there is not run again
    capsys.readouterr()
    monkeypatch.setattr(apart, "run_setting", None)
    main(words)
    full = json.loads((tmp_path / "adult-mlp.json").read_text())
    assert full["settings"][WORD]["found"]["1"] == content["settings"][WORD]["found"]["1"]
    assert {name for name, rows in full["settings"][WORD].items() if set(rows) == {"1", "3"}} == set(METHODS)
    main(["--table", "--results", str(tmp_path)])
    table = capsys.readouterr().out
    assert "adult-mlp, K x H = 4x5, inner rate 3 of the best" in table
    assert table.count("| found outer rate |") == 2
    assert table.strip() == show(tmp_path).strip()


def test_the_table_by_hand() -> None:
    losses = {"ddp": [1.0, 2.0], "found": [1.1, 2.2], "grid0.5": [1.0, 2.0], "grid1": [2.0, None]}
    rows: dict[str, Any] = {name: {"1": {"losses": row}} for name, row in losses.items()}
    rows["found"]["1"]["outer"] = [[1.0, 1.0], [0.25, 1.0]]
    content = {"steps": 100, "parameters": 1000, "settings": {"4x20": rows}, "density": False, "initial": 4.0}
    ddp, found, *grid = lines_of(content, "4x20", "1")
    assert (ddp.loss, ddp.best, ddp.bytes) == (1.0, 1.0, 1.0)
    assert found == Line(
        "found outer rate",
        pytest.approx(1.1),
        pytest.approx(0.0, abs=1e-12),
        pytest.approx(1.1),
        pytest.approx(0.0, abs=1e-12),
        0.05,
        {"10 Gb/s": 30000 / 1.25e9, "100 Mb/s": 30000 / 1.25e7},
        "0.71 (0.25 to 1.00)",
    )
    assert [line.best for line in grid] == [1.0, 2.0]
    assert markdown([found]).splitlines()[-1].startswith("| found outer rate | 1.1000 ± 0.0000 | 1.1000")
    assert lines_of({**content, "settings": {"4x20": {}}}, "4x20", "1") == []


def test_rows_and_columns() -> None:
    assert set(ROWS) == {"grid", *(name for name in METHODS if not name.startswith("grid"))}
    assert all(isinstance(method, Method) for method in METHODS.values())
    assert math.isclose(METHODS["grid1.5"].rate or 0, 1.5)
