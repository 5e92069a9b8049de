"""A search that is cut is bit-equal in less usual set-ups too: several optimizers, any schedule, layers that thaw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

import hdet
from tests.models import batch, two_layer

STEPS, THAWS, CUTS = 50, 22, (3, 11, 20, 27, 41)
Parts = tuple[list[torch.optim.Optimizer], Any]


def squared(model: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(pair[0]) - pair[1]).square().mean()


def several(model: nn.Sequential) -> Parts:
    both = [torch.optim.SGD(model[0].parameters(), 1.0, momentum=0.9), torch.optim.AdamW(model[2].parameters(), 1e-5)]
    return both, hdet.auto(both, total_steps=STEPS)


def any_schedule(model: nn.Sequential) -> Parts:
    optimizer = torch.optim.Adam(model.parameters(), 1e-5)
    schedule = CosineAnnealingLR(optimizer, STEPS)
    return [optimizer], hdet.auto(optimizer, schedule=schedule, total_steps=STEPS)


def rate_as_tensor(model: nn.Sequential) -> Parts:
    optimizer = torch.optim.Adam(model.parameters(), torch.tensor(1e-5))
    return [optimizer], hdet.auto(optimizer, STEPS)


def along_a_sequence(model: nn.Sequential) -> Parts:
    """The turn of its second part begins between the first two cuts."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-5)

    def sequence(one: torch.optim.Optimizer) -> SequentialLR:
        return SequentialLR(one, [LinearLR(one, 0.1, total_iters=7), CosineAnnealingLR(one, STEPS - 7)], milestones=[7])

    return [optimizer], hdet.auto(optimizer, schedule=sequence, total_steps=STEPS)


def in_a_chain(model: nn.Sequential) -> Parts:
    optimizer = torch.optim.Adam(model.parameters(), 1e-5)
    return [optimizer], ChainedScheduler([hdet.auto(optimizer, STEPS)], optimizer)


def along_a_chain_in_a_sequence(model: nn.Sequential) -> Parts:
    """The state of a chain has no step of its own."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-5)

    def sequence(one: torch.optim.Optimizer) -> SequentialLR:
        chain = ChainedScheduler([LinearLR(one, 0.1, total_iters=7), CosineAnnealingLR(one, STEPS)], one)
        return SequentialLR(one, [chain, ConstantLR(one, 0.1)], milestones=[STEPS // 2])

    return [optimizer], hdet.auto(optimizer, schedule=sequence, total_steps=STEPS)


def inside(scheduler: Any) -> Iterator[Any]:
    """A scheduler of torch, and those that it is made of."""
    yield scheduler
    for one in getattr(scheduler, "_schedulers", ()):
        yield from inside(one)


class Run:
    """Model, optimizers and scheduler. The first layer is frozen at first."""

    def __init__(self, seed: int, make: Callable[[nn.Sequential], Parts]) -> None:
        self.model = two_layer(seed)
        self.optimizers, self.scheduler = make(self.model)
        self.freezes = make is not several
        self.parts = {"model": self.model, "scheduler": self.scheduler}
        self.parts |= {f"optimizer_{i}": optimizer for i, optimizer in enumerate(self.optimizers)}

    def step(self, number: int) -> None:
        self.model[0].requires_grad_(not self.freezes or number >= THAWS)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = squared(self.model, batch(number, 0))
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        for one in inside(self.scheduler):
            if hasattr(one, "observe"):
                one.observe(loss.detach())  # torch's schedulers around it do not take a loss
        self.scheduler.step()

    @property
    def numbers(self) -> list[float]:
        weights = torch.cat([p.detach().flatten() for p in self.model.parameters()]).tolist()
        return [*weights, *(float(group["lr"]) for one in self.optimizers for group in one.param_groups)]


@pytest.mark.filterwarnings("error::hdet.ResumeWarning")
@pytest.mark.parametrize(
    "make", [several, any_schedule, rate_as_tensor, in_a_chain, along_a_sequence, along_a_chain_in_a_sequence]
)
def test_bit_equal(tmp_path: Path, make: Callable[..., Parts]) -> None:
    whole = Run(0, make)
    for step in range(STEPS):
        if step in CUTS:
            hdet.save(tmp_path / f"{step}.pt", **whole.parts)
        whole.step(step)
    for cut in CUTS:
        resumed = Run(1, make)
        resumed.model[0].requires_grad_(not resumed.freezes or cut > THAWS)
        hdet.load(tmp_path / f"{cut}.pt", **resumed.parts)
        for step in range(cut, STEPS):
            resumed.step(step)
        assert resumed.numbers == whole.numbers, f"cut at step {cut}"
