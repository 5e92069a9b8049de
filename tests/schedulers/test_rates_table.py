"""One table: the rates of every step are those of a reference in plain letters.

{OneCycle with a number, "auto", "auto" with a schedule, Ensemble} x {a journal, none} x {a late group first, last,
none} x {1, 2 optimizers}. A late group belongs to the first or to the last optimizer; if there is only one, it is added
before the first step, or in the middle of the run. The factor that a search has found is read from its state; all else
is the reference's.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LinearLR

import hdet
from tests.processes import run_ranks
from tests.schedulers import rates_reference as reference
from tests.schedulers.rates_reference import Group

STEPS, ADDED, SPREAD = 60, 23, 1 / 9
FIRST, SECOND, LATE = Group(0.02, 0.02), Group(0.005, 0.005), Group(0.003, 0.003)
REPLICAS = ("OneCycle", "Ensemble", "Ensemble of one rate")
LATES = (None, "first", "last")
Rates = list[list[float]]
"""Of each step, by group."""


def own(optimizer: Optimizer) -> ChainedScheduler:
    """The reference's schedule as torch has it."""
    warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=reference.RISE)
    return ChainedScheduler([warm_up, ExponentialLR(optimizer, reference.DECAY)])


def scheduler_of(face: str, optimizers: list[SGD], journal: Path | None) -> Any:
    more: dict[str, Any] = {"total_steps": STEPS, "journal": journal}
    if face == "auto":
        return hdet.auto(optimizers, **more)
    if face == "auto with a schedule":
        return hdet.auto(optimizers, schedule=own if len(optimizers) > 1 else own(optimizers[0]), **more)
    (optimizer,) = optimizers
    if face != "OneCycle":
        knobs = hdet.knobs.lr(optimizer, groups=[0]) if face == "Ensemble of one rate" else None
        return hdet.Ensemble(optimizer, own(optimizer), knobs, controller=False, sync_every=7, **more)
    peaks = [group["max_lr"] for group in optimizer.param_groups]
    more |= {"spread": SPREAD, "sync_every": 7, "auto_lr": False, "cycle_momentum": False}
    return hdet.OneCycleLR(optimizer, peaks, **more)


class Run:
    """A small network in one or two optimizers, of which one gets a further layer."""

    def __init__(self, face: str, several: bool, late: str | None, journal: Path | None) -> None:
        torch.manual_seed(0)
        self.face = face
        self.model = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(4, 1)])
        rows = [{"params": list(self.model[i].parameters()), **given(own)} for i, own in enumerate((FIRST, SECOND))]
        self.optimizers = [SGD([row]) for row in rows] if several else [SGD(rows)]
        self.late, self.part = late, 0 if late == "first" else len(self.optimizers) - 1
        self.added = 0 if late == "first" and not several else ADDED
        self.scheduler = scheduler_of(face, self.optimizers, journal)

    def groups(self, t: int) -> list[Group]:
        """Those that train in step ``t``, in the order of the optimizers."""
        parts = [[FIRST], [SECOND]] if len(self.optimizers) == 2 else [[FIRST, SECOND]]
        if self.late is not None and t >= self.added:
            parts[self.part].append(LATE._replace(added=self.added))
        return [group for part in parts for group in part]

    def step(self, t: int, forward: Any) -> list[float]:
        """Train one step. The rates at which it was made."""
        if self.late is not None and t == self.added:
            self.optimizers[self.part].add_param_group({"params": list(self.model[2].parameters()), **given(LATE)})
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(t))
        loss = (forward(x) - x.sum(1, keepdim=True)).square().mean()
        self.model.zero_grad()
        loss.backward()
        rates = [float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups]
        for optimizer in self.optimizers:
            optimizer.step()
        self.scheduler.step(loss.detach())
        return rates

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, late = self.model
        y: torch.Tensor = second(first(x).tanh()) + late(x)
        return y

    def expected(self, t: int, search: dict[str, Any] | None) -> list[float]:
        """By the reference: a group that was just added trains one step at the rate that it came with."""
        factor = 1.0 if search is None else reference.search_factor(search, t)
        return [group.lr if group.added == t else self.eta(group, t) * factor for group in self.groups(t)]

    def eta(self, group: Group, t: int) -> float:
        if self.face == "OneCycle":
            return reference.onecycle(group.peak, t, STEPS)
        if self.face == "auto":
            return reference.trapezoid_held(group.peak, t, STEPS)
        return (reference.own_held if self.face == "auto with a schedule" else reference.own_schedule)(group, t)


def given(group: Group) -> dict[str, float]:
    return {"lr": group.lr, "max_lr": group.peak}


def searched(scheduler: Any) -> dict[str, Any]:
    """What a search has found so far."""
    found: dict[str, Any] = dict(scheduler.state_dict()["hdet"]["learned"])
    return found


@pytest.mark.parametrize("late", LATES)
@pytest.mark.parametrize("keeps", [True, False], ids=["journal", "no journal"])
@pytest.mark.parametrize("several", [False, True], ids=["one", "two"])
@pytest.mark.parametrize("face", ["auto", "auto with a schedule"])
def test_of_a_search(face: str, several: bool, keeps: bool, late: str | None, tmp_path: Path) -> None:
    run = Run(face, several, late, tmp_path / "run.jsonl" if keeps else None)
    factors = set()
    for t in range(STEPS):
        search = searched(run.scheduler)
        factors.add(search["log_factor"])
        expected = run.expected(t, search)
        assert run.step(t, run.forward) == pytest.approx(expected, rel=1e-9), f"step {t}"
    assert len(factors) > 3
    assert search["phase"] == reference.SEARCHING


@pytest.mark.parametrize("late", LATES)
@pytest.mark.parametrize("keeps", [True, False], ids=["journal", "no journal"])
@pytest.mark.parametrize("face", REPLICAS)
def test_of_one_replica(face: str, keeps: bool, late: str | None, tmp_path: Path) -> None:
    run = Run(face, False, late, tmp_path / "run.jsonl" if keeps else None)
    for t in range(STEPS):
        assert run.step(t, run.forward) == pytest.approx(run.expected(t, None), rel=1e-9), f"step {t}"


@pytest.mark.slow
@pytest.mark.parametrize("face", REPLICAS)
def test_of_two_replicas(face: str, tmp_path: Path) -> None:
    """One is as far below the base rate of each group as the other is above it."""
    found = run_ranks(_two_replicas, 2, face, str(tmp_path))
    for case, *rows in zip(CASES, *found, strict=True):
        late = case[1]
        run = Run(face, False, late, None)
        for t, (first, second) in enumerate(zip(*rows, strict=True)):
            for group, base, *own_rates in zip(run.groups(t), run.expected(t, None), first, second, strict=True):
                is_spread = group is FIRST if face == "Ensemble of one rate" else group.added != t
                spread = SPREAD if is_spread else 0.0
                apart = [base * (1 - spread), base * (1 + spread)]
                assert sorted(own_rates) == pytest.approx(apart, rel=1e-9), f"{case}, step {t}"


CASES = list(product([True, False], LATES))


def _two_replicas(rank: int, face: str, folder: str) -> list[Rates]:
    found = []
    for number, (keeps, late) in enumerate(CASES):
        run = Run(face, False, late, Path(folder) / f"{number}.jsonl" if keeps else None)
        ddp = DistributedDataParallel(_Whole(run), find_unused_parameters=True)
        found.append([run.step(t, ddp) for t in range(STEPS)])
    return found


class _Whole(nn.Module):
    """The network of a run as one module."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.layers, self._forward = run.model, run.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(x)
