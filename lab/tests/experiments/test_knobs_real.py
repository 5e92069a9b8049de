"""lab/experiments/knobs_real.py: every row runs, sees as many samples, and does what its name says."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import knobs_real
import pytest
import torch
from knobs.arms import Arms
from knobs.groups import Explorers, Method, Population
from knobs.rows import METHODS, PLAIN, STARTS, bench_of, choose, explored, plain
from knobs.score import meets, score
from knobs.stack import KnobBench
from knobs.workloads import DROPOUT, MINI, REAL, REST, WORKLOADS, KnobWorkload
from shapes import onecycle

from hdet.ensemble.controller import Update
from lab.tests.experiments.small_tasks import CPU

STEPS = 12
HOW = {"device": CPU, "graph": False, "evaluations": 2}
DIGITS = WORKLOADS["mini-decay"]


def small_bench(workload: KnobWorkload, seeds: Sequence[int] = (0,), steps: int = STEPS) -> KnobBench:
    return bench_of(workload, seeds, steps, True, HOW)


def run(words: str, folder: Path) -> None:
    knobs_real.main([*words.split(), "--results", str(folder), "--device", "cpu", "--synthetic", "--evaluations", "2"])


def content(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


# Rows ----------------------------------------------------------------------------------------------------------------


def test_every_row_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--workloads mini-dropout --arms 4 --seeds 0,1 --steps 6 --points 3 --rows all"
    run(words, tmp_path)
    found = content(tmp_path, "mini-dropout")
    wanted = {PLAIN, *(f"{name}/4" for name in METHODS)}
    assert {*found["rows"]} == wanted
    for row in found["rows"].values():
        assert all(math.isfinite(loss) for start in row["curves"] for curve in start for loss in curve)
    assert {row["samples"] for row in found["rows"].values()} == {6 * 32}
    capsys.readouterr()
    run(words, tmp_path)  # all rows are there
    assert capsys.readouterr().out == f"{tmp_path / 'mini-dropout.json'}\n"
    assert content(tmp_path, "mini-dropout") == found
    run("--workloads mini-dropout --table", tmp_path)
    lines = capsys.readouterr().out
    assert all(f"({key})" in lines for key in wanted)
    assert "MISS" in lines


@pytest.mark.parametrize("name", [workload.name for workload in REAL])
def test_every_workload_trains(name: str, tmp_path: Path) -> None:
    run(f"--workloads {name} --rows plain,normalised --arms 2 --seeds 0 --steps 3 --points 1", tmp_path)
    found = content(tmp_path, name)["rows"]
    assert all(math.isfinite(curve[-1]) for row in found.values() for start in row["curves"] for curve in start)
    assert found[PLAIN]["samples"] == found["normalised/2"]["samples"]
    assert found[PLAIN]["curves"][0] != found[PLAIN]["curves"][2], "the knob turns nothing"


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, why in (("--rows none", "--rows must be"), ("--workloads none", "some of")):
        with pytest.raises(SystemExit):
            knobs_real.parsed(words.split())
        assert why in capsys.readouterr().err


# The same as plain loops with torch ----------------------------------------------------------------------------------


def torch_run(bench: KnobBench, value: float, seed: int, arms: int = 1, rounds: int = 1) -> float:
    """The validation loss after local SGD by torch's own optimizers: arms of their own, averaged after every round."""
    task, where = bench.task, bench.task.knob.where
    models = [task.model(seed) for _ in range(arms)]
    decay, rest = (value if where == "decay" else 0.0), (value if where == "rest" else 1e-3)
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=decay)
        if bench.optimizer == "momentum"
        else torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=decay, betas=(0.9, 1 - rest))
        for model in models
    ]
    for t, factor in enumerate(onecycle(bench.steps)[: bench.steps]):
        batch = task.batch(seed, t)
        for r, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            own = tuple(part.chunk(arms)[r] for part in batch)
            optimizer.param_groups[0]["lr"] = bench.customary * factor
            optimizer.zero_grad()
            task.trained(model, own, torch.tensor(value)).backward()
            optimizer.step()
        if (t + 1) % (bench.steps // rounds) == 0:
            with torch.no_grad():
                for same in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack(same).mean(0)
                    for parameter in same:
                        parameter.copy_(mean)
    return task.evaluate(models[0])["loss"]


@pytest.mark.parametrize(
    ("workload", "values"),
    [
        (DIGITS, [0.1, 30.0]),
        (DIGITS._replace(optimizer="momentum", rate=0.05), [1e-3, 1.0]),
        (DIGITS._replace(knob=REST), [1e-3, 0.5]),
        (WORKLOADS["mini-dropout"], [0.1, 0.7]),
        (WORKLOADS["mini-smoothing"], [0.1, 0.7]),
    ],
    ids=["adamw decay", "sgd decay", "beta2", "dropout", "smoothing"],
)
def test_fixed_values_train_as_torch_does(workload: KnobWorkload, values: list[float]) -> None:
    bench = small_bench(workload, seeds=(0, 1))
    curves = plain(bench, values).curves
    expected = [[torch_run(bench, value, seed) for seed in (0, 1)] for value in values]
    assert [[curve[-1] for curve in row] for row in curves] == [pytest.approx(row, rel=2e-4) for row in expected]
    assert expected[0] != pytest.approx(expected[1], rel=2e-3)  # or the test would not see the value


def test_arms_without_divergence_are_local_sgd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "local", METHODS["local"]._replace(rounds=3))
    bench = small_bench(DIGITS._replace(optimizer="momentum", rate=0.05), seeds=(0, 1))
    row = explored(bench, [1e-3, 1.0], ["local"], arms=4)["local"]
    expected = [[torch_run(bench, value, seed, arms=4, rounds=3) for seed in (0, 1)] for value in (1e-3, 1.0)]
    assert [[curve[-1] for curve in found] for found in row.curves] == [pytest.approx(r, rel=1e-4) for r in expected]
    assert row.paths[0][0] == [1e-3] * 4
    averaged_once = torch_run(bench, 1e-3, 0, arms=4)
    assert expected[0][0] != pytest.approx(averaged_once, rel=1e-3)


def test_the_grid_is_widened_to_where_the_best_is(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = small_bench(DIGITS._replace(knob=DIGITS.knob._replace(centre=1e4, bounds=(1e-6, 1e6))))
    found = choose(bench, points=3)
    values, losses = found["grid"]["values"], [sum(row) for row in found["grid"]["losses"]]
    assert values == sorted(values)
    assert len(values) == 5  # one more value at a time on the side of the best
    assert found["best"]["value"] == values[losses.index(min(losses))]


# Signals -------------------------------------------------------------------------------------------------------------


class Spy:
    """A controller that remembers what it is told, and goes up."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []
        self.offsets: list[list[float]] = []

    def init(self, knobs: int) -> None:
        return None

    def update(self, state: None, signals: Sequence[float], offsets: Sequence[Sequence[float]]) -> Update:
        self.seen.append(list(signals))
        self.offsets.append([row[0] for row in offsets])
        return Update(None, [0.1], [], [])


def test_the_placebo_shuffles() -> None:
    spy = Spy()
    group = Explorers(Method("", spy, spread=0.5, shuffled=True), DIGITS.knob, 1.0, arms=4, seed=0)
    for _ in range(20):
        group.end_round([1.0, 2.0, 3.0, 4.0])
    assert all(sorted(signals) == [1.0, 2.0, 3.0, 4.0] for signals in spy.seen)
    assert len({*map(tuple, spy.seen)}) > 5
    means = [sum(signals[r] for signals in spy.seen) / 20 for r in range(4)]
    assert max(means) - min(means) < 1.5


@pytest.mark.parametrize("signal", ["train", "last", "mean"])
def test_what_arms_are_compared_by(signal: str) -> None:
    """Of a round of two steps, by hand."""
    spy, workload = Spy(), WORKLOADS["mini-smoothing"]
    bench = small_bench(workload, steps=2)
    method = Method("", spy, signal, spread=0.5, rounds=1)
    METHODS["tried"] = method
    explored(bench, [0.1], ["tried"], arms=2)
    del METHODS["tried"]
    (seen,), (offsets,), task = spy.seen, spy.offsets, bench.task
    for r in range(2):
        value = workload.knob.times(0.1, math.exp(offsets[r]))
        model, losses, rows = task.model(0), [], []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
        for t, factor in enumerate(onecycle(2)[:2]):
            optimizer.param_groups[0]["lr"] = bench.customary * factor
            optimizer.zero_grad()
            loss = task.trained(model, tuple(part.chunk(2)[r] for part in task.batch(0, t)), torch.tensor(value))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            rows.append([parameter.detach().clone() for parameter in model.parameters()])
        if signal == "mean":
            with torch.no_grad():
                for parameter, first, second in zip(model.parameters(), *rows, strict=True):
                    parameter.copy_((first + second) / 2)
        probed = task.loss(model, task.probe[0]).item()
        assert seen[r] == pytest.approx(sum(losses) / 2 if signal == "train" else probed, rel=1e-4)


def test_the_worst_of_a_population_goes_on_from_the_best() -> None:
    group = Population(METHODS["population"], DROPOUT, 0.2, arms=8, seed=0)
    values = list(group.values)
    sources = group.end_round([5.0, 1.0, 4.0, math.nan, 2.0, 3.0, 3.0, 9.0])
    assert sources == [0, 1, 2, 4, 4, 5, 6, 1]
    assert group.best == 1
    changed = [DROPOUT.over(group.values[r], values[sources[r]]) for r in range(8)]
    assert [x == pytest.approx(1.0) for x in changed] == [r not in (3, 7) for r in range(8)]
    assert all(min(abs(changed[r] - 1.5), abs(changed[r] - 1 / 1.5)) < 1e-9 for r in (3, 7))


def test_a_population_takes_over_weights_and_optimizer() -> None:
    bench = small_bench(DIGITS, seeds=(0, 1))
    stack = bench.stack(1, each=4)
    optimizer = bench.update(stack)
    arms = Arms(bench, stack, optimizer, [(METHODS["population"]._replace(rounds=1, signal="train"), 1.0)], 4)
    marks = torch.arange(8.0)[:, None]
    for tensor in (stack.theta, *optimizer.state):
        tensor.copy_(marks[..., None].expand_as(tensor))
    arms.begin()
    arms.observe(torch.tensor([[4.0], [1.0], [2.0], [3.0], [1.0], [2.0], [3.0], [4.0]]))
    arms.after_step(bench.steps)
    for tensor in (stack.theta, *optimizer.state):
        assert tensor[:, 0, 0].tolist() == [1, 1, 2, 3, 4, 5, 6, 4]
    assert arms.weights()[:, 0, 0].tolist() == [1, 4]


def test_an_arm_without_finite_weights_is_left_out_of_the_mean() -> None:
    bench = small_bench(DIGITS)
    stack = bench.stack(1, each=2)
    arms = Arms(bench, stack, bench.update(stack), [(METHODS["normalised"]._replace(rounds=1), 1.0)], 2)
    first = stack.theta[0, 0].clone()
    stack.theta[1, 0, 3] = math.inf
    arms.begin()
    arms.after_step(bench.steps)
    assert torch.equal(stack.theta, first.expand_as(stack.theta))


# Regularisers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", [*REAL, *MINI], ids=lambda workload: workload.name)
def test_validation_and_probe_are_without_the_regulariser(workload: KnobWorkload) -> None:
    task = workload.task(synthetic=True)
    assert workload.knob.bounds[0] < workload.knob.centre < workload.knob.bounds[1]
    assert not {*map(_key, _samples(task.probe))} & {*map(_key, _samples(task.validation()))}
    if workload.knob.where != "loss":
        return
    model, batch = task.model(0), task.batch(0, 0)
    losses = [task.trained(model, batch, torch.tensor(workload.knob.times(0.5, f))).item() for f in (0.1, 10.0)]
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)
    assert task.loss(model, batch).item() == task.loss(model, batch[:2]).item()


def _samples(batches: list[Any]) -> list[torch.Tensor]:
    return [sample for batch in batches for sample in batch[0]]


def _key(sample: torch.Tensor) -> bytes:
    return sample.numpy().tobytes()


# Scores --------------------------------------------------------------------------------------------------------------


def file_of(row: list[list[float | None]], values: list[list[float]]) -> dict[str, Any]:
    """[start][seed]; plain training ends at 2, 1 and 3."""
    stayed = [[2.0] * 3, [1.0, 1.0, 1.0], [3.0] * 3]

    def made(losses: list[Any], found: list[list[float]]) -> dict[str, Any]:
        curves = [[[9.0, x] for x in start] for start in losses]
        paths = [[[0.1, 1.2, 10.0, value] for value in start] for start in found]
        return {"seeds": [0, 1, 2], "curves": curves, "found": found, "paths": paths}

    rows = {PLAIN: made(stayed, [[0.1] * 3, [1.0] * 3, [10.0] * 3]), "a": made(row, values)}
    return {"best": {"value": 1.0}, "rows": rows}


def test_scores() -> None:
    values = [[0.5, 1.0, 2.0]] * 3
    good = score(file_of([[1.02] * 3, [1.0, 1.02, 0.98], [1.01] * 3], values), "a", DIGITS.knob)
    assert [cell.start for cell in good] == list(STARTS)
    assert [cell.ratio for cell in good] == pytest.approx([1.02, 1.0, 1.01])
    assert good[0].value == pytest.approx(1.0)
    assert meets(good)
    far = score(file_of([[1.04] * 3, [1.0] * 3, [1.0] * 3], values), "a", DIGITS.knob)
    worse = score(file_of([[1.0] * 3, [1.02, 1.021, 1.022], [1.0] * 3], values), "a", DIGITS.knob)
    failed = score(file_of([[1.0] * 3, [1.0] * 3, [1.0, 1.0, None]], values), "a", DIGITS.knob)
    assert not meets(far)
    assert worse[1].near
    assert not worse[1].harmless
    assert not meets(worse)
    assert failed[2].ratio == math.inf
    assert not meets(failed)
