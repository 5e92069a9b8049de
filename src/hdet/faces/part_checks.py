"""Whether a saved state fits the part it is meant for, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet.checks import alike, check_state
from hdet.errors import ArgumentError
from hdet.faces.foreign import what_it_is
from hdet.faces.optimizer_memory import check_memory

__all__ = ["check_fits"]

_SHOWN = 5


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
            f"the checkpoint's state of {name!r} has groups of {theirs} parameters, but here they are {mine}; build "
            "the optimizer as it was when it was saved"
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
