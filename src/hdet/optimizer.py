"""Optimizers of torch: wrappers, groups, rates, the hooks by which hdet hears of every step, and several as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, finalize, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.checks import items_of, must_be
from hdet.errors import ArgumentError
from hdet.ranks.group import Group, check_group
from hdet.ranks.shards import Partitioned, refuse_flat

_Value = TypeVar("_Value")


def unwrapped(optimizer: Any) -> Any:
    """The optimizer of torch in a wrapper, which holds it as ``.optimizer``, or in several.

    A wrapper need not call step hooks. Anything without an optimizer inside is returned as it is, and so is a
    scheduler, which holds one but resets no gradients.
    """
    while hasattr(optimizer, "zero_grad") and isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


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


def check_optimizer(optimizer: object) -> None:
    """Raise unless ``optimizer`` is an optimizer of torch."""
    must_be("a torch optimizer", isinstance(optimizer, Optimizer), "for instance torch.optim.Adam", optimizer=optimizer)


def check_model(model: object, *, needed: bool = False) -> None:
    """Raise unless ``model`` is a module, or None if that is allowed."""
    fits = isinstance(model, nn.Module) or (model is None and not needed)
    must_be("an nn.Module" if needed else "an nn.Module or None", fits, "pass the model itself", model=model)


def check_training(optimizer: Optimizer, group: Group, model: object) -> None:
    """Raise unless ranks in ``group=`` can train these parameters, of ``model=`` if one is given."""
    check_group(group)
    check_model(model)
    refuse_flat(p for row in optimizer.param_groups for p in row["params"])


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that are stepped and call hooks: several that ``hdet.auto`` sees as one, or one alone."""
    if isinstance(optimizer, CombinedOptimizer):
        return optimizer.parts
    return [optimizer.inside] if isinstance(optimizer, Partitioned) else [optimizer]


def leading_part(optimizer: Optimizer) -> Optimizer:
    """The one of several optimizers that is stepped first in the step to come; else the optimizer itself."""
    return (optimizer.leading or optimizer) if isinstance(optimizer, CombinedOptimizer) else optimizer


def end_step(optimizer: Optimizer) -> None:
    """Tell several optimizers seen as one that the scheduler was stepped: the next step begins."""
    if isinstance(optimizer, CombinedOptimizer):
        optimizer.step_is_over()


def group_counts(optimizer: Optimizer) -> list[int]:
    """The number of parameter groups of each of the optimizers that are seen as one."""
    return [len(part.param_groups) for part in parts_of(optimizer)]


def rate_names(optimizer: Optimizer) -> list[str]:
    """The names of the learning rates of all parameter groups. They do not change when a group is added.

    ``lr[2]`` is that of the third group; ``lr[0.2]`` the same of the first of several optimizers.
    """
    counts = group_counts(optimizer)
    if len(counts) == 1:
        return [f"lr[{g}]" for g in range(counts[0])]
    return [f"lr[{part}.{g}]" for part, count in enumerate(counts) for g in range(count)]


def added_groups(optimizer: Optimizer, counts: Sequence[int]) -> list[int]:
    """The numbers, among all groups, of those that were added since there were ``counts`` of them.

    A group is known by its optimizer and by its place in it: one that is added to the first of two optimizers stands
    before all groups of the second. Raises if groups were removed.
    """
    rows = []
    for part, known in zip(parts_of(optimizer), counts, strict=True):
        now = len(part.param_groups)
        if now < known:
            raise ArgumentError(
                f"a parameter group that hdet knows must stay, but this {type(part).__name__} has {now} and had "
                f"{known}; freeze its parameters instead, by requires_grad_(False), or build a new scheduler"
            )
        rows += [g >= known for g in range(now)]
    return [g for g, is_new in enumerate(rows) if is_new]


def with_added(values: Sequence[_Value], added: Mapping[int, _Value]) -> list[_Value]:
    """One value per group, together with those of groups that were added, by their numbers.

    >>> with_added(["a", "b"], {1: "new"})
    ['a', 'new', 'b']
    """
    known = iter(values)
    return [added[g] if g in added else next(known) for g in range(len(values) + len(added))]


def grouped_parameters(optimizer: Optimizer) -> list[tuple[Tensor, int]]:
    """The optimizer's parameters that train, each once, with the number of its group."""
    found: dict[int, tuple[Tensor, int]] = {}
    for g, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p.requires_grad and (p.is_floating_point() or p.is_complex()):
                found.setdefault(id(p), (p, g))
    return list(found.values())


def trained_parameters(optimizer: Optimizer) -> list[Tensor]:
    """The parameters alone, in the same order."""
    return [p for p, _ in grouped_parameters(optimizer)]


def direction(groups: Iterable[Mapping[str, Any]]) -> float:
    """What an optimizer does with the loss: 1: minimise it, -1: maximise it, 0: each in some parameter groups."""
    signs = {-1.0 if group.get("maximize", False) else 1.0 for group in groups if group["params"]}
    return signs.pop() if len(signs) == 1 else 0.0


# In checkpoints parameters are known by their places in the optimizer: ids do not outlive a process.


def places_of(ids: Sequence[int], optimizer: Optimizer) -> list[int] | None:
    """Where parameters stand among all of the optimizer's; None if some are gone."""
    places = {id(p): place for place, p in enumerate(_all(optimizer))}
    found = [places.get(one) for one in ids]
    return None if None in found else found  # type: ignore[return-value]


def parameters_at(places: Sequence[int], optimizer: Optimizer) -> list[Tensor]:
    """The parameters at these places."""
    every = _all(optimizer)
    return [every[place] for place in places]


def _all(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


# -- rates -------------------------------------------------------------------------------------------------------------


Rate = float | Tensor


def put_rate(group: dict[str, Any], rate: Rate) -> None:
    """Write a rate into a parameter group: in place if it is a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate.squeeze() if isinstance(rate, Tensor) else rate)
    else:
        group["lr"] = rate


def put_rates(optimizer: Optimizer, rates: Sequence[Rate]) -> None:
    """Write a rate into each parameter group."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        put_rate(group, rate)


def copy_rate(rate: Rate) -> Rate:
    """A rate that does not change when the optimizer's tensor does."""
    return rate.clone() if isinstance(rate, Tensor) else rate


def as_type_of(example: Rate, rate: Rate) -> Rate:
    """``rate`` as a tensor like ``example``, if that is one."""
    return torch.full_like(example, float(rate)) if isinstance(example, Tensor) else rate


def shared_rates(optimizer: Optimizer) -> list[int]:
    """For each group, the first group whose rate is the same tensor: those must be spread alike.

    torch gives all groups one tensor when the optimizer is built with ``lr=torch.tensor(...)``.
    """
    lrs = [group["lr"] for group in optimizer.param_groups]
    return [
        next(h for h, other in enumerate(lrs) if h == g or (isinstance(lr, Tensor) and other is lr))
        for g, lr in enumerate(lrs)
    ]


# -- hooks -------------------------------------------------------------------------------------------------------------


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


_CLAIMS: WeakKeyDictionary[Optimizer, tuple[ReferenceType[object], str]] = WeakKeyDictionary()
"""Who sets the rates of an optimizer during its steps, and what people call it."""


def refuse_beside(optimizer: Optimizer, others: str) -> None:
    """Raise if one of the ``others``, ``hdet.auto`` or ``hdet.Guard``, sets an optimizer's rates during its steps."""
    for part in parts_of(optimizer):
        owner, name = _CLAIMS.get(part, (lambda: None, ""))
        if owner() is not None and name == others:
            raise ArgumentError(
                f"one optimizer can have hdet.auto or a hdet.Guard, since each would take back the rates and weights "
                f"of the other, but this {type(part).__name__} has {others} already; with hdet.auto leave the guard "
                "out: the search rolls back by itself. If the one before is done, delete it"
            )


def claim_rates(optimizer: Optimizer, owner: object, name: str) -> None:
    """An owner sets an optimizer's rates from now on, in the place of the one before, for as long as it lives."""
    for part in parts_of(optimizer):
        _CLAIMS[part] = ref(owner), name


def has_claim(optimizer: Optimizer, owner: object) -> bool:
    """Whether nobody else has claimed an optimizer's rates since this owner has."""
    claims = (_CLAIMS.get(part) for part in parts_of(optimizer))
    return all(claim is None or claim[0]() in (None, owner) for claim in claims)


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
    parts = parts_of(optimizer)
    held, whole, is_one = ref(owner), ref(optimizer), len(parts) == 1

    def hook_of(method: Callable[..., Any]) -> Callable[..., Any]:
        def hook(stepped: Optimizer, *step: Any) -> Any:
            found, seen = held(), whole()
            if found is None or seen is None:
                return None
            leads = is_one or leading_part(seen) is stepped  # a wrapper may pass its hooks on to what is inside
            return method(found, seen, *step) if leads else None

        disabled: Callable[..., Any] = torch.compiler.disable(hook)  # a compiled step would make graphs of what we do
        return disabled

    for part in parts:
        finalize(owner, part.register_step_pre_hook(hook_of(before)).remove)
        finalize(owner, part.register_step_post_hook(hook_of(after)).remove)


def hook_before_steps(optimizer: Optimizer, owner: _Owner, before: Callable[..., None]) -> None:
    """Call a method of an owner before every step of an optimizer, or of each of several, with the one that steps.

    Its result is not used. As :func:`hook_steps`, which see for what it holds, otherwise.
    """
    held = ref(owner)

    def hook(stepped: Optimizer, *_: Any) -> None:
        found = held()
        if found is not None:
            before(found, stepped)

    for part in parts_of(optimizer):
        finalize(owner, part.register_step_pre_hook(torch.compiler.disable(hook)).remove)


def hook_saving(optimizer: Optimizer, owner: _Owner, before: Callable[..., Any]) -> None:
    """Call a method of an owner before the ``state_dict`` of an optimizer is made; as :func:`hook_steps`."""
    _hook_states(optimizer, owner, before, "register_state_dict_pre_hook")


def hook_loading(optimizer: Optimizer, owner: _Owner, after: Callable[..., Any]) -> None:
    """Call a method of an owner after a state was loaded into an optimizer; as :func:`hook_steps`."""
    _hook_states(optimizer, owner, after, "register_load_state_dict_post_hook")


def _hook_states(optimizer: Optimizer, owner: _Owner, method: Callable[..., Any], register: str) -> None:
    held = ref(owner)

    def hook(hooked: Optimizer) -> None:
        found = held()
        if found is not None:
            method(found, hooked)

    for part in parts_of(optimizer):
        with suppress(AttributeError):  # an optimizer in a framework's wrapper need not have it
            finalize(owner, getattr(part, register)(hook).remove)


def once_gradients_are_there(
    args: tuple[Any, ...], kwargs: dict[str, Any], tell: Callable[[], None], failed: Callable[[], None] = lambda: None
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """For a hook before an optimizer's step: call ``tell`` now or, if the step has a closure, once it has been called.

    Args:
        args, kwargs: of the step.
        tell: what is to be called, once.
        failed: what is called if the closure raises: no hook comes after such a step.

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
        try:
            loss = closure()
        except BaseException:
            failed()
            raise
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


# -- several, such as Muon for matrices and AdamW for the rest: one search for their rates -----------------------------


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
