"""lab/experiments/stacked_ablation.py: a run of the stack is the library's, and counts, borders and tables by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import crashes
import pytest
import torch
from crashes import border, has_crashed, interval, summary, table
from stacked import Adam, Stack, Supply, TrainStep
from stacked_ablation import METHODS, main
from stacked_replicas import Column, Method, StackedReplicas
from tests.processes import run_ranks
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.ensemble.controller import Corrected
from lab.tests.experiments import small_tasks
from lab.tests.experiments.small_tasks import CPU

N, STEPS, T, SEED, RATE, SPREAD = 4, 25, 4, 3, 3e-3, 0.3  # the controller begins at step 8
PIECE = 8
"""Samples per replica and step."""
CASES = {
    "hdet": Method("shared gradients, spread", True, SPREAD, lambda seed: Corrected()),
    "arms-spread": Method("arms, spread", False, SPREAD),
    "arms": Method("arms", False, 0.0),
}


def task() -> Any:
    """The feed in double precision, with the batch of all replicas."""
    options = {**small_tasks.SMALL["feed"], "batch_size": N * PIECE}
    return small_tasks.Doubled(small_tasks.task_named("feed", **options))


def trained_by_ranks(rank: int, key: str) -> dict[str, Any]:
    """What a user writes, on one of four ranks."""
    torch.set_num_threads(1)
    method, problem = CASES[key], task()
    model = problem.model(SEED)
    arms = None if method.shares else hdet.arms(N)
    ddp = DistributedDataParallel(model, process_group=arms.gradients if arms is not None else None)
    optimizer = torch.optim.Adam(problem.groups(model), lr=RATE)
    scheduler = hdet.OneCycleLR(
        optimizer,
        RATE,
        STEPS,
        cycle_momentum=False,
        spread=method.spread,
        sync_every=T,
        auto_lr=method.controller is not None,
        seed=SEED,
        group=arms,
    )
    losses, rates = [], []
    for step in range(STEPS):
        batch = tuple(part[rank * PIECE : (rank + 1) * PIECE] for part in problem.batch(SEED, step))
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.zero_grad()
        loss = problem.loss(ddp, batch)
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        losses.append(loss.item())
    weights = torch.cat([p.detach().flatten() for group in optimizer.param_groups for p in group["params"]])
    return {"losses": losses, "rates": rates, "weights": weights.tolist()}


def trained_in_a_stack(columns: list[Column]) -> tuple[StackedReplicas, Stack]:
    problem = task()
    stack = Stack(problem, [SEED] * N, len(columns), CPU)
    optimizer = Adam(stack.theta)
    runs = StackedReplicas(stack, optimizer, columns, N, STEPS, [SEED])
    batches = Supply(problem, [SEED], STEPS, CPU).dealt(N)
    step = TrainStep(stack, optimizer, batches, runs.rates, runs.share, after=runs.observe)
    runs.begin()
    for t in range(1, STEPS + 1):
        step()
        runs.after_step(t)
    return runs, stack


@pytest.mark.parametrize("key", CASES)
def test_a_run_is_the_librarys(key: str) -> None:
    """Rates, losses and last weights of four ranks, beside another column that must not touch them."""
    other = Column("plain", METHODS["plain"], 5, 10 * RATE)
    own = Column(key, CASES[key], T, RATE)
    columns = [other, own]
    ranks = run_ranks(trained_by_ranks, N, key)
    runs, stack = trained_in_a_stack(columns)
    for r, rank in enumerate(ranks):
        rates, losses = torch.tensor(rank["rates"]), torch.tensor(rank["losses"], dtype=torch.float64)
        torch.testing.assert_close(runs.rates[:, r, 1].float(), rates, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(runs.losses[:, r, 1], losses, rtol=1e-6, atol=1e-8)
        # Some gradients are 0 but for rounding (the bias of a key), of which Adam makes steps.
        weights = torch.tensor(rank["weights"], dtype=torch.float64)
        assert (stack.theta[r, 1] - weights).abs().median() < 1e-9
    if CASES[key].controller is not None:
        assert any(abs(m - 1) > 1e-6 for m in runs.runs[0][1].learned)  # it has moved something
    assert len({tuple(rank["weights"]) for rank in ranks}) == 1  # a round ends at the last step


def test_a_replica_that_is_not_finite_is_left_out() -> None:
    columns = [Column("arms", CASES["arms"], T, RATE), Column("arms", CASES["arms-spread"], T, RATE)]
    stack = Stack(task(), [SEED] * N, 2, CPU)
    optimizer = Adam(stack.theta)
    runs = StackedReplicas(stack, optimizer, columns, N, STEPS, [SEED])
    stack.theta[1:, 0] += torch.arange(1.0, N)[:, None]
    optimizer.first.copy_(stack.theta)
    before = stack.theta.clone()
    stack.theta[2, 0, 5] = math.nan
    runs.after_step(T)
    expected = before[[0, 1, 3], 0].mean(0).expand(N, -1)
    torch.testing.assert_close(stack.theta[:, 0], expected)
    torch.testing.assert_close(optimizer.first[:, 0], expected)
    torch.testing.assert_close(stack.theta[:, 1], before[:, 1])
    stack.theta[:, 0] = math.nan
    runs.after_step(2 * T)
    assert stack.theta[:, 0].isnan().all()
    assert stack.theta[:, 1].isfinite().all()


def test_shared_gradients_are_the_mean() -> None:
    columns = [Column("plain", METHODS["plain"], T, RATE), Column("arms", METHODS["arms"], T, RATE)]
    stack = Stack(task(), [0, 0, 1, 1], 2, CPU)
    runs = StackedReplicas(stack, Adam(stack.theta), columns, 2, STEPS, [0, 1])
    gradient = torch.arange(8.0).view(4, 2, 1).expand(stack.theta.shape).clone()
    shared = runs.share(gradient)
    assert shared[:, 0, 0].tolist() == [1.0, 1.0, 5.0, 5.0]
    assert shared[:, 1, 0].tolist() == [1.0, 3.0, 5.0, 7.0]
    with pytest.raises(ValueError, match="share gradients must come first"):
        StackedReplicas(stack, Adam(stack.theta), columns[::-1], 2, STEPS, [0, 1])


def test_replicas_go_apart_for_a_part_of_the_run() -> None:
    """Steps of 0.4 to 0.8 of the run: before, and from the round after it on, replicas are equal."""
    phased = Column("phased", CASES["arms"]._replace(apart=(0.4, 0.8)), 2, RATE)
    stack = Stack(task(), [SEED] * N, 1, CPU)
    optimizer = Adam(stack.theta)
    runs = StackedReplicas(stack, optimizer, [phased], N, 10, [SEED])
    step = TrainStep(stack, optimizer, Supply(task(), [SEED], 10, CPU).dealt(N), runs.rates, runs.share)
    runs.begin()
    apart = []
    for t in range(1, 11):
        step()
        apart.append(bool((stack.theta != stack.theta[:1]).any()))  # before a round's end makes them equal
        runs.after_step(t)
    assert apart == [4 < t <= 8 for t in range(1, 11)]


def test_gradients_are_clipped_by_column() -> None:
    columns = [Column("a", METHODS["plain"]._replace(clip=1.0), T, RATE), Column("b", METHODS["plain"], T, RATE)]
    stack = Stack(task(), [SEED, SEED], 2, CPU)
    runs = StackedReplicas(stack, Adam(stack.theta), columns, 2, STEPS, [SEED])
    weights = stack.theta.shape[-1]
    for size, expected in ((3.0, 1.0), (0.5, 0.5)):
        gradient = torch.full_like(stack.theta, size / weights**0.5)
        clipped = runs.share(gradient)
        assert clipped[:, 0].norm(dim=-1).tolist() == pytest.approx([expected] * 2, rel=1e-4)
        assert clipped[:, 1].norm(dim=-1).tolist() == pytest.approx([size] * 2)


def test_in_miniature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "--tasks", "feed", "--steps", "12", "--device", "cpu", "--results", str(tmp_path)]
    main([*words, "--scan"])
    content = json.loads((tmp_path / "feed.json").read_text())
    assert len(content["scan"]["rows"]) == 3
    assert content["scan"]["border"][0] < content["scan"]["border"][1]
    assert "rows" not in content
    main(words)
    content = json.loads((tmp_path / "feed.json").read_text())
    assert len(content["rows"]) == 18
    assert content["complete"]
    assert content["steps"] == 12
    for row in content["rows"]:
        assert row["rate"] in content["scan"]["border"]
        assert len(row["crashed"]) == len(row["loss"]) == len(row["auc_like"]) == len(row["ne_like"]) == 2
        assert row["summary"]["crashed"] == sum(row["crashed"])
        assert row["learned"] == [[1.0] * 4] * 2 if row["row"] in ("plain", "arms") else True
    capsys.readouterr()
    main(["--table", "--results", str(tmp_path)])
    assert "| arms, spread | 10 |" in capsys.readouterr().out
    for bad, word in ((["--tasks", "feet"], "--tasks"), (["--rows", "army"], "--rows"), (["--quick"], "--results")):
        with pytest.raises(SystemExit):
            main(bad)
        assert word in capsys.readouterr().err


def test_counts_and_border_by_hand() -> None:
    assert [has_crashed(loss, 1.0) for loss in (0.98, 0.995, math.inf, math.nan)] == [False, True, True, True]
    low, high = interval(3, 5)  # (0.6 + 3.84146 / 10 -+ 1.95996 sqrt(0.048 + 3.84146 / 100)) / 1.76829
    assert (low, high) == pytest.approx((0.2307, 0.8824), abs=1e-4)
    assert interval(5, 5)[1] == 1.0
    assert summary([True, True], [1.0, 2.0])["loss"] == {"mean": None, "deviation": None, "runs": 0}
    assert border([1, 2, 3], [0.0, 1.0, 0.0]) == (1, 2)
    rows = [
        {
            "label": "arms",
            "T": 20,
            "rate": 0.1,
            "crashed": [True, False, False],
            "summary": summary([True, False, False], [9.0, 1.0, 2.0]),
            "auc_like": [0.5, 0.7, 0.8],
        }
    ]
    content = {"task": "feed", "arguments": {"replicas": 8}, "steps": 10, "parameters": 3, "ms_a_step": 2.0}
    content |= {"versions": {"device": "a machine"}, "reference": 1.0, "rows": rows}
    lines = table(content).splitlines()
    assert "| arms | 20 | 0.1 | 1 of 3 | 0.06 to 0.79 | 1.5000 ± 0.7071 | 0.7500 |" in lines
    assert "| arms | 1 of 3 | 0.06 to 0.79 |" in lines
    scanned = {"rate": 0.01, "summary": summary([False] * 3, [1.0, 1.0, 1.0])}
    lines = table({**content, "scan": {"steps": 10, "rows": [scanned]}}).splitlines()
    assert lines[-1] == "| 0.01 | 0 of 3 | 0.00 to 0.56 | 1.0000 ± 0.0000 |"  # a good rate, beside those at the border
    assert crashes.CRASH.startswith("crashed: ")
