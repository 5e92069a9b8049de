"""lab/experiments/endless.py in miniature: a held run knows nothing of its end before it is finished."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import endless
import numpy as np
import pytest
import torch
from auto_runs import AutoRuns, Run
from endless import RISES, Fixed, Held, Rise
from shapes import trapezoid
from stacked import Adam, Stack, Supply

from lab.tests.experiments.small_tasks import CPU, small


def trained(*runs: Run) -> list[list[float]]:
    """Their rates, [run][step]."""
    task, steps = small("feed"), runs[0].steps
    stack = Stack(task, [0], len(runs), CPU)
    auto_runs = AutoRuns(stack, Adam(stack.theta), [list(runs)])
    step = auto_runs.train_step(Supply(task, [0], steps, CPU).batches)
    for t in range(1, steps + 1):
        step()
        auto_runs.end_rounds(t)
    return auto_runs.rates[:, 0, :, 0].T.tolist()


def test_the_end_is_known_when_a_run_is_finished_and_not_before() -> None:
    rises = [Rise(30), Rise(300), Rise(30, ahead=10)]
    longer = trained(Run(120, 1e-3), *[Held(120, 1e-3, rise, 0.5) for rise in rises])
    shorter = trained(Run(80, 1e-3), *[Held(80, 1e-3, rise, 0.25) for rise in rises])
    assert longer[0][:60] != pytest.approx(shorter[0][:60])
    for one, other in zip(longer[1:], shorter[1:], strict=True):
        assert one[:60] == pytest.approx(other[:60], rel=1e-9)
        assert one[60:80] != pytest.approx(other[60:], rel=0.01)
        assert other[-1] < 1e-4 * max(other)
    assert len({rates[50] for rates in longer}) == 4  # each rise has done something


def test_a_rate_is_held_and_falls_as_a_trapezoid_does() -> None:
    np.testing.assert_allclose(Held(100, 1.0, RISES["50, 30 t"], 0.4).shape[30:], trapezoid(100)[30:], rtol=1e-12)
    shape = Held(100, 1.0, RISES["50, 30 t"], 0.2).shape
    assert (shape[:80] == 1).all()
    assert (np.diff(shape[79:100]) < 0).all()
    fixed = Fixed(100, 0.5, 0.2).rates(0, 100)
    assert fixed[[0, 4, 9, 79]].tolist() == pytest.approx([0.05, 0.25, 0.5, 0.5])
    np.testing.assert_allclose(fixed[10:], 0.5 * shape[10:100])


def test_a_small_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    path = tmp_path / "endless.json"
    smoke = partial(endless.main, ["--smoke", "--results", str(path), "--device", "cpu"])
    smoke()
    content = json.loads(path.read_text())
    lengths = content["workloads"][endless.SMOKE]["lengths"]
    assert {name: length["steps"] for name, length in lengths.items()} == {"0.5": 50, "1": 100}
    for length in lengths.values():
        ratios: dict[str, list[float]] = {}
        for row in length["rows"]:
            ratios.setdefault(row["way"], []).append(row["ratio"])
        assert {way: len(own) for way, own in ratios.items()} == {
            "onecycle": 7,
            "known": 2,
            "fixed": 3,
            "held": 4,
            "placebo": 1,
        }
        assert min(ratios["onecycle"]) == 1.0
    assert min(ratios["held"]) < ratios["placebo"][0]  # of 100 steps; in 50 coins do as well
    monkeypatch.setattr(endless, "losses_of", lambda *words, **options: pytest.fail("runs again"))
    smoke()
    assert json.loads(path.read_text()) == content
    endless.main(["--table", "--results", str(path)])
    shown = capsys.readouterr().out
    assert shown.count("| held | 50, 30 t | 0.4 |") == shown.count("at most 1.03 everywhere: MISS") == 3
    with pytest.raises(SystemExit):
        endless.main(["--smoke"])
