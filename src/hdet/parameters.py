"""An optimizer and its parameters: which of them train, where they stand, and what becomes of the loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.checks import shown
from hdet.errors import ArgumentError

__all__ = [
    "check_model",
    "check_optimizer",
    "direction",
    "grouped_parameters",
    "parameters_at",
    "parts_of",
    "places_of",
    "refuse_other_shapes",
    "trained_parameters",
    "unwrapped",
]


def check_model(model: object, *, needed: bool = False) -> None:
    """Raise for what cannot be ``model=``."""
    if not isinstance(model, nn.Module) and (needed or model is not None):
        kinds = "an nn.Module" if needed else "an nn.Module or None"
        raise ArgumentError(f"model must be {kinds}, but got model={shown(model)}; pass the model itself")


def unwrapped(optimizer: Any) -> Any:
    """The optimizer of torch in a wrapper, which holds it as ``.optimizer`` as Accelerate's does, or in several.

    A wrapper need not call step hooks. What holds no optimizer is given back as it is.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def check_optimizer(optimizer: object) -> None:
    """Raise for what cannot be ``optimizer=``."""
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"optimizer must be a torch optimizer, but got optimizer={shown(optimizer)}; for instance torch.optim.Adam"
        )


def parts_of(optimizer: Optimizer) -> list[Any]:
    """The optimizers that are seen as one by ``hdet.auto``; else the optimizer itself."""
    return list(getattr(optimizer, "parts", [optimizer]))


def grouped_parameters(optimizer: Optimizer) -> list[tuple[Tensor, int]]:
    """The optimizer's parameters that train, each once, with the number of its group."""
    found: dict[int, tuple[Tensor, int]] = {}
    for g, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p.requires_grad and (p.is_floating_point() or p.is_complex()):
                found.setdefault(id(p), (p, g))
    return list(found.values())


def trained_parameters(optimizer: Optimizer) -> list[Tensor]:
    """The parameters alone, in the same order."""
    return [p for p, _ in grouped_parameters(optimizer)]


def direction(groups: Iterable[Mapping[str, Any]]) -> float:
    """What an optimizer does with the loss: 1: minimise it, -1: maximise it, 0: each in some parameter groups."""
    signs = {-1.0 if group.get("maximize", False) else 1.0 for group in groups if group["params"]}
    return signs.pop() if len(signs) == 1 else 0.0


# By their place among all of the optimizer's: ids do not outlive a process.


def places_of(ids: Sequence[int], optimizer: Optimizer) -> list[int] | None:
    """Where parameters stand among all of the optimizer's; None if some are gone."""
    places = {id(p): place for place, p in enumerate(_all(optimizer))}
    found = [places.get(one) for one in ids]
    return None if None in found else found  # type: ignore[return-value]


def parameters_at(places: Sequence[int], optimizer: Optimizer) -> list[Tensor]:
    """The parameters that stand there."""
    every = _all(optimizer)
    return [every[place] for place in places]


def refuse_other_shapes(parameters: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    """Raise ValueError unless saved tensors have the shapes of their parameters."""
    shapes = [[tuple(t.shape) for t in tensors] for tensors in (parameters, saved)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"it holds tensors of shapes {shapes[1]} for parameters of shapes {shapes[0]}")


def _all(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
