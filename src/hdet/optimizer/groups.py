"""Optimizers: the one of torch in a wrapper, its parameter groups, and its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.checks import must_be

_Value = TypeVar("_Value")


def unwrapped(optimizer: Any) -> Any:
    """The optimizer of torch in a wrapper, which holds it as ``.optimizer``, or in several.

    A wrapper need not call step hooks. Anything without an optimizer inside is returned as it is.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def check_optimizer(optimizer: object) -> None:
    """Raise unless ``optimizer`` is an optimizer of torch."""
    must_be("a torch optimizer", isinstance(optimizer, Optimizer), "for instance torch.optim.Adam", optimizer=optimizer)


def check_model(model: object, *, needed: bool = False) -> None:
    """Raise unless ``model`` is a module, or None if that is allowed."""
    fits = isinstance(model, nn.Module) or (model is None and not needed)
    must_be("an nn.Module" if needed else "an nn.Module or None", fits, "pass the model itself", model=model)


def parts_of(optimizer: Optimizer) -> list[Any]:
    """The optimizers that are seen as one by ``hdet.auto``; else the optimizer itself."""
    return list(getattr(optimizer, "parts", [optimizer]))


def leading_part(optimizer: Optimizer) -> Optimizer:
    """The one of several optimizers that is stepped first in the step to come; else the optimizer itself."""
    leading: Optimizer | None = getattr(optimizer, "leading", None)
    return leading or optimizer


def end_step(optimizer: Optimizer) -> None:
    """Tell several optimizers seen as one that the scheduler was stepped: the next step begins."""
    over = getattr(optimizer, "step_is_over", None)
    if over is not None:
        over()


def group_counts(optimizer: Optimizer) -> list[int]:
    """The number of parameter groups of each of the optimizers that are seen as one."""
    return [len(part.param_groups) for part in parts_of(optimizer)]


def rate_names(optimizer: Optimizer) -> list[str]:
    """The names of the learning rates of all parameter groups. They do not change when a group is added.

    ``lr[2]`` is that of the third group; ``lr[0.2]`` the same of the first of several optimizers.
    """
    counts = group_counts(optimizer)
    if len(counts) == 1:
        return [f"lr[{g}]" for g in range(counts[0])]
    return [f"lr[{part}.{g}]" for part, count in enumerate(counts) for g in range(count)]


def added_groups(optimizer: Optimizer, counts: Sequence[int]) -> list[int]:
    """The numbers, among all groups, of those that were added since there were ``counts`` of them.

    A group is known by its optimizer and by its place in it: one that is added to the first of two optimizers stands
    before all groups of the second.
    """
    rows = [g >= known for now, known in zip(group_counts(optimizer), counts, strict=True) for g in range(now)]
    return [g for g, is_new in enumerate(rows) if is_new]


def with_added(values: Sequence[_Value], added: Mapping[int, _Value]) -> list[_Value]:
    """One value per group, together with those of groups that were added, by their numbers.

    >>> with_added(["a", "b"], {1: "new"})
    ['a', 'new', 'b']
    """
    known = iter(values)
    return [added[g] if g in added else next(known) for g in range(len(values) + len(added))]


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


# In checkpoints parameters are known by their places in the optimizer: ids do not outlive a process.


def places_of(ids: Sequence[int], optimizer: Optimizer) -> list[int] | None:
    """Where parameters stand among all of the optimizer's; None if some are gone."""
    places = {id(p): place for place, p in enumerate(_all(optimizer))}
    found = [places.get(one) for one in ids]
    return None if None in found else found  # type: ignore[return-value]


def parameters_at(places: Sequence[int], optimizer: Optimizer) -> list[Tensor]:
    """The parameters at these places."""
    every = _all(optimizer)
    return [every[place] for place in places]


def _all(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
