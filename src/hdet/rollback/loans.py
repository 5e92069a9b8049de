"""What a guard changes in an optimizer for the time of one step: it lowers rates, or hides gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.parameters import Rate, copy_rate, shared_rates, trained_parameters


class Loans:
    """Lowered rates and hidden gradients, which :meth:`give_back` restores when the step is over."""

    def __init__(self) -> None:
        self._rates: list[tuple[dict[str, Any], Rate, Rate]] = []
        """Parameter groups with their own rate and the one that stands there now."""
        self._gradients: list[tuple[Tensor, Tensor]] = []

    @property
    def are_open(self) -> bool:
        """Whether something has not been given back yet."""
        return bool(self._rates or self._gradients)

    @torch.no_grad()
    def lower_rates(self, optimizer: Optimizer, factor: float) -> None:
        """Multiply the rates. Groups may share one tensor."""
        first = shared_rates(optimizer)
        for group in (group for g, group in enumerate(optimizer.param_groups) if first[g] == g):
            own = copy_rate(group["lr"])
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(factor)
            else:
                group["lr"] *= factor
            self._rates.append((group, own, copy_rate(group["lr"])))

    def hide_gradients(self, optimizer: Optimizer) -> None:
        """Parameters without gradients are left alone by every optimizer."""
        self._gradients = [(p, p.grad) for p in trained_parameters(optimizer) if p.grad is not None]
        for p, _ in self._gradients:
            p.grad = None

    @torch.no_grad()
    def give_back(self) -> None:
        """Restore rates and gradients, bit by bit. A rate that was written by someone else since then stays."""
        for group, own, lent in self._rates:
            if isinstance(own, Tensor):
                group["lr"].copy_(torch.where(group["lr"] == lent, own, group["lr"]))
            elif group["lr"] == lent:
                group["lr"] = own
        for p, gradient in self._gradients:
            p.grad = gradient
        self._rates, self._gradients = [], []
