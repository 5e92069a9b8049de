"""Parts of a checkpoint: whether a state fits the object that is to load it, and the memory of optimizers."""

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
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet.checks import alike, check_state, shown
from hdet.errors import ArgumentError
from hdet.schedulers.loading import what_it_is

_SHOWN = 5
_LONGEST, _LARGEST = 131, 131 * 131
"""Of a small parameter: a dimension, and all numbers. Below 128 some optimizers remember something else; and a prime is
not by chance the size of another thing."""
_OF_DEVICES = {"fused": None, "foreach": None, "capturable": False}
"""Options that change how a step is made but not what is remembered, as they are where no device is needed."""
Kind = tuple[int, tuple[int, ...], torch.dtype]
"""The group, the small shape and the type of a parameter: on these it depends what is remembered."""
Memory = Mapping[str, Any]


def check_fits(name: str, part: Any, state: Any) -> None:
    """Raise if a state is not one of this part. Of parts that are neither torch's nor hdet's nothing is known."""
    if isinstance(part, nn.Module):
        _check_module(name, part, state)
    elif isinstance(part, Optimizer):
        _check_optimizer(name, part, state)
    elif callable(check := getattr(part, "check_state_dict", None)):
        check(state)
    elif isinstance(part, LRScheduler):
        _check_scheduler(name, part, state)
    elif isinstance(part, GradScaler):
        numbers = {key: alike(value) for key, value in part.state_dict().items()}
        check_state(_mapping(name, part, state), numbers, f"the checkpoint's state of {name!r}, a GradScaler,")


def _mapping(name: str, part: Any, state: Any) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise ArgumentError(
            f"the checkpoint's state of {name!r} is {what_it_is(state)}, but here it is a {type(part).__name__}; check "
            "the names of the parts"
        )
    return state


def _check_module(name: str, model: nn.Module, state: Any) -> None:
    if any(layer._load_state_dict_pre_hooks for layer in model.modules()):
        return  # they may rename what is in the state
    mine, theirs = _outline(model.state_dict()), _outline(state)
    differing = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
    if differing:
        words = [f"{key}: {theirs.get(key, 'nothing')}, here {mine.get(key, 'nothing')}" for key in differing[:_SHOWN]]
        more = f", and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise ArgumentError(
            f"the checkpoint's state of {name!r} belongs to another model: it has {'; '.join(words)}{more}; build the "
            "model as it was when it was saved"
        )


def _outline(state: Any) -> dict[str, str]:
    """The tensors of a model's state in words; other entries count by their names."""
    rows = state.items() if isinstance(state, Mapping) else ()
    return {str(key): f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else "a value" for key, value in rows}


def _check_optimizer(name: str, optimizer: Optimizer, state: Any) -> None:
    has_hooks = bool(getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", ()))
    if has_hooks or type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return  # it may look like anything
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if (
        not isinstance(groups, list)
        or not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)
        or not isinstance(state.get("state"), Mapping)
    ):
        raise ArgumentError(f"the checkpoint's state of {name!r} is none of an optimizer; check the names of the parts")
    mine = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in groups]
    if mine != theirs:
        raise ArgumentError(
            f"the checkpoint's state of {name!r} has groups of {shown(theirs)} parameters, but here they are "
            f"{shown(mine)}; build the optimizer as it was when it was saved"
        )
    check_memory(name, optimizer, state)


def _check_scheduler(name: str, scheduler: LRScheduler, state: Any) -> None:
    """torch takes any dict for a scheduler's state; but there may be schedulers of hdet inside."""
    own, theirs = getattr(scheduler, "_schedulers", ()), _mapping(name, scheduler, state).get("_schedulers", ())
    if not isinstance(theirs, (list, tuple)) or len(theirs) != len(own):
        has = f"{len(theirs)} schedulers" if isinstance(theirs, (list, tuple)) else "no schedulers"
        raise ArgumentError(
            f"the checkpoint's state of {name!r} has {has} inside, but here there are {len(own)}; build it as it was "
            "when it was saved"
        )
    for number, (one, inside) in enumerate(zip(own, theirs, strict=True)):
        check_fits(f"{name}[{number}]", one, inside)


def check_memory(name: str, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raise if a state lacks what a step of this optimizer needs. Its groups have the right sizes.

    It is compared with another optimizer, of the same class and arguments: with its groups, and with what it remembers
    after a step. More may be in it, which other steps add. Where no other can be built, or none can be stepped, that is
    left out: it needs further arguments, a closure, a device or sparse gradients.
    """
    with _aside():
        try:
            stand_in, small = _stand_in(optimizer)
        except Exception:
            return
        steps = _can_step(optimizer)
        try:
            _adopt(stand_in, state["param_groups"])
            lost = sorted(o for o in optimizer.defaults if any(o not in group for group in stand_in.param_groups))
            if steps and not lost:
                stand_in.step()
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
            fault = _fault(stand_in.state.get(small[kind], {}), memory, kind, p)
            if fault is not None:
                raise _refusal(name, optimizer, f"of its parameter {place} {fault}")


def _can_step(optimizer: Optimizer) -> bool:
    """Whether another one, as it is here, can."""
    try:
        _stand_in(optimizer)[0].step()
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
        return f"it remembers no {lost}, only {shown(sorted(map(str, found)))}"
    wrong = [str(key) for key, value in expected.items() if key in found and not _alike(value, found[key], kind, p)]
    return f"it remembers other {wrong} than belong to the shape {tuple(p.shape)}" if wrong else None


def _alike(expected: Any, found: Any, kind: Kind, p: Tensor) -> bool:
    if not isinstance(expected, Tensor):
        return True
    if expected.dim() == 0:
        return isinstance(found, Real) or (isinstance(found, Tensor) and found.numel() == 1)
    one_for_all = isinstance(found, Tensor) and found.dim() == 0  # Prodigy, of a parameter that began as zeros
    return one_for_all or (isinstance(found, Tensor) and (tuple(expected.shape) != kind[1] or found.shape == p.shape))


def _stand_in(optimizer: Optimizer) -> tuple[Optimizer, dict[Kind, Tensor]]:
    """An optimizer of the same class and arguments, with one small parameter of each kind, on the CPU."""
    small = {kind: _small(kind) for kind, _ in _parameters(optimizer)}
    groups = [
        {**_options(group), "params": [p for kind, p in small.items() if kind[0] == number]}
        for number, group in enumerate(optimizer.param_groups)
    ]
    known = inspect.signature(type(optimizer)).parameters
    arguments = {name: value for name, value in _options(optimizer.defaults).items() if name in known}
    return type(optimizer)(groups, **arguments), small


def _adopt(stand_in: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Take the options of saved groups, as the optimizer itself would."""
    own = stand_in.state_dict()["param_groups"]
    rows = [{**_options(group), "params": mine["params"]} for group, mine in zip(groups, own, strict=True)]
    stand_in.load_state_dict({"state": {}, "param_groups": rows})


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
