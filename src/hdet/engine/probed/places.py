"""Parameters by their place in the optimizer: ids do not outlive a process."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["parameters_at", "places_of", "refuse_other_shapes"]


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
