"""Knobs that users can turn: where a value is read and written, and what it acts on.

Made by the functions of this module, which are ``hdet.knobs.lr``, ``hdet.knobs.optimizer`` and so on.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.checks import is_int, is_one_of, is_real, items_of, must_be, shown, takes
from hdet.ensemble.knob import ANYWHERE, KnobSpec
from hdet.ensemble.signals import ProbeLoss, Signal, TrainLoss
from hdet.errors import ArgumentError
from hdet.optimizer import check_model, check_optimizer, shared_rates, unwrapped
from hdet.ranks.arms import Arms
from hdet.ranks.torchft import Torchft

__all__ = ["Knob", "custom", "lr", "module", "optimizer", "scalar"]

ScaleName = Literal["relative", "linear", "log", "logit"]
Bounds = tuple[float, float]
_REGULARISERS = ("dropout", "drop_path", "droppath", "label_smoothing")


@dataclass
class Knob:
    """One scalar that is explored.

    Attributes:
        spec: name, scale, spread and bounds.
        read: gives the value as it is now.
        write: sets it, for this replica.
        acts: "update": inside the optimizer step; "loss": in the forward pass or the loss.
        regularises: whether it makes the training loss worse on purpose, so that this loss cannot judge it.
        group: the parameter group whose learning rate this is; None for other knobs.
    """

    spec: KnobSpec
    read: Callable[[], float]
    write: Callable[[float], None]
    acts: Literal["update", "loss"]
    regularises: bool = False
    group: int | None = None


def lr(
    optimizer: Optimizer,
    *,
    spread: float = 1 / 9,
    scale: Literal["relative", "log"] = "relative",
    groups: Sequence[int | str] | None = None,
) -> list[Knob]:
    """The learning rate: one knob per parameter group. Its base is the schedule's value times a learned factor.

    Args:
        optimizer: whose groups.
        spread: alpha, relative (or in the logarithm, with ``scale="log"``).
        scale: "relative" is the paper's.
        groups: which groups, by index or by their "name"; None: all.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> [knob.spec.name for knob in lr(torch.optim.SGD(model.parameters(), 0.1))]
    ['lr[0]']
    """
    must_be('"relative" or "log" here', is_one_of(scale, ("relative", "log")), "leave it out", scale=scale)
    optimizer, knobs = unwrapped(optimizer), []
    for i in _group_indices(optimizer, groups):
        spec = KnobSpec(f"lr[{_group_name(optimizer, i)}]", scale, spread, scheduled=True)
        field = _Field(optimizer, [i], "lr")
        knobs.append(Knob(spec, field.read, field.write, "update", group=i))
    return knobs


def optimizer(
    optimizer: Optimizer,
    field: str,
    *,
    spread: float,
    scale: ScaleName = "log",
    bounds: Bounds = ANYWHERE,
    groups: Sequence[int | str] | None = None,
    index: int | None = None,
) -> Knob:
    """One field of parameter groups: weight_decay, momentum, eps, one entry of betas. One knob for all chosen groups.

    Args:
        optimizer: whose groups.
        field: key in the param group.
        spread, scale, bounds: how far replicas are apart, on which scale, and the range that no replica may leave.
        groups: which groups, by index or by their "name"; None: all. They must have one value: otherwise call it
            once per group.
        index: which entry, if the field is a tuple such as ``betas``.

    >>> import torch
    >>> adam = torch.optim.AdamW(nn.Linear(2, 1).parameters(), weight_decay=0.1)
    >>> optimizer(adam, "weight_decay", spread=0.3).read()
    0.1
    """
    optimizer = unwrapped(optimizer)
    indices = _group_indices(optimizer, groups)
    chosen = [optimizer.param_groups[i] for i in indices]
    fields = sorted(set.intersection(*map(set, chosen)) - {"params", "lr"})
    fits, cure = is_one_of(field, fields), "the learning rate, which follows a schedule, is hdet.knobs.lr(optimizer)"
    must_be(f"one of {fields}, which these parameter groups have", fits, cure, field=field)
    entries = chosen[0][field] if isinstance(chosen[0][field], (list, tuple)) else None
    rule = "None" if entries is None else f"the number of an entry, from 0 to {len(entries) - 1}"
    fits = index is None if entries is None else is_int(index) and index in range(len(entries))
    must_be(rule, fits, f"{field} is {shown(chosen[0][field])}", index=index)
    values = [group[field] if index is None else group[field][index] for group in chosen]
    cure = "call hdet.knobs.optimizer once for each of them, with groups=[...]"
    _check_base("field", field, values, all(map(_is_number, values)), cure)
    where = "" if groups is None else ",".join(_group_name(optimizer, i) for i in indices)
    name = field + (f".{index}" if index is not None else "") + (f"[{where}]" if where else "")
    own = _Field(optimizer, indices, field, index)
    return custom(name, own.read, own.write, spread=spread, scale=scale, bounds=bounds, acts="update")


def module(
    model: nn.Module,
    which: type[nn.Module] | str | Iterable[nn.Module],
    attribute: str,
    *,
    spread: float,
    scale: ScaleName = "linear",
    bounds: Bounds = ANYWHERE,
    regularises: bool | None = None,
) -> Knob:
    """A float attribute of modules: Dropout.p, an attention temperature, a DropPath rate. One knob for all of them.

    Args:
        model: where to look (DDP-wrapped or not).
        which: a module type, a pattern for names in ``model.named_modules()`` ("blocks.*.drop"), or the modules.
        attribute: name of the attribute.
        spread, scale, bounds: as for :func:`optimizer`.
        regularises: whether it makes the training loss worse on purpose. None: yes for dropout and similar modules.

    >>> module(nn.Sequential(nn.Dropout(0.2)), nn.Dropout, "p", spread=0.05, bounds=(0.0, 0.6)).regularises
    True
    """
    check_model(model, needed=True)
    must_be("a name", isinstance(attribute, str), 'for instance "p"', attribute=attribute)
    modules = _choose_modules(model, which)
    values = [getattr(m, attribute, None) for m in modules]
    cure = "choose modules that share a value, and call hdet.knobs.module once for each value"
    _check_base("attribute", attribute, values, all(map(is_real, values)), cure)
    label = which if isinstance(which, str) else type(modules[0]).__name__
    if regularises is None:
        regularises = any(_names_regulariser(type(m).__name__) for m in modules) or _names_regulariser(attribute)
    name, own = f"{label}.{attribute}", _Attribute(modules, attribute)
    return custom(name, own.read, own.write, spread=spread, scale=scale, bounds=bounds, regularises=regularises)


def scalar(
    name: str,
    value: float,
    *,
    spread: float,
    scale: ScaleName = "linear",
    bounds: Bounds = ANYWHERE,
    acts: Literal["update", "loss"] = "loss",
    regularises: bool | None = None,
) -> Knob:
    """A number that your own code reads back with ``ensemble[name]``: label smoothing, loss weights, augmentation.

    Args:
        name: the key.
        value: its first base value.
        spread, scale, bounds: as for :func:`optimizer`.
        acts: "loss" unless your code uses it inside the optimizer step.
        regularises: whether it makes the training loss worse on purpose. None: yes for dropout and label smoothing.

    >>> scalar("label_smoothing", 0.1, spread=0.05).read()
    0.1
    """
    must_be(f"the base of knob {shown(name)}, a number", is_real(value), "for instance 0.1", value=value)
    own = _Attribute([SimpleNamespace(value=float(value))], "value")
    if regularises is None:
        regularises = isinstance(name, str) and _names_regulariser(name)
    more: dict[str, Any] = {"scale": scale, "bounds": bounds, "acts": acts, "regularises": regularises}
    return custom(name, own.read, own.write, spread=spread, **more)


def custom(
    name: str,
    read: Callable[[], float],
    write: Callable[[float], None],
    *,
    spread: float,
    scale: ScaleName = "linear",
    bounds: Bounds = ANYWHERE,
    acts: Literal["update", "loss"] = "loss",
    regularises: bool = False,
) -> Knob:
    """Any value behind a getter and a setter.

    A copy of an ensemble shares functions with the original. If you give methods of an object, the object is copied.
    """
    must_be("a text", isinstance(name, str) and name, 'for instance "label_smoothing"', name=name)
    must_be("a function without arguments", takes(read), "it gives the value", read=read)
    must_be("a function of one number", takes(write, 0.0), "it sets the value", write=write)
    must_be('"update" or "loss"', is_one_of(acts, ("update", "loss")), '"loss" is the usual one', acts=acts)
    if not _is_number(read()):
        raise ArgumentError(f"read must return a number, but gave {shown(read())}; it is called without arguments")
    fits = isinstance(bounds, (tuple, list)) and len(bounds) == 2 and all(map(is_real, bounds))
    must_be("two numbers", fits, "give (low, high)", bounds=bounds)
    spec = KnobSpec(name, scale, spread, (float(bounds[0]), float(bounds[1])))
    spec.start(float(read()))  # a base that the scale cannot hold is refused here
    return Knob(spec, read, write, acts, regularises)


# The list of knobs that an ensemble explores: what is refused, and which knobs share a place.


def flat_knobs(knobs: Any) -> list[Knob]:
    """The knobs of a list that may contain lists. Raises for anything else."""
    rows = items_of(knobs)
    flat = [knob for item in rows or () for knob in (item if isinstance(item, (list, tuple)) else [item])]
    fits = rows is not None and all(isinstance(knob, Knob) for knob in flat)
    cure = "for instance knobs=[hdet.knobs.lr(optimizer)]"
    must_be("a list of knobs made by hdet.knobs.*", fits, cure, knobs=knobs)
    return flat


def columns_of(knobs: list[Knob], optimizer: Optimizer) -> list[int]:
    """The column of the design for each knob: its own, but one for rates that are the same tensor."""
    first_group = shared_rates(optimizer)
    owner = {knob.group: i for i, knob in reversed(list(enumerate(knobs))) if knob.group is not None}
    return [i if knob.group is None else owner.get(first_group[knob.group], i) for i, knob in enumerate(knobs)]


def check_knobs(knobs: list[Knob], signal: Signal, schedule: object) -> None:
    """Raise unless the knobs have different names, are not written by the schedule, and fit the signal."""
    cure = "for a function or a ProbeBatch give signal=hdet.ProbeLoss(fn)"
    must_be("TrainLoss(), ProbeLoss(fn) or None", isinstance(signal, (TrainLoss, ProbeLoss)), cure, signal=signal)
    names = [knob.spec.name for knob in knobs]
    fits, cure = names and len(set(names)) == len(names), "give each its own name, or None for the learning rates"
    must_be("at least one, each with a name of its own", fits, cure, knobs=names)
    cycled = [name for name in names if name.startswith(("momentum", "betas.0"))]
    fits = not (cycled and getattr(schedule, "cycle_momentum", False))
    must_be("none that the schedule writes at every step", fits, "give it cycle_momentum=False", knobs=cycled)
    regularisers = [knob.spec.name for knob in knobs if knob.regularises]
    if regularisers and isinstance(signal, TrainLoss):
        raise ArgumentError(
            f"the knobs {regularisers} regularise: they make the training loss worse on purpose, so judged by it they "
            "always go to zero. Compare by a loss without the regulariser: signal=hdet.ProbeLoss(hdet.ProbeBatch("
            'model, loss_fn, loader), at="round_mean")'
        )


def refuse_uninformative(knobs: list[Knob], group: object) -> None:
    """Raise for knobs of the loss under shared gradients. They need arms; a single process may use arms(1)."""
    loss_knobs = [knob.spec.name for knob in knobs if knob.acts == "loss"]
    isolated = isinstance(group, Arms) and (len(group.members) > 1 or len(group.members[0]) == 1)
    isolated |= isinstance(group, Torchft)
    if loss_knobs and not isolated:
        raise ArgumentError(
            f"the knobs {loss_knobs} act in the loss, but the replicas share gradients: all of them get the same "
            "update and keep the same weights, so their losses only show the knob itself and not where it should "
            "go. Isolate the gradients: arms = hdet.arms(n), DistributedDataParallel(model, "
            "process_group=arms.gradients), group=arms; or allow_uninformative=True"
        )


def _check_base(argument: str, name: str, values: Sequence[Any], are_numbers: bool, cure: str) -> None:
    """Raise unless all that one knob writes to holds the same number."""
    if not are_numbers:
        words = f"{shown(name)} is {shown(values)}; choose another"
        raise ArgumentError(f"{argument} must name a number to explore, but {words}")
    if len(found := {float(value) for value in values}) > 1:
        raise ArgumentError(f"one knob has one base value, but {shown(name)} is {shown(sorted(found))}; {cure}")


def _is_number(value: object) -> bool:
    """A float, or what becomes one."""
    return is_real(value) or (isinstance(value, Tensor) and value.numel() == 1)


@dataclass
class _Field:
    """A field of parameter groups. Groups are looked up each time: loading a checkpoint replaces the dicts."""

    optimizer: Optimizer
    indices: Sequence[int]
    name: str
    entry: int | None = None

    def read(self) -> float:
        value = self.optimizer.param_groups[self.indices[0]][self.name]
        return float(value if self.entry is None else value[self.entry])

    def write(self, new: float) -> None:
        for i in self.indices:
            group = self.optimizer.param_groups[i]
            if self.entry is not None:
                group[self.name] = tuple(new if j == self.entry else old for j, old in enumerate(group[self.name]))
            elif isinstance(group[self.name], Tensor):
                group[self.name].fill_(new)
            else:
                group[self.name] = new


@dataclass
class _Attribute:
    """An attribute that objects have in common, such as modules."""

    owners: Sequence[Any]
    name: str

    def read(self) -> float:
        return float(getattr(self.owners[0], self.name))

    def write(self, new: float) -> None:
        for owner in self.owners:
            setattr(owner, self.name, new)


def _group_indices(optimizer: Optimizer, groups: Sequence[int | str] | None) -> list[int]:
    check_optimizer(optimizer)
    names = [group.get("name") for group in optimizer.param_groups]
    if groups is None:
        return list(range(len(names)))
    wanted = groups if isinstance(groups, Sequence) and not isinstance(groups, (str, bytes)) else []
    indices: list[Any] = [names.index(one) if isinstance(one, str) and one in names else one for one in wanted]
    fits = indices and all(is_int(i) and 0 <= i < len(names) for i in indices)
    rule = f'indices or the "name" of at least one of the {len(names)} parameter groups, which are named {names}'
    must_be(rule, fits, "leave it out for all groups", groups=groups)
    return indices


def _group_name(optimizer: Optimizer, index: int) -> str:
    return str(optimizer.param_groups[index].get("name", index))


def _choose_modules(model: nn.Module, which: type[nn.Module] | str | Iterable[nn.Module]) -> list[nn.Module]:
    found: list[Any] = []
    if isinstance(which, str):
        found = [m for name, m in model.named_modules() if fnmatch.fnmatchcase(name.removeprefix("module."), which)]
    elif isinstance(which, type):
        found = [m for m in model.modules() if isinstance(m, which)]
    else:
        found = items_of(which) or []
    fits = found and all(isinstance(m, nn.Module) for m in found)
    cure = f"no module matches; the model has {sorted({type(m).__name__ for m in model.modules()})}"
    must_be("a module type, a pattern of names, or modules of the model", fits, cure, which=which)
    return found


def _names_regulariser(name: str) -> bool:
    return any(word in name.lower() for word in _REGULARISERS)
