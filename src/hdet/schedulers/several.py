"""``hdet.auto``: one search for several optimizers, such as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.hooks import RemovableHandle

from hdet.checks import is_int, must_be, takes
from hdet.errors import ArgumentError
from hdet.parameters import hook_steps, parts_of, stands_still, unwrapped
from hdet.schedulers.arguments import LONGEST, CommonArguments, check_common
from hdet.schedulers.onecycle import OneCycleLR
from hdet.schedulers.plain_rates import Schedule, check_schedule_of
from hdet.schedulers.scheduled import AllSchedules, ScheduledSearch, guesses_of
from hdet.schedulers.search_arguments import check_search

Hook = Callable[..., Any]
Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]


def auto(
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    total_steps: int | None = None,
    schedule: Schedule | Callable[[Optimizer], Schedule] | None = None,
    schedule_every: int = 1,
    **more: Any,
) -> OneCycleLR | ScheduledSearch:
    """The scheduler that finds the learning rate of one optimizer, or one common factor on the rates of several.

    Each optimizer's own rate is its guess: the guesses keep their ratios. Step all optimizers, then the scheduler:

    .. code-block:: python

        scheduler = hdet.auto([muon, adamw], total_steps=10_000)
        ...
        muon.step()
        adamw.step()
        scheduler.step(loss)

    They may be stepped in any order. The gradients of all optimizers are sampled before the first one of a step is
    stepped. With a GradScaler, call ``scaler.unscale_`` on every optimizer before the first ``scaler.step``.

    The rising phase of a schedule of your own is held at its peak, and the search climbs in its place. From the peak on
    the rate is the schedule times the factor that was found:

    .. code-block:: python

        scheduler = hdet.auto(adamw, schedule=CosineAnnealingLR(adamw, 10_000), total_steps=10_000)

    Args:
        optimizers: one, or several with different parameters.
        total_steps: calls of ``step`` in the run. None, without ``schedule``: the rate is held until
            ``scheduler.finish(steps)`` is called.
        schedule: a scheduler of torch or transformers on that optimizer; or a function from an optimizer to its
            scheduler, which several optimizers need. None: OneCycle. Its peak is found in advance, in less than a
            second: any peak within the first 10,000 steps of a schedule, and also later ones of torch's schedules, of
            which a run of more steps has 4096 looked at. If the peak of a schedule of your own lies after its first
            10,000 steps, it is held at the highest rate of these, and followed from there on.
        schedule_every: n: the schedule is stepped once in n steps.
        more: ``model``, ``group``, ``journal``, ``rollback``, ``highest`` as in :class:`hdet.OneCycleLR`; without a
            schedule all of its arguments. Momenta are not cycled.
    """
    found = _optimizers(optimizers)
    one = found[0] if len(found) == 1 else CombinedOptimizer(found)
    if schedule is not None:
        return _scheduled(one, schedule, total_steps, schedule_every, more)
    must_be("1 without schedule=", schedule_every == 1, "leave it out", schedule_every=schedule_every)
    more.setdefault("cycle_momentum", False)
    rule, momentum = "False, since a search leaves momenta as they are", more["cycle_momentum"]
    must_be(rule, not momentum, "leave it out", cycle_momentum=momentum)
    return OneCycleLR(one, "auto", total_steps=total_steps, **more)


def _optimizers(optimizers: Any) -> list[Optimizer]:
    """The optimizers of torch, without their wrappers."""
    inner = unwrapped(optimizers)
    is_one = isinstance(inner, (Optimizer, Tensor)) or not isinstance(inner, Iterable)
    found: list[Any] = [inner] if is_one else [unwrapped(one) for one in inner]
    fits = found and all(isinstance(one, Optimizer) for one in found)
    rule, cure = "an optimizer of torch or some of them", "for instance hdet.auto([muon, adamw], ...)"
    must_be(rule, fits, cure, optimizers=optimizers)
    return found


def _scheduled(
    optimizer: Optimizer, schedule: Any, total_steps: Any, every: Any, more: dict[str, Any]
) -> ScheduledSearch:
    """A search on the user's own schedule. Raises before a schedule is made."""
    fits = is_int(total_steps) and 1 <= total_steps <= LONGEST
    must_be(f"an integer from 1 to {LONGEST}", fits, "count optimizer steps", total_steps=total_steps)
    fits = is_int(every) and 1 <= every <= total_steps
    must_be(f"an integer from 1 to total_steps = {total_steps}", fits, "leave it out for 1", schedule_every=every)
    known = {"model": None, "group": None, "journal": None, "rollback": True, "highest": None}
    strangers = sorted(set(more) - set(known))
    if strangers:
        raise ArgumentError(
            f"with schedule= the arguments {strangers} of OneCycle have no use; leave them out, or leave schedule out"
        )
    given = {**known, **more}
    common = CommonArguments(given["group"], given["model"], given["journal"])
    check_common(common, optimizer)
    rollback, highest = given["rollback"], given["highest"]
    check_search(optimizer, common, guesses_of(optimizer), rollback, highest)  # before a schedule writes
    parts = parts_of(optimizer)
    makes = takes(schedule, optimizer) and not callable(getattr(schedule, "step", None))
    rule = "a function from an optimizer to its schedule, since there are several optimizers"
    cure = "for instance schedule=lambda optimizer: CosineAnnealingLR(optimizer, 10_000)"
    must_be(rule, makes or len(parts) == 1, cure, schedule=schedule)
    made = [schedule(part) for part in parts] if makes else [schedule]
    for part, own in zip(parts, made, strict=True):
        check_schedule_of(part, own)
        if isinstance(own, ReduceLROnPlateau):
            raise ArgumentError(
                "ReduceLROnPlateau depends on a metric, not on the step: a search cannot know where it falls; give "
                "a schedule whose rates are known in advance, for instance CosineAnnealingLR"
            )
    whole, steps = made[0] if len(made) == 1 else AllSchedules(made), int(total_steps)
    more = {"rollback": rollback, "highest": highest}
    return ScheduledSearch(optimizer, whole, total_steps=steps, every=int(every), common=common, **more)


class CombinedOptimizer(Optimizer):
    """Several optimizers seen as one: their groups and their states. It is never stepped; its parts are stepped.

    Its hooks are called before the first part makes its step, whichever that is: no weight has moved yet, and all
    gradients are there. The step is over when the scheduler is stepped, or when a part is stepped again.
    """

    def __init__(self, parts: list[Optimizer]) -> None:
        owners = [(id(p), part) for part in parts for group in part.param_groups for p in group["params"]]
        if len(dict(owners)) < len(owners):
            raise ArgumentError(
                f"each parameter must be in one optimizer only, and once, but {len(owners) - len(dict(owners))} are "
                "there twice; remove them from one place"
            )
        self.parts = parts
        self.defaults = {}
        self.state = _States(parts, dict(owners))  # type: ignore[assignment]  # a view of the parts' own
        self.leading: Optimizer | None = None
        """The part that was stepped first in this step; None between steps."""
        self._stepped: set[int] = set()
        """Ids of the parts that have made this step."""
        self._before: OrderedDict[int, Hook] = OrderedDict()  # torch's handles cannot refer to a plain dict
        self._after: OrderedDict[int, Hook] = OrderedDict()
        for part in parts:
            hook_steps(part, self, CombinedOptimizer.before_part, CombinedOptimizer.after_part)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # those of the parts, as they are now
        """The groups of all parts, in order."""
        return [group for part in self.parts for group in part.param_groups]

    def register_step_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Register a hook that is called before the first part of each step that moves any weight."""
        return _registered(self._before, hook)

    def register_step_post_hook(self, hook: Hook) -> RemovableHandle:
        """Register a hook that is called after that part's step."""
        return _registered(self._after, hook)

    def before_part(self, part: Optimizer, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
        """A part is about to make its step, which does not count if all its rates are 0."""
        if stands_still(part):
            return args, kwargs
        if id(part) in self._stepped:
            self.step_is_over()
        self.leading = self.leading or part
        self._opt_called = True  # torch's schedulers look here whether the optimizer was stepped
        for hook in list(self._before.values()) if part is self.leading else ():
            args, kwargs = hook(self, args, kwargs) or (args, kwargs)
        return args, kwargs

    def after_part(self, part: Optimizer, args: Arguments, kwargs: Keywords) -> None:
        """A part has made its step."""
        self._stepped.add(id(part))
        for hook in list(self._after.values()) if part is self.leading else ():
            hook(self, args, kwargs)

    def step_is_over(self) -> None:
        """The part that is stepped next is the first one of another step."""
        self.leading = None
        self._stepped.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: groups belong to a part."""
        raise ArgumentError("hdet.auto looks at several optimizers: add the parameter group to one of them")

    def state_dict(self) -> dict[str, Any]:
        """Refused: each part has its own."""
        raise ArgumentError("hdet.auto looks at several optimizers: save the state_dict() of each of them")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused: each part loads its own."""
        raise ArgumentError("hdet.auto looks at several optimizers: call load_state_dict() of each of them")

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: the parts, from which everything else is made."""
        return {"parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["parts"])  # type: ignore[misc]

    def step(self, closure: Any = None) -> Any:
        """Refused: step each optimizer, as you would without hdet."""
        raise RuntimeError("hdet.auto looks at several optimizers and steps none of them: step each one yourself")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parts."""
        for part in self.parts:
            part.zero_grad(set_to_none)


def _registered(hooks: OrderedDict[int, Hook], hook: Hook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


class _States(MutableMapping[Tensor, Any]):
    """The states of all parts, by parameter."""

    def __init__(self, parts: list[Optimizer], owners: dict[int, Optimizer]) -> None:
        self._parts, self._owners = parts, owners

    def __getitem__(self, p: Tensor) -> Any:
        return self._of(p).state[p]

    def __setitem__(self, p: Tensor, value: Any) -> None:
        self._of(p).state[p] = value

    def __delitem__(self, p: Tensor) -> None:
        del self._of(p).state[p]

    def __contains__(self, p: object) -> bool:
        owner = self._find(p)
        return owner is not None and p in owner.state

    def get(self, p: Tensor, default: Any = None) -> Any:
        """Unlike ``[p]``, which makes an empty state as torch's does."""
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

    def _find(self, p: object) -> Optimizer | None:
        if id(p) not in self._owners:  # perhaps a group was added since
            every = [(part, q) for part in self._parts for group in part.param_groups for q in group["params"]]
            self._owners |= {id(q): part for part, q in every}
        return self._owners.get(id(p))
