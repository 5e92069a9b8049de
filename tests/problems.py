"""One small problem, the loops people write for it, and what a journal says of a run. Through the public API only."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hdet

__all__ = [
    "Batch",
    "Records",
    "batch_of",
    "final_loss",
    "first_steps",
    "found_rate",
    "is_finite",
    "loss_of",
    "network",
    "quiet",
    "recorded",
    "said",
    "train",
    "weights_of",
]

Batch = tuple[Tensor, Tensor]


@cache
def batch_of(k: int, size: int = 64) -> Batch:
    """Batch ``k`` of an endless stream: a smooth target with a little noise."""
    g = torch.Generator().manual_seed(1000 + k)
    x = torch.randn(size, 6, generator=g)
    y = torch.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3]
    return x, y + 0.05 * torch.randn(size, 1, generator=g)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """In the model's precision and on its device; the mean is taken in fp32."""
    first = next(model.parameters())
    x, y = (part.to(first.device, first.dtype) for part in batch)
    return nn.functional.mse_loss(model(x).float(), y.float())


def network(*middle: nn.Module, bias: bool = True) -> nn.Sequential:
    """The same weights at every call. ``middle``: after the first layer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 32, bias=bias), *middle, nn.Tanh(), nn.Linear(32, 1, bias=bias))


def train(model: nn.Module, optimizer: Optimizer, scheduler: Any, steps: range) -> list[float]:
    """The plain loop; the rate of each step."""
    rates = []
    for t in steps:
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(t))
        loss.backward()
        optimizer.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
        scheduler.step(*([loss.detach()] if hasattr(scheduler, "observe") else []))  # torch's have no use for it
    return rates


def final_loss(model: nn.Module) -> float:
    """On many new samples; modes are left alone."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            return float(loss_of(model, batch_of(999_999, 2000)))
    finally:
        for m, mode in modes:
            m.training = mode


def weights_of(model: nn.Module) -> Tensor:
    """All parameters in one vector, a copy in fp32."""
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


def first_steps(journal: Path) -> int:
    """How many steps it took until the length of one was known, and the search began."""
    events = [(r["step"], r["event"] or "") for r in hdet.read_journal(journal).rounds]
    return max(step for step, event in events if event in ("first_step", "restarted"))


def found_rate(journal: Path, guess: float) -> float:
    """The rate that stood at the end: the guess times what was learned, of the first knob."""
    return guess * float(hdet.read_journal(journal).rounds[-1]["learned"][0])


class Records:
    """A journal in memory."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def write(self, record: Any) -> None:
        self.records.append(dict(record))

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == "round"]


@contextmanager
def recorded() -> Iterator[list[warnings.WarningMessage]]:
    """Every warning inside, also those that were shown before."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


@contextmanager
def quiet() -> Iterator[None]:
    """Warnings are somebody else's test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def said(caught: list[warnings.WarningMessage]) -> list[str]:
    """What a search has told people."""
    return [str(w.message) for w in caught if issubclass(w.category, hdet.SearchWarning)]


def is_finite(model: nn.Module) -> bool:
    return math.isfinite(float(weights_of(model).sum()))
