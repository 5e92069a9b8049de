"""Simulated ranks train as real ones do: the same plan, in processes and as rows of one tensor."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lab.runs.folder import Folder
from lab.runs.launch import execute
from lab.runs.plan import Plan
from lab.runs.simulated import Stack
from lab.runs.teller import Message
from lab.tests.runs.small import a_plan

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"method": "none"},
    "fan-out": {"signal": "none"},
    "corrected": {"signal": "loss"},
    "printed": {"signal": "printed"},
    "placebo": {"signal": "shuffled"},
    "noisy": {"signal": "none", "spread": 0.0, "noise": 0.05},
    "noisy, plain": {"method": "none", "noise": 0.05},
    "arms": {"method": "arms", "signal": "none"},
    "arms, corrected": {"method": "arms", "signal": "loss"},
    "explodes": {"method": "arms", "signal": "none", "lr": 1e30},
    "explodes, plain": {"method": "none", "lr": 1e30},
}


def plans_of(simulated: bool, **more: Any) -> list[Plan]:
    usual: dict[str, Any] = {"replicas": 3, "spread": 0.5, "lr": 2e-2, "steps": 22, "simulated": simulated}
    return [a_plan(**{**usual, "name": name, **own, **more}) for name, own in WAYS.items()]


def results(path: Path, plans: list[Plan]) -> tuple[dict[str, dict[str, Any]], list[Message]]:
    folders, told = [Folder(path / str(number)) for number in range(len(plans))], list[Message]()
    for folder, plan in zip(folders, plans, strict=True):
        folder.begin(plan)
    execute(folders, plans, told.append)
    assert all(folder.complete for folder in folders)
    return {plan.name: folder.read() for plan, folder in zip(plans, folders, strict=True)}, told


def test_every_way_to_train_ends_where_processes_do(tmp_path: Path) -> None:
    real, _ = results(tmp_path / "real", plans_of(simulated=False))
    rows, told = results(tmp_path / "rows", plans_of(simulated=True))
    for name in WAYS:
        if name.startswith("explodes"):
            assert rows[name]["crashed"] is real[name]["crashed"] is True
            continue
        assert rows[name]["untrained"]["loss"] == pytest.approx(real[name]["untrained"]["loss"], rel=1e-5), name
        for metric, value in real[name]["final"].items():
            assert rows[name]["final"][metric] == pytest.approx(value, rel=2e-4), (name, metric)
    ends = sorted(rows[name]["final"]["loss"] for name in WAYS if not name.startswith("explodes"))
    apart = [b - a for a, b in pairwise(ends)]
    assert min(apart) > 2e-6  # the ways differ from each other
    assert {message["run"] for message in told} == set(range(len(WAYS)))


def test_warm_starts_wait_for_the_runs_they_begin_with(tmp_path: Path) -> None:
    first = a_plan(method="none", replicas=2, simulated=True)
    warm = a_plan(signal="none", replicas=2, simulated=True, start=str(tmp_path / "1" / "checkpoint.pt"))
    results(tmp_path, [warm, first])
    rows = [Folder(tmp_path / number).read() for number in ("0", "1")]
    assert Stack([warm])._evaluate(0)["loss"] == pytest.approx(rows[1]["final"]["loss"], rel=1e-6)


@pytest.mark.parametrize("simulated", [True, False])
def test_a_warm_run_is_held_against_fresh_weights(tmp_path: Path, simulated: bool) -> None:
    """It crashes if it ends where an untrained model is, not if it ends where it began."""
    usual: dict[str, Any] = {"method": "none", "replicas": 2, "batch_size": 32, "simulated": simulated}
    start = {"start": str(tmp_path / "0" / "checkpoint.pt"), "noise": 0.01}
    warm = a_plan(**usual, **start, lr=1e-9, steps=100)
    results(tmp_path, [a_plan(**usual, lr=1e-2, steps=300), warm])
    row, stack = Folder(tmp_path / "1").read(), Stack([warm])
    untrained = stack.task.evaluate(stack.model)["loss"]
    assert row["untrained"]["loss"] == pytest.approx(untrained, rel=1e-5)
    assert row["final"]["loss"] == pytest.approx(stack._evaluate(0)["loss"], rel=1e-4)  # it made no progress
    assert row["final"]["loss"] < 0.98 * untrained
    assert not row["crashed"]
