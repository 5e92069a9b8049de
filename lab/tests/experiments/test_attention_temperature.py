"""lab/experiments/attention_temperature.py: its runs are those of hdet.Ensemble on four ranks; its table by hand."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import attention_problems
import pytest
import torch
from attention_problems import GROUP, Known, attentions
from attention_temperature import ARMS, ROWS, Cell, main, table, trained
from tests.processes import run_ranks
from torch.nn.parallel import DistributedDataParallel

import hdet
from lab.tasks.task import Batch
from lab.tasks.transformer import Attention

STEPS, SEED = 100, 2  # rounds of two steps
SIZE = 2
"""Samples per arm and step."""


class Doubled(Known):
    """In double precision: then a controller's threshold cannot be passed by rounding."""

    def plain_model(self, seed: int) -> torch.nn.Module:
        return super().plain_model(seed).double()

    def _samples(self, count: int, noise: float, *words: str | int) -> Batch:
        x, y = super()._samples(count, noise, *words)
        return x.double(), y.double()


def small() -> Known:
    return Doubled(STEPS, 1e-2, SIZE * ARMS)


def by_ranks(rank: int, spread: float, probes: bool) -> tuple[float, list[float]]:
    """What a user writes, on one of four ranks: the base temperature and the weights at the end."""
    torch.set_num_threads(1)
    problem, arms = small(), hdet.arms(ARMS)
    model = problem.plain_model(SEED)
    for layer in attentions(model):
        layer.temperature = 4.0
    ddp = DistributedDataParallel(model, process_group=arms.gradients)
    optimizer = torch.optim.Adam(model.parameters(), lr=problem.rate)
    ensemble = hdet.Ensemble(
        optimizer,
        torch.optim.lr_scheduler.OneCycleLR(optimizer, problem.rate, STEPS, cycle_momentum=False),
        [hdet.knobs.module(model, Attention, "temperature", spread=spread, scale="log", bounds=(1 / 64, 64.0))],
        sync_every=STEPS // 50,
        total_steps=STEPS,
        signal=hdet.ProbeLoss(hdet.ProbeBatch(model, problem.loss, problem.probe), at="round_mean")
        if probes
        else hdet.TrainLoss(),
        group=arms,
        model=model,
        seed=SEED,
    )
    for step in range(STEPS):
        whole = problem.batch(SEED, step)
        batch = tuple(part[rank * SIZE : (rank + 1) * SIZE] for part in whole)
        loss = problem.loss(ddp, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ensemble.step(loss)
    return ensemble.base_values["Attention.temperature"], [
        value for p in model.parameters() for value in p.detach().flatten().tolist()
    ]


@pytest.mark.parametrize("row", ["normalised", "corrected"])
def test_a_run_is_that_of_an_ensemble(row: str) -> None:
    """Between other runs, which must not touch it. Normalised() is the default with a probe, Published() without."""
    method = ROWS[row]
    columns = [Cell("spread", 1.0), Cell(row, 4.0), Cell("stays", 2.0)]
    answers = run_ranks(by_ranks, ARMS, method.spread, method.signal == "mean")
    runs = trained(small(), columns, [SEED], torch.device("cpu"))
    assert answers[0][0] == pytest.approx(runs.arms[0][1].value, rel=1e-5)
    assert abs(math.log(answers[0][0] / 4)) > 1e-3  # it has moved
    mean = runs.weights()[0, 1]
    pieces = {piece.name: piece for piece in runs.stack.layout}
    ours = [
        value for name, piece in pieces.items() if piece.group != GROUP for value in piece.of(mean).flatten().tolist()
    ]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(answers[0][1]), rtol=1e-5, atol=1e-6)


def test_only_the_temperature_of_the_teacher_can_imitate_it() -> None:
    problem = Known()
    model = problem.plain_model(0)
    (layer,) = attentions(model)
    layer.load_state_dict(problem.teacher.state_dict())
    losses = {}
    for temperature in (0.5, 1.0, 2.0):
        layer.temperature = temperature
        losses[temperature] = problem.evaluate(model)["loss"]
    assert losses[1.0] < 1e-12
    assert min(losses[0.5], losses[2.0]) > 0.01


def test_in_miniature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(attention_problems.PROBLEMS, "known", partial(Known, 12, 1e-2, 8))
    main(["--problems", "known", "--grid", "1,4", "--seeds", "2", "--results", str(tmp_path), "--device", "cpu"])
    content = json.loads((tmp_path / "known.json").read_text())
    assert len(content["rows"]) == 2 + 3 * (len(ROWS) - 1)
    for row in content["rows"]:
        assert len(row["losses"]) == len(row["found"]) == 2
        assert all(path[0] == row["start"] for path in row["paths"])
        if row["row"] in ("stays", "spread"):
            assert row["found"] == [row["start"]] * 2
    capsys.readouterr()
    main(["--table", "--results", str(tmp_path)])
    assert capsys.readouterr().out.strip() == table(content).strip()
    for bad in (["--problems", "unknown"], ["--rows", "placebo,other"]):
        with pytest.raises(SystemExit):
            main(bad)
        assert bad[0] in capsys.readouterr().err


def test_the_table_by_hand() -> None:
    rows: list[dict[str, Any]] = [
        {"row": "stays", "start": 1.0, "losses": [1.0, 2.0], "found": [1.0, 1.0]},
        {"row": "stays", "start": 4.0, "losses": [2.0, 3.0], "found": [4.0, 4.0]},
        {"row": "normalised", "start": 4.0, "losses": [1.1, 2.6], "found": [1.234, 2.0]},
    ]
    content = {"problem": "known", "parameters": 5, "arms": 4, "steps": 9, "rounds": 3, "seeds": [0, 1]}
    lines = table({**content, "versions": {"device": "a machine"}, "rows": rows}).splitlines()
    assert lines[1].startswith("**known**: best fixed temperature 1, loss 1.5; 5 parameters, 4 arms")
    assert lines[-1] == "| `Normalised()`, probe at mean weights | 4 | 1.2, 2 | 1.200 ± 0.100 |"
