"""The journal that a real ensemble writes, and controllers of the user's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import hdet
from hdet.ensemble.controller import Update
from hdet.ensemble.design import assign
from hdet.ensemble.steering import controller_from
from tests.ensemble.rho import multipliers
from tests.models import batch, groups_of, make_optimizer, two_layer
from tests.processes import error_of, run_ranks


def run(rank: int, path: str | None, steps: int = 20, **more: Any) -> dict[str, Any]:
    model = two_layer()
    optimizer = make_optimizer("sgd", groups_of(model))
    scheduler = hdet.OneCycleLR(optimizer, 0.1, 20, sync_every=5, auto_lr_start=5, journal=path, **more)
    for t in range(steps):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        scheduler.step(2.0 - 0.1 * rank + t)
    return scheduler.state_dict()["hdet"]  # type: ignore[no-any-return]


def test_one_line_per_round_written_by_one_rank(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    states = run_ranks(run, 3, str(path))
    data = hdet.read_journal(path)
    assert data.header["replicas"] == 3
    assert data.header["knobs"] == ["lr[0]", "lr[1]", "lr[2]"]
    assert data.header["arguments"]["max_lr"] == 0.1
    assert data.header["arguments"]["sync_every"] == 5
    assert [(r["round"], r["step"]) for r in data.rounds] == [(0, 5), (1, 10), (2, 15), (3, 19), (4, 20)]
    for record in data.rounds:
        assigned = assign(multipliers(3, 1 / 9), seed=0, k=record["round"], knobs=3)
        assert [row["multipliers"] for row in record["replicas"]] == assigned
        losses = [row["loss"] for row in record["replicas"]]
        assert losses[0] - losses[1] == pytest.approx(0.1)
        for row, rho in zip(record["replicas"], assigned, strict=True):
            assert row["values"] == pytest.approx([b * r for b, r in zip(record["base_before"], rho, strict=True)])
            assert row["divergence"] >= 0
        assert any(row["divergence"] > 0 for row in record["replicas"])
        assert math.fsum(record["weights"]) == pytest.approx(1)
        assert record["excluded"] == []
        assert set(record["seconds"]) == {"train", "probe", "gather", "controller", "converge"}
    last = data.rounds[-1]
    assert last["learned"] == states[0]["learned"]
    assert last["velocity"] == states[0]["controller_state"][0][1]
    assert last["learned"] != [1.0] * 3


def test_first_round_by_hand(tmp_path: Path) -> None:
    """Round 0 is in rank order, so rank 2, the best by 0.1, has the highest rate: Delta = sum w rho - 1 > 0."""
    path = tmp_path / "run.jsonl"
    run_ranks(run, 3, str(path), 5)
    record = hdet.read_journal(path).rounds[0]
    e = [math.exp(x) for x in (-1, 0, 1)]
    w = [x / sum(e) for x in e]
    assert record["weights"] == pytest.approx(w)
    assert record["delta"] == pytest.approx([(w[2] - w[0]) / 9] * 3)
    assert record["velocity"] == pytest.approx([(w[2] - w[0]) / 90] * 3)
    assert record["learned"] == pytest.approx([1 + (w[2] - w[0]) / 180] * 3)


def test_one_replica_keeps_a_journal_too(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run(0, str(path))
    data = hdet.read_journal(path)
    assert [r["step"] for r in data.rounds] == [5, 10, 15, 19, 20]
    assert data.rounds[0]["replicas"][0]["loss"] == pytest.approx(4.0)
    assert data.rounds[0]["replicas"][0]["multipliers"] == [1.0] * 3


def test_one_replica_survives_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    optimizer = make_optimizer("sgd", groups_of(two_layer()))
    scheduler = hdet.OneCycleLR(optimizer, 0.1, 20, sync_every=2, auto_lr_start=0, journal=tmp_path / "run.jsonl")
    for _ in range(4):
        optimizer.step()
        scheduler.step(math.nan)
    assert scheduler.state_dict()["hdet"]["learned"] == [1.0] * 3


class UpState(NamedTuple):
    rounds: list[float]


class AlwaysUp:
    """A controller of the user's own: ten per cent up in every round."""

    def init(self, knobs: int) -> UpState:
        return UpState([0.0] * knobs)

    def update(self, state: UpState, signals: Sequence[float], offsets: Sequence[Sequence[float]]) -> Update:
        knobs = len(state.rounds)
        return Update(UpState([n + 1 for n in state.rounds]), [0.1] * knobs, [1.0] * len(signals), [0.0] * knobs)


class Broken(AlwaysUp):
    def update(self, state: UpState, signals: Sequence[float], offsets: Sequence[Sequence[float]]) -> Update:
        return Update(state, [math.nan], [], [])


def test_a_controller_of_the_users_own() -> None:
    for state, other in run_ranks(_own_controller, 2):
        assert state["learned"] == pytest.approx([1.1**5] * 3)
        assert state["controller_state"] == [["rounds", [5.0] * 3]]
        assert "AlwaysUp" in other


def _own_controller(rank: int) -> tuple[dict[str, Any], str]:
    state = run(rank, None, auto_lr=AlwaysUp())
    scheduler = hdet.OneCycleLR(make_optimizer("sgd", groups_of(two_layer())), 0.1, 20)
    whole = {**scheduler.state_dict(), "hdet": {**state, "owns_rates": True}}
    return state, str(error_of(lambda: scheduler.load_state_dict(whole)))


def test_a_controller_that_returns_nonsense_changes_nothing() -> None:
    for message in run_ranks(_broken_controller, 2):
        assert "one finite move per knob, here 3" in message


def _broken_controller(rank: int) -> str:
    return str(error_of(lambda: run(rank, None, auto_lr=Broken())))


def _with_nan(rank: int, path: str) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(4, 2)
    scheduler = hdet.auto(optimizer, 50, journal=path)
    for _ in range(20):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step(math.nan if rank == 1 else 3.0)


def test_a_loss_of_one_rank_that_is_no_number_is_recorded_while_the_rate_is_searched(tmp_path: Path) -> None:
    run_ranks(_with_nan, 2, str(tmp_path / "run.jsonl"))
    rounds = hdet.read_journal(tmp_path / "run.jsonl").rounds
    assert rounds
    for record in rounds:
        assert record["not_finite"] == [1]
        assert [row["loss"] for row in record["replicas"]] == [3.0]


@pytest.mark.parametrize("kind", ["ensemble", "plateau", "search"])
def test_base_is_the_value_of_the_step_after_the_round(kind: str, tmp_path: Path) -> None:
    """A StepLR falls at the end of every second round; the replay falls with it."""
    path, steps, model = tmp_path / "run.jsonl", 40, two_layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0 if kind != "search" else 0.01)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.1)
    if kind == "plateau":
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=8)
    scheduler: Any
    if kind == "search":
        scheduler = hdet.auto(optimizer, schedule=schedule, total_steps=steps, journal=path)
    else:
        scheduler = hdet.Ensemble(optimizer, schedule, sync_every=5, total_steps=steps, controller=False, journal=path)
    used, metrics = [], {"metrics": 1.0} if kind == "plateau" else {}
    for t in range(steps):
        used.append(float(optimizer.param_groups[0]["lr"]))
        x, y = batch(t, 0)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step(loss, **metrics)
    rounds = hdet.read_journal(path).rounds
    for record in rounds:
        assert record["base_before"] == [pytest.approx(used[record["step"] - 1])]
        assert record["base"] == [pytest.approx([*used, optimizer.param_groups[0]["lr"]][record["step"]])]
    replay = hdet.schedule_from(path, torch.optim.SGD(two_layer().parameters(), lr=9.0))
    kept = [record["step"] for record in rounds[:-1] if record.get("event") != "first_step"]  # that is left out
    assert len(kept) > 5
    for t in range(steps):
        if any(t in (step - 1, step) for step in kept):
            assert replay.get_last_lr() == [pytest.approx(used[t])], t
        replay.optimizer.step()
        replay.step()


def test_one_replica_alone_opens_its_journal_at_its_first_step(tmp_path: Path) -> None:
    """Of two runs with one journal the second is to end there, not after a round."""
    path = tmp_path / "run.jsonl"
    run(0, str(path), steps=1)
    assert path.exists()


def test_a_checkpoint_is_not_continued_by_another_controller_of_the_users_own() -> None:
    state = {"controller": "AlwaysUp", "controller_arguments": [], "controller_state": [["rounds", [5.0]]]}
    assert controller_from(state, AlwaysUp(), 1)[1] == UpState([5.0])
    for other in (None, Broken()):
        with pytest.raises(ValueError, match="AlwaysUp"):
            controller_from(state, other, 1)
