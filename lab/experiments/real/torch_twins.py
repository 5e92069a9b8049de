"""The workloads' optimizers as torch has them, one run each: what packages wrap that tune an optimizer's rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from stacked import Piece
from torch import nn

from real.optimizers import ADAM_SHARE, DECAY, is_hidden


class Lion(torch.optim.Optimizer):
    """Lion with betas 0.9 and 0.99."""

    def __init__(self, params: Any, lr: float = 1e-4, weight_decay: float = DECAY["lion"]) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                direction = torch.lerp(momentum, p.grad, 0.1).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                momentum.lerp_(p.grad, 0.01)


class MuonAndAdam(torch.optim.Optimizer):
    """torch's Muon on the groups that say ``muon``, its AdamW at a part of the rate on the others."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "muon": False})
        hidden = [p for group in self.param_groups if group["muon"] for p in group["params"]]
        others = [p for group in self.param_groups if not group["muon"] for p in group["params"]]
        self._inner = [
            (1.0, torch.optim.Muon(hidden, weight_decay=DECAY["muon"])),
            (ADAM_SHARE, torch.optim.AdamW(others, weight_decay=DECAY["adamw"])),
        ]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for share, optimizer in self._inner:
            optimizer.param_groups[0]["lr"] = share * self.param_groups[0]["lr"]
            optimizer.step()


def _one_group(parameters: list[nn.Parameter], layout: Sequence[Piece]) -> Any:
    return parameters


def _two_groups(parameters: list[nn.Parameter], layout: Sequence[Piece]) -> Any:
    pairs = list(zip(parameters, layout, strict=True))
    return [{"params": [p for p, piece in pairs if is_hidden(piece) == muon], "muon": muon} for muon in (True, False)]


class Twin(NamedTuple):
    """An optimizer's class, its options beside the rate, and the parameters it wants."""

    kind: type[torch.optim.Optimizer]
    options: dict[str, Any] = {}  # noqa: RUF012 - never written
    shaped: bool = False
    """Whether it must see the model's shapes; if not, a run may be one vector."""
    groups: Callable[[list[nn.Parameter], Sequence[Piece]], Any] = _one_group


TWINS: dict[str, Twin] = {
    "adamw": Twin(torch.optim.AdamW, {"weight_decay": DECAY["adamw"]}),
    "adam": Twin(torch.optim.Adam),
    "nadam": Twin(torch.optim.NAdam),
    "rmsprop": Twin(torch.optim.RMSprop),
    "momentum": Twin(torch.optim.SGD, {"momentum": 0.9}),
    "sgd": Twin(torch.optim.SGD),
    "nesterov": Twin(torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": DECAY["nesterov"]}),
    "lion": Twin(Lion),
    "adagrad": Twin(torch.optim.Adagrad),
    "adafactor": Twin(torch.optim.Adafactor, shaped=True),
    "muon": Twin(MuonAndAdam, shaped=True, groups=_two_groups),
}
