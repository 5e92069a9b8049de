"""Knobs that users can turn: where a value is read and written, and what it acts on.

Made by the functions of this module, which are ``hdet.knobs.lr``, ``hdet.knobs.optimizer`` and so on.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.checks import is_int, is_one_of, is_real, must_be, shown, takes
from hdet.ensemble.knob import KnobSpec, scale_named
from hdet.errors import ArgumentError
from hdet.parameters import check_model, check_optimizer, unwrapped

__all__ = ["Knob", "custom", "lr", "module", "optimizer", "scalar"]

ScaleName = Literal["relative", "linear", "log", "logit"]
Bounds = tuple[float, float]
ANYWHERE: Bounds = (-math.inf, math.inf)
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

    def __post_init__(self) -> None:
        must_be("a KnobSpec", isinstance(self.spec, KnobSpec), "use hdet.knobs.custom(...)", spec=self.spec)
        _check_functions(self.read, self.write)
        usual, acts = '"loss" is the usual one', is_one_of(self.acts, ("update", "loss"))
        must_be('"update" or "loss"', acts, usual, acts=self.acts)


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
        scale: "relative" is the published rule.
        groups: which groups, by index or by their "name"; None: all.
    """
    must_be('"relative" or "log" here', is_one_of(scale, ("relative", "log")), "leave it out", scale=scale)
    knobs, optimizer = [], unwrapped(optimizer)
    for index in _group_indices(optimizer, groups):
        name = f"lr[{_group_name(optimizer, index)}]"
        spec = KnobSpec(name, scale_named(scale), spread, scheduled=True)
        read, write = _group_field(optimizer, [index], "lr", None)
        knobs.append(Knob(spec, read, write, "update", group=index))
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
        index: which entry, where the field is a tuple such as ``betas``.
    """
    optimizer = unwrapped(optimizer)
    indices = _group_indices(optimizer, groups)
    must_be("a key of the groups", isinstance(field, str), 'for instance "momentum"', field=field)
    must_be("an integer or None", index is None or is_int(index), "0 is the first entry", index=index)
    for i in indices:
        if field not in optimizer.param_groups[i]:
            fields = sorted(set(optimizer.param_groups[i]) - {"params"})
            raise ArgumentError(f"field must be one of {fields}, which parameter group {i} has, but got {shown(field)}")
        value = optimizer.param_groups[i][field]
        entries = value if isinstance(value, (list, tuple)) else [value]
        if isinstance(value, (list, tuple)) != (index is not None) or not (index is None or 0 <= index < len(entries)):
            raise ArgumentError(
                f"{field} is {shown(value)}; give index= (from 0 to {len(entries) - 1}) where it has several entries, "
                "and only there"
            )
        if not _is_number(entries[index or 0]):
            raise ArgumentError(f"field must be a number to explore, but {field} is {shown(value)}; choose another")
    if field == "lr":
        raise ArgumentError("the learning rate follows a schedule: use hdet.knobs.lr(optimizer) for it")
    read, write = _group_field(optimizer, indices, field, index)
    values = {_group_field(optimizer, [i], field, index)[0]() for i in indices}
    if len(values) > 1:
        raise ArgumentError(
            f"one knob has one base value, but {field} is {shown(sorted(values))} in groups {indices}; "
            "call hdet.knobs.optimizer once for each of them, with groups=[...]"
        )
    where = "" if groups is None else ",".join(_group_name(optimizer, i) for i in indices)
    name = field + (f".{index}" if index is not None else "") + (f"[{where}]" if where else "")
    return _knob(name, spread, scale, bounds, read, write, "update")


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
    """
    check_model(model, needed=True)
    must_be("a name", isinstance(attribute, str), 'for instance "p"', attribute=attribute)
    modules = _choose_modules(model, which)
    for m in modules:
        if not _is_number(getattr(m, attribute, None)) or isinstance(getattr(m, attribute), Tensor):
            raise ArgumentError(
                f"attribute must name a number to explore, but {shown(attribute)} of {type(m).__name__} is "
                f"{shown(getattr(m, attribute, None))}; give the name of a float attribute, or other modules as which"
            )
    values = {float(getattr(m, attribute)) for m in modules}
    if len(values) > 1:
        raise ArgumentError(
            f"one knob has one base value, but {attribute} is {shown(sorted(values))} in the chosen modules; "
            "choose those that share a value, and call hdet.knobs.module once for each value"
        )
    label = which if isinstance(which, str) else type(modules[0]).__name__
    if regularises is None:
        regularises = any(_names_regulariser(type(m).__name__) for m in modules) or _names_regulariser(attribute)

    def write(value: float) -> None:
        for m in modules:
            setattr(m, attribute, value)

    read = _reader(lambda: getattr(modules[0], attribute))
    return _knob(f"{label}.{attribute}", spread, scale, bounds, read, write, "loss", regularises)


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
    """
    _check_name(name)
    must_be(f"the base of knob {name!r}, a number", _is_number(value), "for instance 0.1", value=value)
    cell = [float(value)]

    def write(new: float) -> None:
        cell[0] = new

    known = _names_regulariser(name) if regularises is None else regularises
    return _knob(name, spread, scale, bounds, lambda: cell[0], write, acts, known)


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
    """Any value behind a getter and a setter."""
    _check_name(name)
    _check_functions(read, write)
    if not _is_number(read()):
        raise ArgumentError(f"read must return a number, but gave {shown(read())}; it is called without arguments")
    return _knob(name, spread, scale, bounds, _reader(read), write, acts, regularises)


def _knob(
    name: str,
    spread: float,
    scale: str,
    bounds: Bounds,
    read: Callable[[], float],
    write: Callable[[float], None],
    acts: Literal["update", "loss"],
    regularises: bool = False,
) -> Knob:
    must_be("True or False", isinstance(regularises, bool), "leave it out", regularises=regularises)
    if not (isinstance(bounds, (tuple, list)) and len(bounds) == 2 and all(_is_number(bound) for bound in bounds)):
        raise ArgumentError(f"bounds of knob {name!r} must be two numbers, but got bounds={shown(bounds)}; (low, high)")
    low, high = bounds
    spec = KnobSpec(name, scale_named(scale), spread, (float(low), float(high)))
    spec.start(read())  # a base that the scale cannot hold is refused here
    return Knob(spec, read, write, acts, regularises)


def _check_name(name: object) -> None:
    must_be("a text", isinstance(name, str) and name, 'for instance "label_smoothing"', name=name)


def _check_functions(read: object, write: object) -> None:
    must_be("a function without arguments", takes(read), "it gives the value", read=read)
    must_be("a function of one number", takes(write, 0.0), "it sets the value", write=write)


def _is_number(value: object) -> bool:
    """A float, or what becomes one."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and not value.is_meta
    return is_real(value)


def _reader(read: Callable[[], Any]) -> Callable[[], float]:
    return lambda: float(read())


def _group_field(
    optimizer: Optimizer, indices: Sequence[int], field: str, entry: int | None
) -> tuple[Callable[[], float], Callable[[float], None]]:
    """Reader and writer of a field. Groups are looked up each time: loading a checkpoint replaces the dicts."""

    def read() -> float:
        value = optimizer.param_groups[indices[0]][field]
        return float(value if entry is None else value[entry])

    def write(new: float) -> None:
        for i in indices:
            group = optimizer.param_groups[i]
            if entry is not None:
                group[field] = tuple(new if j == entry else old for j, old in enumerate(group[field]))
            elif isinstance(group[field], Tensor):
                group[field].fill_(new)
            else:
                group[field] = new

    return read, write


def _group_indices(optimizer: Optimizer, groups: Sequence[int | str] | None) -> list[int]:
    check_optimizer(optimizer)
    everything = optimizer.param_groups
    fits = groups is None or (isinstance(groups, Sequence) and not isinstance(groups, (str, bytes)))
    must_be("a list of indices or names", fits, "leave it out for all groups", groups=groups)
    if groups is None:
        return list(range(len(everything)))
    names = [group.get("name") for group in everything]
    indices = []
    for wanted in groups:
        if isinstance(wanted, str) and wanted in names:
            indices.append(names.index(wanted))
        elif isinstance(wanted, int) and not isinstance(wanted, bool) and 0 <= wanted < len(everything):
            indices.append(wanted)
        else:
            raise ArgumentError(
                f"groups must name parameter groups, but there is none {shown(wanted)}: there are {len(everything)}, "
                f'named {names}; give an index, or put a "name" into the param group'
            )
    if not indices:
        raise ArgumentError("groups must name at least one parameter group, but got an empty list; None means all")
    return indices


def _group_name(optimizer: Optimizer, index: int) -> str:
    return str(optimizer.param_groups[index].get("name", index))


def _choose_modules(model: nn.Module, which: type[nn.Module] | str | Iterable[nn.Module]) -> list[nn.Module]:
    fits = isinstance(which, (str, type, Iterable)) and not isinstance(which, Tensor)
    must_be("a module type, a pattern of names or modules", fits, "for instance nn.Dropout", which=which)
    if isinstance(which, str):
        found = [m for name, m in model.named_modules() if fnmatch.fnmatchcase(name.removeprefix("module."), which)]
    elif isinstance(which, type):
        found = [m for m in model.modules() if isinstance(m, which)]
    else:
        found = list(which)
    if not found or not all(isinstance(m, nn.Module) for m in found):
        raise ArgumentError(
            f"which must match modules, but no module of the model matches {shown(which)}; its modules are "
            f"{sorted({type(m).__name__ for m in model.modules()})}"
        )
    return found


def _names_regulariser(name: str) -> bool:
    return any(word in name.lower() for word in _REGULARISERS)
