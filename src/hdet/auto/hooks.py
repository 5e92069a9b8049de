"""The optimizer's step hook: a search must know when a step comes, and see its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar
from weakref import finalize, ref

import torch
from torch.optim import Optimizer

from hdet.errors import ArgumentError

__all__ = ["StepHook", "refuse_without_hooks"]

Owner = TypeVar("Owner")
Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]


class StepHook:
    """Calls its owner before every step of an optimizer, and knows where that does not work.

    Hooks are not copied with an optimizer, and do not run when a captured CUDA graph is replayed.
    """

    def __init__(self) -> None:
        self.captured = False
        """Whether a step was captured into a CUDA graph: replays make steps for which no hook is called."""
        self._begun = False
        self._inside = False
        """Whether a step is being made. One that calls its base class's step calls hooks twice, and is one step."""

    def step_is_over(self) -> None:
        """The scheduler is stepped. A step that has raised an error did not say that it was over."""
        self._inside = False

    def begin(self, optimizer: Optimizer, owner: Owner, before_step: Callable[[Owner, Optimizer], None]) -> None:
        """Set the hook, if that has not been done. It holds the owner weakly, and goes when the owner does."""
        if self._begun:
            return
        self._begun = True
        held, own = ref(owner), ref(self)

        def told(opt: Optimizer) -> None:
            found, mine = held(), own()
            if found is None or mine is None:
                return
            if _is_capturing(opt):  # nothing of ours may get into the graph
                mine.captured = True
            else:
                before_step(found, opt)

        def hook(opt: Optimizer, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
            mine = own()
            if mine is None or mine._inside:
                return None
            mine._inside = True
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if closure is None:
                told(opt)
                return None
            called = False

            def telling() -> Any:  # gradients are there once the closure has been called
                nonlocal called
                loss = closure()
                if not called:
                    told(opt)
                called = True
                return loss

            if "closure" in kwargs:
                return args, {**kwargs, "closure": telling}
            return (args[0], telling, *args[2:]), kwargs

        def made(*_: Any) -> None:
            mine = own()
            if mine is not None:
                mine._inside = False

        uncompiled = torch.compiler.disable(hook)  # a compiled step would make graphs of what we do
        for handle in (optimizer.register_step_pre_hook(uncompiled), optimizer.register_step_post_hook(made)):
            finalize(owner, handle.remove)


def refuse_without_hooks(optimizer: Optimizer) -> None:
    """Raise where no hook can be set: nobody would hear of a step, and no gradient would be seen."""
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        raise ArgumentError(
            f"a search looks at the gradients of every step, but {type(optimizer).__name__} cannot have step hooks as "
            "torch's optimizers do; if it wraps another optimizer, give the optimizer inside"
        ) from None


def _is_capturing(optimizer: Optimizer) -> bool:
    on_cuda = any(p.is_cuda for group in optimizer.param_groups for p in group["params"][:1])
    return on_cuda and torch.cuda.is_current_stream_capturing()
