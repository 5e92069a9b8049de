"""``hdet.schedule_from`` gives each group the rate that it was trained at, whatever groups and knobs the run had."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import hdet
from hdet.journal import JournalData
from hdet.journal.reading import Found, found_schedules
from hdet.report.data import load_run

STEPS, ADDED = 120, 37


def a_run(knobs: list[str], base: list[float]) -> JournalData:
    rounds = [{"round": k, "step": 50 * (k + 1), "base_before": base, "base": base} for k in range(2)]
    return JournalData({"knobs": knobs, "arguments": {"total_steps": 100}}, rounds)


def two_groups(**first: Any) -> SGD:
    model = nn.Linear(3, 2)
    return SGD([{"params": [model.weight], **first}, {"params": [model.bias]}], lr=1.0)


def replayed(journal: Path | JournalData, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> list[list[float]]:
    scheduler = hdet.schedule_from(journal, optimizer)
    rates = []
    for _ in range(steps):
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("knobs", "base", "first", "expected"),
    [
        (["lr[1]", "lr[0]"], [1e-4, 1e-1], {}, [1e-1, 1e-4]),
        (["lr[0]", "lrelu_slope"], [1e-1, 0.2], {}, [1e-1, 1e-1]),
        (["lr_scale", "lr[1]", "lr[0]"], [7.0, 1e-4, 1e-1], {}, [1e-1, 1e-4]),
        (["lr[1]", "lr[stem]"], [1e-4, 1e-1], {"name": "stem"}, [1e-1, 1e-4]),
        (["lr[0]", "lr[1]"], [1e-1, 1e-4], {"name": "stem"}, [1e-1, 1e-4]),
        (["lr[all]"], [1e-1], {}, [1e-1, 1e-1]),
    ],
)
def test_a_group_takes_the_rate_that_has_its_name(
    knobs: list[str], base: list[float], first: dict[str, str], expected: list[float]
) -> None:
    assert replayed(a_run(knobs, base), two_groups(**first), 1) == [expected]


@pytest.mark.parametrize("knobs", [["lr[1]"], ["lr[0]", "lr[head]"], ["lr[0]", "lr[1]", "lr[2]"], ["lrelu_slope"]])
def test_rates_of_other_groups_are_refused_before_anything_is_changed(knobs: list[str]) -> None:
    optimizer = two_groups()
    with pytest.raises(hdet.ArgumentError, match=r"the journal has \d learning rates.*lr\[0\].*lr\[1\].*; build"):
        hdet.schedule_from(a_run(knobs, [0.1] * len(knobs)), optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 1.0]


def test_the_last_round_tells_how_long_the_run_was() -> None:
    rounds = [
        {"step": step, "base_before": [0.1 * step], "base": [0.1 * step], "total_steps": total}
        for step, total in ((10, 15), (20, 30), (30, 30))
    ]
    run = JournalData({"knobs": ["lr[0]"], "arguments": {"total_steps": 15}}, rounds)
    (rates,) = zip(*replayed(run, SGD([nn.Parameter(torch.ones(1))], lr=1.0), 30), strict=True)
    assert rates[-1] == pytest.approx(3.0)


def layers() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(6, 1)]


def train(model: list[nn.Linear], optimizers: list[Any], scheduler: Any, steps: range) -> list[list[float]]:
    """The rates at which each step was made."""
    rates = []
    for t in steps:
        x = torch.randn(32, 6, generator=torch.Generator().manual_seed(t))
        loss = (model[1](model[0](x).tanh()) + model[2](x) - x.sum(1, keepdim=True)).square().mean()
        for layer in model:
            layer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        rates.append([float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups])
        scheduler.step(loss.detach())
    return rates


def onecycle(optimizer: Any, journal: Path) -> Any:
    return hdet.auto(optimizer, total_steps=STEPS, journal=journal)


def onecycle_with_a_number(optimizer: Any, journal: Path) -> Any:
    return hdet.OneCycleLR(optimizer, 1e-3, total_steps=STEPS, journal=journal, cycle_momentum=False)


def ensemble(optimizer: Any, journal: Path) -> Any:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    return hdet.Ensemble(optimizer, schedule, sync_every=10, total_steps=STEPS, journal=journal)


@pytest.mark.parametrize("face", [onecycle, onecycle_with_a_number, ensemble])
def test_a_late_group_is_at_rest_until_it_was_added(face: Any, tmp_path: Path) -> None:
    model, path = layers(), tmp_path / "run.jsonl"
    optimizer = Adam(model[0].parameters(), lr=1e-3)
    scheduler = face(optimizer, path)
    train(model, [optimizer], scheduler, range(ADDED))
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 1e-5, "max_lr": 1e-5})
    trained = train(model, [optimizer], scheduler, range(ADDED, STEPS))
    rates = replayed(path, Adam([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=1.0))
    assert [own[1] for own in rates[:ADDED]] == [0.0] * ADDED
    known = [r["step"] - 1 for r in hdet.read_journal(path).rounds if r["step"] - 1 > ADDED]
    assert len(known) > 3
    for t in known:
        assert rates[t] == pytest.approx(trained[t - ADDED])


def test_the_journal_tells_which_groups_were_added_and_when(tmp_path: Path) -> None:
    """The first of two optimizers gets one: the second one's group keeps its name, also after a resume."""

    def begun(late: bool) -> tuple[list[nn.Linear], list[SGD], Any]:
        model = layers()
        optimizers = [SGD(model[0].parameters(), lr=1e-2), SGD(model[1].parameters(), lr=1e-3)]
        if late:
            optimizers[0].add_param_group({"params": list(model[2].parameters()), "lr": 1e-4})
        return model, optimizers, hdet.auto(optimizers, total_steps=STEPS, journal=tmp_path / "run.jsonl")

    model, optimizers, scheduler = begun(late=False)
    trained = train(model, optimizers, scheduler, range(ADDED))
    optimizers[0].add_param_group({"params": list(model[2].parameters()), "lr": 1e-4})
    trained += train(model, optimizers, scheduler, range(ADDED, 60))
    states = copy.deepcopy([part.state_dict() for part in (scheduler, *model, *optimizers)])
    del scheduler
    model, optimizers, scheduler = begun(late=True)
    for part, state in zip((scheduler, *model, *optimizers), states, strict=True):
        part.load_state_dict(state)
    trained += train(model, optimizers, scheduler, range(60, STEPS))
    data = hdet.read_journal(tmp_path / "run.jsonl")
    assert data.header["knobs"] == ["lr[0.0]", "lr[1.0]"]
    assert [r["added"] for r in data.rounds if "added" in r] == [{"lr[0.1]": ADDED}]
    found = found_schedules(data)
    assert list(found) == ["lr[0.0]", "lr[1.0]", "lr[0.1]"]
    assert found["lr[0.1]"][0][0] == ADDED
    for name, place in (("lr[0.0]", 0), ("lr[0.1]", 1), ("lr[1.0]", 2)):
        rows = [(t, value) for t, value in zip(*found[name][:2], strict=True) if ADDED + 1 < t < STEPS]
        assert rows
        assert [value for _, value in rows] == pytest.approx([trained[t][place] for t, _ in rows])
    run = load_run(tmp_path / "run.jsonl")
    assert run.knobs == ("lr[0.0]", "lr[1.0]", "lr[0.1]")
    first, second, late = run.rounds[-1].base
    assert (second, late) == pytest.approx((0.1 * first, 0.01 * first))  # type: ignore[operator]
    assert run.rounds[0].base[2] is None


@pytest.mark.parametrize(("ends", "middle"), [((0.01, 0.09), 0.04), ((0.0, 4.0), 1.0), ((-1.0, 3.0), 1.0)])
def test_between_two_rounds_the_root_goes_along_a_line_unless_there_is_none(
    ends: tuple[float, float], middle: float
) -> None:
    assert Found([0, 2], ends).at(1) == pytest.approx(middle)
