"""The optimizer's step hook: a search must know when a step comes, and see its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar
from weakref import finalize, ref

import torch
from torch.optim import Optimizer

from hdet.parameters import is_capturing

__all__ = ["StepHook"]

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
            if is_capturing(opt):  # nothing of ours may get into the graph
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
