"""Several optimizers seen as one, such as Muon for matrices and AdamW for the rest: one search for their rates."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import items_of, must_be
from hdet.errors import ArgumentError
from hdet.optimizer import hook_steps, stands_still, unwrapped


def as_one(optimizers: Any) -> Optimizer:
    """An optimizer of torch without its wrapper, or several of them seen as one."""
    inner = unwrapped(optimizers)
    if isinstance(inner, Optimizer):
        return inner
    found = [unwrapped(one) for one in items_of(inner) or ()]
    fits = found and all(isinstance(one, Optimizer) for one in found)
    rule, cure = "an optimizer of torch or some of them", "for instance hdet.auto([muon, adamw], ...)"
    must_be(rule, fits, cure, optimizers=optimizers)
    return found[0] if len(found) == 1 else CombinedOptimizer(found)


class CombinedOptimizer(Optimizer):
    """Several optimizers seen as one: their groups and their states. It is never stepped; its parts are stepped.

    Whoever hooks its steps is called before and after that of the part which makes its step first, whichever that is:
    no weight has moved yet, and all gradients are there. The step is over when the scheduler is stepped, or when a part
    is stepped again.
    """

    def __init__(self, parts: list[Optimizer]) -> None:
        every = [p for part in parts for group in part.param_groups for p in group["params"]]
        doubled = len(every) - len(set(every))
        if doubled:
            raise ArgumentError(
                f"each parameter must be in one optimizer only, and once, but {doubled} are there twice; remove them "
                "from one place"
            )
        self.parts = parts
        self.defaults = {}
        self.state = _States(parts)  # type: ignore[assignment]  # a view of the parts' own
        self.leading: Optimizer | None = None
        """The part that was stepped first in this step; None between steps."""
        self._stepped: set[int] = set()
        """Ids of the parts that have made this step."""
        for part in parts:  # before all other hooks, which ask which part leads
            hook_steps(part, self, CombinedOptimizer.before_part, CombinedOptimizer.after_part)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # those of the parts, as they are now
        """The groups of all parts, in order."""
        return [group for part in self.parts for group in part.param_groups]

    def before_part(self, part: Optimizer, *_: Any) -> None:
        """A part is about to make its step, which does not count if all its rates are 0."""
        if not stands_still(part):
            if id(part) in self._stepped:
                self.step_is_over()
            self.leading = self.leading or part

    def after_part(self, part: Optimizer, *_: Any) -> None:
        """A part has made its step."""
        self._stepped.add(id(part))

    def step_is_over(self) -> None:
        """The part that is stepped next is the first one of another step."""
        self.leading = None
        self._stepped.clear()

    def _refused(self, *_: Any, **__: Any) -> Any:
        """Refused: parameter groups, states and steps belong to the parts."""
        raise ArgumentError(
            "hdet.auto looks at several optimizers, and is none of them: step each one yourself, reset the "
            "gradients of each, save and load the state_dict() of each, and add a parameter group to one of them"
        )

    step = zero_grad = state_dict = load_state_dict = add_param_group = _refused

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: the parts, from which everything else is made."""
        return {"parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["parts"])  # type: ignore[misc]


class _States:
    """The states of all parts, by parameter, as far as snapshots of them need it."""

    def __init__(self, parts: list[Optimizer]) -> None:
        self._parts = parts
        self._owners: dict[int, Optimizer] = {}

    def _of(self, p: Tensor) -> Any:
        """All states of the optimizer that has the parameter."""
        if id(p) not in self._owners:  # the first time, or a group was added since
            every = [(part, q) for part in self._parts for group in part.param_groups for q in group["params"]]
            self._owners = {id(q): part for part, q in every}
        return self._owners[id(p)].state

    def __getitem__(self, p: Tensor) -> Any:
        return self._of(p)[p]

    def get(self, p: Tensor, default: Any = None) -> Any:
        """Unlike ``[p]``, which makes an empty state as torch's does."""
        return self._of(p).get(p, default)

    def pop(self, p: Tensor, default: Any = None) -> Any:
        """Remove the state of a parameter."""
        return self._of(p).pop(p, default)
