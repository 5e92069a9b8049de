"""Going back: copies of weights, buffers and optimizer state in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.engine.weights import grouped_parameters

__all__ = ["Kept", "Rewind"]

_MOST = 4


class Kept(NamedTuple):
    """Everything that training changes, at one moment."""

    level: float
    """log of the factor on the guess at which these weights were trained."""
    step: int
    weights: list[Tensor]
    buffers: list[Tensor]
    state: list[dict[str, Any]]
    """The optimizer's state of each parameter; empty before its first step."""


class Rewind:
    """The last few good moments of a run. Not saved with a checkpoint: a resumed run begins to remember anew."""

    def __init__(self) -> None:
        self._kept: list[Kept] = []

    def keep(self, level: float, step: int, optimizer: Optimizer, model: nn.Module | None) -> None:
        """Remember this moment."""
        parameters = [p for p, _ in grouped_parameters(optimizer)]
        state = [{name: _copy(value) for name, value in optimizer.state.get(p, {}).items()} for p in parameters]
        buffers = [_copy(b) for b in _buffers(model)]
        self._kept.append(Kept(level, step, [_copy(p) for p in parameters], buffers, state))
        if len(self._kept) > _MOST:
            del self._kept[self._most_crowded()]

    def only_last(self) -> None:
        """Forget all moments but the last."""
        self._kept = self._kept[-1:]

    def _most_crowded(self) -> int:
        """Neither first nor last, with the closest neighbours: what is kept stays spread over the levels."""
        levels = [kept.level for kept in self._kept]
        return min(range(1, len(levels) - 1), key=lambda i: abs(levels[i + 1] - levels[i - 1]))

    def forget_other_parameters(self, optimizer: Optimizer) -> None:
        """Layers may have been frozen or thawed since: those moments cannot be put back."""
        trained = len(grouped_parameters(optimizer))
        self._kept = [kept for kept in self._kept if len(kept.weights) == trained]

    def last_below(self, ceiling: float) -> Kept | None:
        """The last moment at or below a level; the lowest if none is; None if nothing is kept."""
        fitting = [kept for kept in self._kept if kept.level <= ceiling]
        return fitting[-1] if fitting else min(self._kept, key=lambda kept: kept.level, default=None)

    @torch.no_grad()
    def restore(self, kept: Kept, optimizer: Optimizer, model: nn.Module | None) -> None:
        """Put a moment back, in place."""
        parameters = [p for p, _ in grouped_parameters(optimizer)]
        for p, value, state in zip(parameters, kept.weights, kept.state, strict=True):
            p.copy_(value)
            _restore_state(optimizer, p, state)
        for b, value in zip(_buffers(model), kept.buffers, strict=True):
            b.copy_(value)

    def __len__(self) -> int:
        return len(self._kept)

    def __getstate__(self) -> dict[str, Any]:
        return {"_kept": []}


def _restore_state(optimizer: Optimizer, p: Tensor, state: dict[str, Any]) -> None:
    if not state:
        optimizer.state.pop(p, None)
        return
    now = optimizer.state[p]
    for name, value in state.items():
        if isinstance(value, Tensor) and isinstance(now.get(name), Tensor):
            now[name].copy_(value)
        else:
            now[name] = value
    for name in set(now) - set(state):
        del now[name]


def _buffers(model: nn.Module | None) -> Sequence[Tensor]:
    return list(model.buffers()) if model is not None else []


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
