"""Hooks: hdet hears of every step of an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import finalize, ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.errors import ArgumentError
from hdet.optimizer.groups import leading_part, parts_of

_Owner = TypeVar("_Owner")


def refuse_without_hooks(optimizer: Optimizer) -> None:
    """Raise if no hook can be set: without one hdet sees neither steps nor gradients."""
    for part in parts_of(optimizer):
        try:
            part.register_step_pre_hook(lambda *_: None).remove()
        except AttributeError:
            raise ArgumentError(
                f"hdet must hear of every step, but {type(part).__name__} cannot have step hooks as torch's "
                "optimizers do; if it wraps another optimizer, give the optimizer inside"
            ) from None


def hook_steps(optimizer: Optimizer, owner: _Owner, before: Callable[..., Any], after: Callable[..., None]) -> None:
    """Call methods of an owner before and after every step of an optimizer, with what torch gives to hooks.

    Of several optimizers seen as one, it is the part that is stepped first in a step. The hooks hold both objects
    weakly, and go when the owner does.

    Args:
        optimizer: whose steps are of interest.
        owner: the first argument of both methods.
        before: what it returns replaces the step's arguments, unless it is None.
        after: is not called after a step that has raised.
    """
    held, whole = ref(owner), ref(optimizer)

    def hook_of(method: Callable[..., Any]) -> Callable[..., Any]:
        def hook(stepped: Optimizer, *step: Any) -> Any:
            found, seen = held(), whole()
            if found is None or seen is None:
                return None
            leads = seen is stepped or leading_part(seen) is stepped
            return method(found, seen, *step) if leads else None

        disabled: Callable[..., Any] = torch.compiler.disable(hook)  # a compiled step would make graphs of what we do
        return disabled

    for part in parts_of(optimizer):
        finalize(owner, part.register_step_pre_hook(hook_of(before)).remove)
        finalize(owner, part.register_step_post_hook(hook_of(after)).remove)


def once_gradients_are_there(
    args: tuple[Any, ...], kwargs: dict[str, Any], tell: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """For a hook before an optimizer's step: call ``tell`` now or, if the step has a closure, once it has been called.

    Args:
        args, kwargs: of the step.
        tell: what is to be called, once.

    Returns:
        what the hook must return: arguments with another closure, or None.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        tell()
        return None
    was_called = False

    def telling() -> Any:
        nonlocal was_called
        loss = closure()
        if not was_called:
            tell()
        was_called = True
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": telling}
    return (args[0], telling, *args[2:]), kwargs


def is_capturing(optimizer: Optimizer) -> bool:
    """Whether its step is being captured into a CUDA graph."""
    on_cuda = any(p.is_cuda for group in optimizer.param_groups for p in group["params"][:1])
    return on_cuda and torch.cuda.is_current_stream_capturing()


def stands_still(optimizer: Optimizer) -> bool:
    """Whether all rates are 0, so that a step does not count. Rates on a device are not read.

    To know an optimizer's state, torch.distributed.checkpoint makes such a step before it loads the weights.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    return all((not isinstance(rate, Tensor) or rate.is_cpu) and rate == 0 for rate in rates)
