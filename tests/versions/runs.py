"""Small runs whose checkpoints and journals are kept in ``tests/fixtures``, and loaded by every later version of hdet.

They must stay as they are: a run goes on from a file that was written by another version. Numbers are in float64, and
batches come from Python's own generator, so that other machines and other versions of torch reach the same values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR

import hdet
from hdet.journal.reading import found_schedules
from tests.problems import quiet
from tests.processes import run_ranks

FIXTURES = Path(__file__).parents[1] / "fixtures"
STEPS = 120
_WIDTH, _ROWS = 4, 16
_REPLAYED = (0, 10, 40, 80, STEPS - 1)
"""Steps at which the schedule that a journal says is asked for."""

Parts = dict[str, Any]


class Kind(NamedTuple):
    """A run: how it is built, and after which step its checkpoint was written."""

    build: Callable[[nn.Module, Path | None], Parts]
    """From a model and a journal, everything that steps; "scheduler" is given losses, unless there is a "guard"."""
    cut: int
    replicas: int = 1
    spoilt: int | None = None
    """The step after which the weights have exploded."""
    keeps_journal: bool = True
    """Whether its journal is a fixture, too: those of one class are alike."""


def _adam(model: nn.Module, lr: float = 1e-5) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


def _auto(model: nn.Module, journal: Path | None) -> Parts:
    optimizer = _adam(model)
    return {"optimizer": optimizer, "scheduler": hdet.auto(optimizer, STEPS, model=model, journal=journal)}


def _endless(model: nn.Module, journal: Path | None) -> Parts:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    return {"optimizer": optimizer, "scheduler": hdet.auto(optimizer, model=model, journal=journal, highest=0.5)}


def _given_schedule(model: nn.Module, journal: Path | None) -> Parts:
    optimizer = _adam(model)
    scheduler = hdet.auto(optimizer, STEPS, lambda own: CosineAnnealingLR(own, STEPS), model=model, journal=journal)
    return {"optimizer": optimizer, "scheduler": scheduler}


def _onecycle(model: nn.Module, journal: Path | None) -> Parts:
    optimizer = _adam(model)
    scheduler = hdet.OneCycleLR(optimizer, 0.03, STEPS, sync_every=10, model=model, journal=journal)
    return {"optimizer": optimizer, "scheduler": scheduler}


def _ensemble(model: nn.Module, journal: Path | None) -> Parts:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = hdet.Ensemble(
        optimizer,
        CosineAnnealingLR(optimizer, STEPS),
        [hdet.knobs.lr(optimizer), hdet.knobs.optimizer(optimizer, "weight_decay", spread=0.3)],
        sync_every=10,
        model=model,
        journal=journal,
    )
    return {"optimizer": optimizer, "scheduler": scheduler}


def _guarded(model: nn.Module, journal: Path | None) -> Parts:
    optimizer = _adam(model, 3e-3)
    guard = hdet.Guard(optimizer, model, check_every=10)
    return {"optimizer": optimizer, "scheduler": ExponentialLR(optimizer, 0.995), "guard": guard}


KINDS = {
    "searching": Kind(_auto, cut=20, keeps_journal=False),
    "settled": Kind(_auto, cut=100, keeps_journal=False),
    "about-to-roll-back": Kind(_auto, cut=45, spoilt=40, keeps_journal=False),
    "rolled-back": Kind(_auto, cut=60, spoilt=40),
    "endless": Kind(_endless, cut=50),
    "given-schedule": Kind(_given_schedule, cut=50),
    "onecycle": Kind(_onecycle, cut=50),
    "replicas": Kind(_onecycle, cut=50, replicas=2, keeps_journal=False),
    "ensemble": Kind(_ensemble, cut=50, replicas=2),
    "guard": Kind(_guarded, cut=55, spoilt=40, keeps_journal=False),
}


class Run:
    """One of these runs, seen from one rank; ``seed`` is of the first weights, which a checkpoint replaces."""

    def __init__(self, kind: Kind, journal: Path | None = None, seed: int = 0) -> None:
        self.kind, layers = kind, (nn.Linear(_WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.model, dice = nn.Sequential(*layers).double(), Random(f"weights {seed}")
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(_uniform(dice, p.shape) / p.shape[-1] ** 0.5)
        self.parts: Parts = {"model": self.model, **kind.build(self.model, journal)}

    def go(self, begin: int, end: int) -> Run:
        """Train. Ranks see batches of their own, and share gradients."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        optimizer, scheduler, guard = self.parts["optimizer"], self.parts["scheduler"], self.parts.get("guard")
        for t in range(begin, end):
            loss = _loss_of(self.model, f"batch {t} of {rank}")
            optimizer.zero_grad()
            loss.backward()
            if dist.is_initialized():
                for p in self.model.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()
            optimizer.step()
            if t == self.kind.spoilt:
                with torch.no_grad():
                    self.model[-1].weight.mul_(1e4)
            scheduler.step() if guard else scheduler.step(loss)
            if guard:
                guard.step(loss)
        return self

    def told(self) -> dict[str, Any]:
        """The numbers that the run has reached."""
        scheduler, guard, groups = (
            self.parts["scheduler"],
            self.parts.get("guard"),
            self.parts["optimizer"].param_groups,
        )
        with torch.no_grad():
            loss = float(_loss_of(self.model.eval(), "held out"))
        told: dict[str, Any] = {"loss": loss, "rates": [float(group["lr"]) for group in groups]}
        if guard:
            told |= {"rollbacks": guard.rollbacks}
        elif isinstance(scheduler, hdet.AutoScheduler):
            found = scheduler.found
            told |= {"found": found.rate, "status": found.status, "rolled_back": found.rolled_back}
        elif isinstance(scheduler, hdet.Ensemble):
            told |= {"bases": dict(scheduler.base_values)}
        return told


def _uniform(dice: Random, shape: Any) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.tensor([dice.uniform(-1, 1) for _ in range(count)], dtype=torch.float64).reshape(shape)


def _loss_of(model: nn.Module, batch: str) -> Tensor:
    x = 2 * _uniform(Random(batch), (_ROWS, _WIDTH))
    return (model(x) - x.sin().sum(1, keepdim=True)).square().mean()


# -- written by one version, resumed by another ------------------------------------------------------------------------


def _write(rank: int, name: str, folder: Path) -> None:
    kind = KINDS[name]
    with quiet():
        run = Run(kind, folder / f"{name}.jsonl" if kind.keeps_journal else None).go(0, kind.cut)
        hdet.save(folder / f"{name}.pt", keep=1, **run.parts)


def _resume(rank: int, name: str, folder: Path, journal: Path | None = None) -> dict[str, Any]:
    kind = KINDS[name]
    with quiet():
        run = Run(kind, journal, seed=1)
        hdet.load(folder / f"{name}.pt", **run.parts)
        if kind.build is _endless:
            run.go(kind.cut, STEPS // 2)
            run.parts["scheduler"].finish(STEPS - STEPS // 2)
            return run.go(STEPS // 2, STEPS).told()
        return run.go(kind.cut, STEPS).told()


def _on_ranks(function: Callable[..., Any], name: str, *arguments: Any) -> Any:
    """What it returns, on the first of as many ranks as the run has."""
    replicas = KINDS[name].replicas
    if replicas == 1:
        return function(0, name, *arguments)
    return run_ranks(function, replicas, name, *arguments)[0]


def write(name: str, folder: Path) -> None:
    """Train until the cut; write the checkpoint and the journal so far."""
    _on_ranks(_write, name, folder)


def resumed(name: str, folder: Path, journal: Path | None = None) -> dict[str, Any]:
    """What the run reaches that goes on from the checkpoint in a folder, and continues a journal, if one is given."""
    return _on_ranks(_resume, name, folder, journal)  # type: ignore[no-any-return]


def replayed(journal: Path) -> dict[str, Any]:
    """What a journal says."""
    data = hdet.read_journal(journal)
    schedules = {name: [one.at(t) for t in _REPLAYED] for name, one in found_schedules(data).items()}
    return {"rounds": len(data.rounds), "resumes": len(data.resumes), "schedules": schedules}


def pinned(folder: Path) -> dict[str, Any]:
    """The values that a version has reached."""
    return json.loads((folder / "pinned.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]
