"""The tally: how many steps this rank has made, for comparing with the others."""

from __future__ import annotations

from typing import Any
from weakref import finalize, ref

from torch import Tensor
from torch.optim import Optimizer

from hdet.distributed.host import to_host
from hdet.distributed.weights import NO_WEIGHTS

__all__ = ["Tally"]

_PATIENCE = 8
"""So many steps in a row are looked at if the optimizer makes none. After that nobody will tell us of any: a CUDA graph
is replayed, or a compiler has taken the hook away."""


class Tally:
    """Steps of the optimizer and of the scheduler since the last round ended.

    A step that a GradScaler leaves out, because gradients are not finite, counts as made: each arm has a scale of its
    own. The gradients are only looked at where a step is missing, and no more once all ranks leave out steps.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._scheduler_steps = 0
        self._left_out: list[Tensor] = []
        """Whether each missing step had gradients that are not finite; on their device until somebody asks."""
        self._unheard = 1
        """Steps of the scheduler since the last of the optimizer; before the first, one that is made with it is due."""
        self._looks = True
        self._watches = False

    def watch(self, optimizer: Optimizer) -> None:
        """Count its steps from now on. The hook holds the tally weakly, and goes when the tally does."""
        if self._watches:
            return
        self._watches = True
        held = ref(self)

        def heard(*_: Any) -> None:
            mine = held()
            if mine is not None:
                mine._steps += 1
                mine._unheard = 0

        try:
            handle = optimizer.register_step_pre_hook(heard)
        except AttributeError:  # a framework's wrapper
            return
        finalize(self, handle.remove)

    def step(self) -> bool:
        """The scheduler makes a step. Whether the optimizer has made none before it."""
        self._scheduler_steps += 1
        self._unheard += 1
        return self._unheard > 1

    def ask_why(self, optimizer: Optimizer) -> None:
        """The optimizer has made no step: count it all the same if there was a reason, or nobody can know."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self._looks and gradients and self._unheard <= _PATIENCE:
            self._left_out.append(~_all_finite(gradients))
        else:
            self._steps += 1

    def counts(self) -> dict[str, float]:
        """By name; synchronises host and device only where a step was left out."""
        left_out = sum(to_host(self._left_out))
        return {
            "optimizer steps in this round": float(self._steps + left_out),
            "scheduler steps in this round": float(self._scheduler_steps),
        }

    def reset(self) -> None:
        """A new round begins. A loop that leaves out steps for no reason is not looked at any more."""
        self._looks = self._looks and all(to_host(self._left_out))
        self._steps, self._scheduler_steps, self._left_out = 0, 0, []

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the optimizer has no hooks."""
        return {**vars(self), "_watches": False}


def _all_finite(gradients: list[Tensor]) -> Tensor:
    dense = [grad._values() if grad.is_sparse else grad for grad in gradients]
    return NO_WEIGHTS._replace(parameters=dense).all_finite()
