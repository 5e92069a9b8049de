"""What an optimizer remembers, seen on another one of its class: nothing of the user's is touched."""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.checks import shown
from hdet.errors import ArgumentError

__all__ = ["check_memory"]

_LONGEST, _LARGEST = 131, 131 * 131
"""Of a small parameter: a dimension, and all numbers. Below 128 some optimizers remember something else; and a prime is
not by chance the size of another thing."""
_OF_DEVICES = {"fused": None, "foreach": None, "capturable": False}
"""Options that change how a step is made but not what is remembered, as they are where no device is needed."""

Kind = tuple[int, tuple[int, ...], torch.dtype]
"""The group, the small shape and the type of a parameter: on these it depends what is remembered."""
Memory = Mapping[str, Any]


def check_memory(name: str, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raise if a state lacks what a step of this optimizer needs. Its groups have the right sizes.

    It is compared with another optimizer, of the same class and arguments: with its groups, and with what it remembers
    after a step. More may be in it, which other steps add. Where no other can be built, or none can be stepped, that is
    left out: it needs further arguments, a closure, a device or sparse gradients.
    """
    with _aside():
        try:
            twin = _Twin(optimizer)
        except Exception:
            return
        steps = _can_step(optimizer)
        try:
            twin.adopt(state["param_groups"])
            lost = sorted(name for name in optimizer.defaults if not twin.has_option(name))
            expected = twin.step() if steps and not lost else {}
        except Exception as error:
            raise _refusal(name, optimizer, f"no step could follow it ({type(error).__name__}: {error})") from error
    if lost:
        raise _refusal(name, optimizer, f"its groups have no {lost}")
    places = [place for group in state["param_groups"] for place in group["params"]]
    parameters = dict(zip(places, _parameters(optimizer), strict=True))
    strange = [place for place in state["state"] if isinstance(place, int) and place not in parameters]
    if strange or len(parameters) < len(places):
        raise _refusal(
            name, optimizer, f"its groups have the parameters {shown(places)}, and it remembers also {shown(strange)}"
        )
    for place, memory in state["state"].items():
        if place in parameters:
            kind, p = parameters[place]
            fault = _fault(expected.get(kind, {}), memory, kind, p)
            if fault is not None:
                raise _refusal(name, optimizer, f"of its parameter {place} {fault}")


def _can_step(optimizer: Optimizer) -> bool:
    """Whether another one, as it is here, can."""
    try:
        _Twin(optimizer).step()
    except Exception:
        return False
    return True


def _refusal(name: str, optimizer: Optimizer, fault: str) -> ArgumentError:
    kind = type(optimizer).__name__
    return ArgumentError(
        f"the checkpoint's state of {name!r} does not fit a {kind}, which it is here: {fault}; build the optimizer as "
        "it was when it was saved"
    )


def _fault(expected: Memory, found: Any, kind: Kind, p: Tensor) -> str | None:
    """What is wrong with the memory of a parameter, in words."""
    if not isinstance(found, Mapping):
        return f"it remembers {type(found).__name__} and no dict"
    lost = sorted(str(key) for key, value in expected.items() if value is not None and key not in found)
    if lost:
        return f"it remembers no {lost}, only {sorted(map(str, found))}"
    wrong = [str(key) for key, value in expected.items() if key in found and not _alike(value, found[key], kind, p)]
    return f"it remembers other {wrong} than belong to the shape {tuple(p.shape)}" if wrong else None


def _alike(expected: Any, found: Any, kind: Kind, p: Tensor) -> bool:
    if not isinstance(expected, Tensor):
        return True
    if expected.dim() == 0:
        return isinstance(found, Real) or (isinstance(found, Tensor) and found.numel() == 1)
    one_for_all = isinstance(found, Tensor) and found.dim() == 0  # Prodigy, of a parameter that began as zeros
    return one_for_all or (isinstance(found, Tensor) and (tuple(expected.shape) != kind[1] or found.shape == p.shape))


class _Twin:
    """An optimizer of the same class and arguments, with one small parameter of each kind, on the CPU."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._small = {kind: _small(kind) for kind, _ in _parameters(optimizer)}
        groups = [
            {**_options(group), "params": [p for kind, p in self._small.items() if kind[0] == number]}
            for number, group in enumerate(optimizer.param_groups)
        ]
        known = inspect.signature(type(optimizer)).parameters
        arguments = {name: value for name, value in _options(optimizer.defaults).items() if name in known}
        self.optimizer = type(optimizer)(groups, **arguments)

    def adopt(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take the options of saved groups, as the optimizer itself would."""
        own = self.optimizer.state_dict()["param_groups"]
        rows = [{**_options(group), "params": mine["params"]} for group, mine in zip(groups, own, strict=True)]
        self.optimizer.load_state_dict({"state": {}, "param_groups": rows})

    def has_option(self, name: str) -> bool:
        """Whether all groups have it."""
        return all(name in group for group in self.optimizer.param_groups)

    def step(self) -> dict[Kind, Memory]:
        """What is remembered after a step, by kinds."""
        self.optimizer.step()
        return {kind: dict(self.optimizer.state.get(p, {})) for kind, p in self._small.items()}


def _parameters(optimizer: Optimizer) -> list[tuple[Kind, Tensor]]:
    return [(_kind(number, p), p) for number, group in enumerate(optimizer.param_groups) for p in group["params"]]


def _kind(group: int, p: Tensor) -> Kind:
    shape = [min(size, _LONGEST) for size in p.shape]
    while torch.Size(shape).numel() > _LARGEST:
        largest = shape.index(max(shape))
        shape[largest] = (shape[largest] + 1) // 2
    return group, tuple(shape), p.dtype


def _small(kind: Kind) -> Tensor:
    _, shape, dtype = kind
    trains = dtype.is_floating_point or dtype.is_complex
    p = nn.Parameter(torch.ones(shape, dtype=dtype, device="cpu"), requires_grad=trains)
    p.grad = torch.ones_like(p) if trains else None
    return p


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of a group or of all, without what belongs to the parameters themselves."""
    options = {key: copy.deepcopy(value) for key, value in given.items() if key not in ("params", "param_names")}
    return options | {key: off for key, off in _OF_DEVICES.items() if options.get(key)}


@contextmanager
def _aside() -> Iterator[None]:
    """Inside, random numbers are drawn from a copy of the generator, and neither hooks nor warnings tell of steps."""
    module = sys.modules[Optimizer.__module__]
    hooks = [getattr(module, f"_global_optimizer_{when}_hooks", {}) for when in ("pre", "post")]
    kept = [dict(of_all) for of_all in hooks]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for of_all in hooks:
                of_all.clear()
            yield
        finally:
            for of_all, own in zip(hooks, kept, strict=True):
                of_all.update(own)
