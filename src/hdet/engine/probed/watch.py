"""Watching the optimizer: a probed run must know when a step comes, and see its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar
from weakref import finalize, ref

import torch
from torch.optim import Optimizer

from hdet.errors import ArgumentError

__all__ = ["Watch", "refuse_unheard"]

Owner = TypeVar("Owner")
Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]


class Watch:
    """Calls the owner before every step of an optimizer, and says where that does not work.

    Hooks are not copied with an optimizer, and do not run when a captured CUDA graph is replayed.
    """

    def __init__(self) -> None:
        self.captured = False
        """Whether a step was captured into a CUDA graph: from then on replays make steps that nobody hears of."""
        self.asleep = False
        """Whether steps are of no interest: the hook returns at once."""
        self._begun = False
        self._inside = False
        """Whether a step is being made. One that calls its base class's step calls hooks twice, and is one step."""

    def was_captured(self) -> None:
        """A step was captured into a graph, whether we heard of it or not."""
        self.captured = True

    @property
    def sees_steps(self) -> bool:
        """Whether every step is heard of."""
        return not self.captured and not self.asleep

    def begin(self, optimizer: Optimizer, owner: Owner, before_step: Callable[[Owner, Optimizer], None]) -> None:
        """Watch, if that has not begun. The hook holds the owner weakly, and goes when the owner does."""
        if self._begun:
            return
        self._begun = True
        held, watch = ref(owner), ref(self)

        def heard(opt: Optimizer) -> None:
            found, mine = held(), watch()
            if found is None or mine is None:
                return
            if _is_capturing(opt):  # nothing of ours may get into the graph
                mine.was_captured()
            else:
                before_step(found, opt)

        def hook(opt: Optimizer, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
            mine = watch()
            if mine is None or mine.asleep or mine._inside:
                return None
            mine._inside = True
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if closure is None:
                heard(opt)
                return None
            called = False

            def told() -> Any:  # gradients are there once the closure has been called
                nonlocal called
                loss = closure()
                if not called:
                    heard(opt)
                called = True
                return loss

            if "closure" in kwargs:
                return args, {**kwargs, "closure": told}
            return (args[0], told, *args[2:]), kwargs

        def made(*_: Any) -> None:
            mine = watch()
            if mine is not None:
                mine._inside = False

        uncompiled = torch.compiler.disable(hook)  # a compiled step would make graphs of what we do
        for handle in (optimizer.register_step_pre_hook(uncompiled), optimizer.register_step_post_hook(made)):
            finalize(owner, handle.remove)


def refuse_unheard(optimizer: Optimizer) -> None:
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
