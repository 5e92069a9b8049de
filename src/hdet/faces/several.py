"""``hdet.auto``: one search for several optimizers, such as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hdet.checks import shown
from hdet.engine.probe import ProbeFn
from hdet.errors import ArgumentError
from hdet.faces.onecycle import OneCycleLR
from hdet.parameters import unwrapped
from hdet.rates import stands_still

__all__ = ["auto"]

Hook = Callable[..., Any]


def auto(optimizers: Optimizer | Iterable[Optimizer], *, total_steps: int, probe: ProbeFn, **more: Any) -> OneCycleLR:
    """The scheduler that finds the learning rate of one optimizer, or one common factor on the rates of several.

    Each optimizer's own rate is its guess: the guesses keep their ratios. Step all optimizers, then the scheduler:

    .. code-block:: python

        scheduler = hdet.auto([muon, adamw], total_steps=10_000, probe=probe)
        ...
        muon.step()
        adamw.step()
        scheduler.step()

    All gradients are looked at when the first of them is stepped: with a GradScaler, call ``scaler.unscale_`` on every
    optimizer before the first ``scaler.step``.

    Args:
        optimizers: one, or several with different parameters; the first is the one to be stepped first.
        total_steps: steps of the run.
        probe: as in :class:`hdet.OneCycleLR`.
        more: further arguments of it. Momenta are not cycled: optimizers keep theirs in different places.
    """
    optimizers = unwrapped(optimizers)
    if isinstance(optimizers, Optimizer):
        return OneCycleLR(optimizers, "auto", total_steps=total_steps, probe=probe, **{"cycle_momentum": False, **more})
    is_one = not isinstance(optimizers, Iterable) or isinstance(optimizers, Tensor)
    found: list[Any] = [optimizers] if is_one else [unwrapped(one) for one in optimizers]
    if not found or not all(isinstance(one, Optimizer) for one in found):
        raise ArgumentError(
            f"optimizers must be an optimizer of torch or some of them, but got optimizers={shown(optimizers)}; for "
            "instance hdet.auto([muon, adamw], ...)"
        )
    if len(found) == 1:
        return auto(found[0], total_steps=total_steps, probe=probe, **more)
    if more.get("cycle_momentum"):
        raise ArgumentError(
            "cycle_momentum must be False for several optimizers, which keep their momenta in different places, but "
            "got cycle_momentum=True; leave it out"
        )
    together = Together(found)
    return OneCycleLR(together, "auto", total_steps=total_steps, probe=probe, **{**more, "cycle_momentum": False})


class Together(Optimizer):
    """Several optimizers seen as one: their groups and their memory. Nobody steps it; its parts are stepped.

    A step is heard of before the first of them makes its own: no weight has moved yet, and all gradients are there.
    """

    def __init__(self, parts: list[Optimizer]) -> None:
        owners = [(id(p), part) for part in parts for group in part.param_groups for p in group["params"]]
        if len(dict(owners)) < len(owners):
            raise ArgumentError(
                f"each parameter must be in one optimizer only, and once, but {len(owners) - len(dict(owners))} stand "
                "twice; take them out of one place"
            )
        self.parts = parts
        self.defaults = {}
        self.state = _States(parts, dict(owners))  # type: ignore[assignment]  # a view of the parts' own
        self.register_step_pre_hook(_stepped)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # those of the parts, as they are now
        """All groups of all parts."""
        return [group for part in self.parts for group in part.param_groups]

    def register_step_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Called before the step of the first part that moves at all, as if it were ours."""

        def heard(part: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return None if stands_still(part) else hook(self, args, kwargs)

        return self._first.register_step_pre_hook(heard)

    def register_step_post_hook(self, hook: Hook) -> RemovableHandle:
        """Called after that step."""
        return self._first.register_step_post_hook(lambda _, args, kwargs: hook(self, args, kwargs))

    @property
    def _first(self) -> Optimizer:
        return next((part for part in self.parts if not stands_still(part)), self.parts[0])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not to be called: groups belong to a part."""
        raise ArgumentError("hdet.auto looks at several optimizers: add the parameter group to one of them")

    def state_dict(self) -> dict[str, Any]:
        """Not to be called: each part has its own."""
        raise ArgumentError("hdet.auto looks at several optimizers: save the state_dict() of each of them")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not to be called: each part loads its own."""
        raise ArgumentError("hdet.auto looks at several optimizers: call load_state_dict() of each of them")

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: the parts, from which all the rest is made."""
        return {"parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["parts"])  # type: ignore[misc]

    def step(self, closure: Any = None) -> Any:
        """Not to be called: step each optimizer, as you would without hdet."""
        raise RuntimeError("hdet.auto looks at several optimizers and steps none of them: step each one yourself")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of all parts."""
        for part in self.parts:
            part.zero_grad(set_to_none)


def _stepped(together: Together, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Where torch's schedulers look whether the optimizer was stepped."""
    together._opt_called = True  # type: ignore[attr-defined]


class _States(MutableMapping[Tensor, Any]):
    """The memory of all parts, by parameter."""

    def __init__(self, parts: list[Optimizer], owners: dict[int, Optimizer]) -> None:
        self._parts, self._owners = parts, owners

    def __getitem__(self, p: Tensor) -> Any:
        return self._of(p).state[p]

    def __setitem__(self, p: Tensor, value: Any) -> None:
        self._of(p).state[p] = value

    def __delitem__(self, p: Tensor) -> None:
        del self._of(p).state[p]

    def __contains__(self, p: object) -> bool:
        owner = self._find(p) if isinstance(p, Tensor) else None
        return owner is not None and p in owner.state

    def get(self, p: Tensor, default: Any = None) -> Any:
        """Unlike ``[p]``, which makes an empty memory as torch's does."""
        owner = self._find(p)
        return owner.state.get(p, default) if owner is not None else default

    def __iter__(self) -> Iterator[Tensor]:
        return (p for part in self._parts for p in part.state)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)

    def _of(self, p: Tensor) -> Optimizer:
        owner = self._find(p)
        if owner is None:
            raise KeyError(p)
        return owner

    def _find(self, p: Tensor) -> Optimizer | None:
        if id(p) not in self._owners:  # perhaps a group was added since
            every = [(part, q) for part in self._parts for group in part.param_groups for q in group["params"]]
            self._owners |= {id(q): part for part, q in every}
        return self._owners.get(id(p))
