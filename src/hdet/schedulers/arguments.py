"""Arguments that several schedulers have in common, and those of torch's OneCycleLR, which torch itself checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet.checks import is_real, must_be, shown
from hdet.journal.file import mapped
from hdet.optimizer.groups import check_model, group_counts
from hdet.ranks.group import check_group
from hdet.ranks.shards import refuse_flat

PUBLISHED_SPREAD = 1 / 9
LENGTHS = ("total_steps", "epochs", "steps_per_epoch")
_HIGHEST = torch.finfo(torch.float32).max
"""The highest rate that gradients can be multiplied by."""


def check_common(optimizer: Optimizer, group: Any, model: Any) -> None:
    """Raise for arguments of the wrong type, and for parameters that FSDP1 has flattened."""
    check_group(group)
    check_model(model)
    refuse_flat(p for row in optimizer.param_groups for p in row["params"])


def rate_names(optimizer: Optimizer) -> list[str]:
    """The names of the learning rates of all parameter groups. They do not change when a group is added.

    ``lr[2]`` is that of the third group; ``lr[0.2]`` the same of the first of several optimizers.
    """
    counts = group_counts(optimizer)
    if len(counts) == 1:
        return [f"lr[{g}]" for g in range(counts[0])]
    return [f"lr[{part}.{g}]" for part, count in enumerate(counts) for g in range(count)]


def check_peak(rate: Any, /, **given: Any) -> None:
    """Raise unless weights can be trained at a rate, the highest of the schedule; ``given``: the argument for it."""
    is_number = is_real(rate) or (isinstance(rate, Tensor) and not rate.is_complex())
    fits = is_number and 0 <= rate <= _HIGHEST
    must_be("finite and not below 0", fits, "for instance 0.1", **given)


def emptied(optimizer: Optimizer) -> Optimizer:
    """An optimizer without weights that has the same groups, for a scheduler to write to. Nothing big is copied."""
    empty = SGD([{"params": [torch.zeros(1)]} for _ in optimizer.param_groups], lr=0.0)
    empty.defaults = dict(optimizer.defaults)
    for row, own in zip(empty.param_groups, optimizer.param_groups, strict=True):
        row.update({key: number_of_its_own(value) for key, value in own.items() if key != "params"})
    return empty


def number_of_its_own(value: Any) -> Any:
    """torch writes into a number that is a tensor. On the host, where reading it does not wait for a device."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) and value.numel() == 1 else value


def rehearsed(optimizer: Optimizer, schedule: dict[str, Any]) -> OneCycleLR:
    """torch's scheduler on an optimizer without weights: what torch refuses, it refuses before anything is changed."""
    made = OneCycleLR(emptied(optimizer), **schedule)
    for group in made.optimizer.param_groups:
        check_peak(group["max_lr"], max_lr=schedule["max_lr"])
    return made


def journal_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for the journal and for other ranks, as JSON can hold them; without lengths."""
    return {name: mapped(v, _plain) for name, v in arguments.items() if name not in (*LENGTHS, "last_epoch")}


def _plain(value: Any) -> Any:
    is_plain = isinstance(value, (bool, float, str)) or (isinstance(value, int) and is_real(value))
    return value if value is None or is_plain else shown(value)


def alike_of(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Arguments in words, for ranks to compare; without lengths, which are compared by themselves."""
    unused = () if arguments.get("cycle_momentum") else ("base_momentum", "max_momentum")
    plain = journal_arguments({name: value for name, value in arguments.items() if name not in unused})
    return {name: repr(mapped(value, lambda v: float(v) if is_real(v) else v)) for name, value in plain.items()}
