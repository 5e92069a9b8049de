"""What the entry trains with: NAdamW as the benchmark has it, the schedule, and the average that is evaluated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

GUESS = 1e-6
"""The search begins here. It is far below any rate that trains, so it says nothing about a workload."""
BETAS, WEIGHT_DECAY = (1 - 0.06733926164, 0.9955159689799007), 0.08121616522670176
"""Those of the benchmark's own self-tuning baseline."""
RISE, HOLD = 0.2, 0.3
"""Shares of the run: the search climbs in the first, and the rate is held until the second (decision 036)."""
AVERAGED = 0.04
"""The average of the weights is over this share of the run."""
_LOOKS = 50
"""The weights enter the average so many times in that share: it costs a part of a step and is as good."""
_END = 1 / 25 / 1e4


class NAdamW(torch.optim.Optimizer):
    """AdamW with Nesterov's momentum: the gradient enters the first moment a second time before the step.

    torch's NAdam is another: its momentum grows in the course of the run.

    Args:
        params: to be trained.
        lr: the rate.
        betas: of the moments.
        eps: added to the root of the second moment.
        weight_decay: times the rate, beside the gradient.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step(group, [p for p in group["params"] if p.grad is not None])
        return loss

    def _step(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        if not weights:
            return
        for p in weights:
            if not self.state[p]:
                self.state[p] = {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        (beta1, beta2), rate = group["betas"], group["lr"]
        gradients = [p.grad for p in weights if p.grad is not None]
        first, second = ([self.state[p][name] for p in weights] for name in ("exp_avg", "exp_avg_sq"))
        for p in weights:
            self.state[p]["step"] += 1
        counts = [self.state[p]["step"] for p in weights]
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        ahead = torch._foreach_lerp(first, gradients, 1 - beta1)
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, [math.sqrt(1 - beta2**count) for count in counts])
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
        torch._foreach_addcdiv_(weights, ahead, roots, [-rate / (1 - beta1**count) for count in counts])


def share_of(step: int, steps: int) -> float:
    """The schedule: up along a line, held, and down by 1 - sqrt until the last step; a share of the peak.

    >>> [round(share_of(step, 100), 2) for step in (0, 19, 29, 64, 99)]
    [0.04, 1.0, 1.0, 0.29, 0.0]
    """
    rise, hold = RISE * steps - 1, HOLD * steps - 1
    if step < rise:
        return 1 / 25 + (1 - 1 / 25) * step / rise
    return 1 - (1 - _END) * math.sqrt(min(max(step - hold, 0) / max(steps - 1 - hold, 1), 1))


class Average:
    """An exponential average of a model's weights and float buffers, which can take their place for an evaluation.

    Args:
        model: whose.
        steps: of the whole run; the average is over `AVERAGED` of them.
    """

    def __init__(self, model: nn.Module, steps: int) -> None:
        self._tensors = [t.detach() for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
        self.every = max(1, round(AVERAGED * steps / _LOOKS))
        """Steps between two looks at the weights."""
        self._weight = 1 - (1 - 1 / max(1.0, AVERAGED * steps)) ** self.every
        self._averages = [t.clone() for t in self._tensors]
        self._trained: list[Tensor] | None = None
        """The model's own tensors while the averages stand in their place."""
        self._rolled_back = 0

    @torch.no_grad()
    def look(self, rolled_back: int) -> None:
        """After every so many steps: take the weights in.

        Args:
            rolled_back: how often training was. After another time the average begins anew: the weights are earlier
                ones, and what was averaged may be NaN.
        """
        if rolled_back == self._rolled_back:
            torch._foreach_lerp_(self._averages, self._tensors, self._weight)
        else:
            torch._foreach_copy_(self._averages, self._tensors)
        self._rolled_back = rolled_back

    @torch.no_grad()
    def show(self) -> None:
        """The model has the averages until `hide`."""
        if self._trained is None:
            self._trained = [t.clone() for t in self._tensors]
            torch._foreach_copy_(self._tensors, self._averages)

    @torch.no_grad()
    def hide(self) -> None:
        """The model has the weights that are trained."""
        if self._trained is not None:
            torch._foreach_copy_(self._tensors, self._trained)
            self._trained = None

    def state_dict(self) -> dict[str, Any]:
        """The averages, and the trained weights if the model does not have them."""
        return {"averages": self._averages, "trained": self._trained, "rolled_back": self._rolled_back}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`; the model's own state is loaded by itself."""
        torch._foreach_copy_(
            self._averages, [t.to(own) for t, own in zip(state["averages"], self._tensors, strict=True)]
        )
        self._rolled_back, trained = state["rolled_back"], state["trained"]
        self._trained = trained and [t.to(own) for t, own in zip(trained, self._tensors, strict=True)]
