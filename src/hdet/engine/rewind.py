"""Going back: copies of weights, buffers and optimizer state in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.engine.snapshots import kept as as_before
from hdet.engine.snapshots import write_
from hdet.engine.weights import trained_parameters

__all__ = ["Kept", "Rewind"]

_MOST = 4


class Kept(NamedTuple):
    """Everything that training changes, at one moment."""

    level: float
    """log of the factor on the guess at which these weights were trained."""
    step: int
    parameters: list[int]
    """Their ids: layers may be frozen and thawed."""
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
        parameters = trained_parameters(optimizer)
        state = [{name: _copy(value) for name, value in optimizer.state.get(p, {}).items()} for p in parameters]
        buffers = [_copy(b) for b in _buffers(model)]
        ids = [id(p) for p in parameters]
        self.add(Kept(level, step, ids, [_copy(p) for p in parameters], buffers, state))

    def add(self, kept: Kept) -> None:
        """One more moment; where there are too many, the one with the closest neighbours goes."""
        if len(self._kept) >= _MOST:
            del self._kept[self._most_crowded()]
        self._kept.append(kept)

    def only(self, kept: Kept) -> None:
        """Forget all other moments."""
        self._kept = [kept]

    def only_ends(self) -> None:
        """Forget all but the first and the last moment."""
        self._kept = [*self._kept[:1], *self._kept[1:][-1:]]

    @property
    def proven(self) -> Kept | None:
        """The last moment after which training went well for another round: the very last may be doomed already."""
        return self._kept[-2:][0] if self._kept else None

    def used(self, kept: Kept) -> None:
        """Training went back to this moment: if that was not far enough, it is an earlier one's turn."""
        earlier = self._kept[: [id(other) for other in self._kept].index(id(kept))]
        self._kept = earlier or [kept]

    def _most_crowded(self) -> int:
        """Neither first nor last, with the closest neighbours: what is kept stays spread over the levels."""
        levels = [kept.level for kept in self._kept]
        return min(range(1, len(levels) - 1), key=lambda i: abs(levels[i + 1] - levels[i - 1]))

    def forget_other_parameters(self, optimizer: Optimizer) -> None:
        """Layers may have been frozen or thawed since: those moments cannot be put back."""
        trained = [id(p) for p in trained_parameters(optimizer)]
        self._kept = [kept for kept in self._kept if kept.parameters == trained]

    def last_below(self, ceiling: float) -> Kept | None:
        """The last moment at or below a level; the lowest if none is; None if nothing is kept."""
        fitting = [kept for kept in self._kept if kept.level <= ceiling]
        return fitting[-1] if fitting else min(self._kept, key=lambda kept: kept.level, default=None)

    @contextmanager
    def shown(self, kept: Kept, optimizer: Optimizer, model: nn.Module | None) -> Iterator[None]:
        """Inside, weights and buffers are as at that moment."""
        tensors = [*trained_parameters(optimizer), *_buffers(model)]
        with as_before(tensors):
            write_(tensors, [*kept.weights, *kept.buffers])
            yield

    @torch.no_grad()
    def restore(self, kept: Kept, optimizer: Optimizer, model: nn.Module | None) -> None:
        """Put a moment back, in place."""
        parameters = trained_parameters(optimizer)
        for p, value, state in zip(parameters, kept.weights, kept.state, strict=True):
            p.copy_(value)
            _restore_state(optimizer, p, state)
        for b, value in zip(_buffers(model), kept.buffers, strict=True):
            b.copy_(value)

    def __len__(self) -> int:
        return len(self._kept)


def _restore_state(optimizer: Optimizer, p: Tensor, state: dict[str, Any]) -> None:
    if not state:
        optimizer.state.pop(p, None)
        return
    now = optimizer.state[p]
    for name, value in state.items():
        if isinstance(value, Tensor) and isinstance(now.get(name), Tensor):
            now[name].copy_(value)
        else:
            now[name] = _copy(value, p.device)
    for name in set(now) - set(state):
        del now[name]


def _buffers(model: nn.Module | None) -> Sequence[Tensor]:
    return list(model.buffers()) if model is not None else []


def _copy(value: Any, device: torch.device | str = "cpu") -> Any:
    """A copy with tensors on ``device``, also of lists and dicts, as some optimizers keep them."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {key: _copy(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item, device) for item in value)
    return value
