"""Agreement: replicas show each other the values that must be equal, and errors list every rank's value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from hdet.distributed import fingerprint
from hdet.distributed.group import ReplicaGroup
from hdet.errors import DisagreementError

__all__ = ["check_arguments", "check_equal", "check_shapes"]

Value = TypeVar("Value", float, str)


def check_equal(table: Mapping[str, Sequence[Value]], cure: str, show: Callable[[str, Value], str]) -> None:
    """Raise unless every row of ``table`` (name -> one value per replica) has one value only.

    NaN equals NaN here: it stands for "none".

    Args:
        table: what was gathered.
        cure: what the user can do about it.
        show: turns (name, value) into words.
    """
    unequal = [name for name, values in table.items() if len({_comparable(v) for v in values}) > 1]
    if not unequal:
        return
    lines = [
        f"  rank {rank}: " + ", ".join(f"{name} = {show(name, table[name][rank])}" for name in unequal)
        for rank in range(len(table[unequal[0]]))
    ]
    odd = _odd_ones(table, unequal)
    raise DisagreementError(
        f"replicas disagree on {' and '.join(unequal)}, which must be equal on all of them{odd}:\n"
        + "\n".join(lines)
        + f"\n{cure}"
    )


def _odd_ones(table: Mapping[str, Sequence[Value]], unequal: Sequence[str]) -> str:
    """Which ranks are not as most of them are, in words; nothing where no value is that of most ranks."""
    shown = [tuple(_comparable(table[name][rank]) for name in unequal) for rank in range(len(table[unequal[0]]))]
    usual = max(shown, key=shown.count)
    odd = [rank for rank, values in enumerate(shown) if values != usual]
    return f" (look at rank {', '.join(map(str, odd))})" if len(odd) < len(shown) / 2 else ""


def check_arguments(group: ReplicaGroup, arguments: Mapping[str, str], device: torch.device) -> None:
    """Raise unless all ranks were given the same arguments, which are in words. Collective.

    Only where a fingerprint of them differs do the words themselves travel. ``device``: where the weights are.
    """
    mine = fingerprint.words(f"{name}={value}" for name, value in arguments.items())
    if len({tuple(row) for row in group.gather([mine], device)}) == 1:
        return
    rows = group.gather_objects(dict(arguments))
    names = dict.fromkeys(name for row in rows for name in row)
    table = {name: [row.get(name, "that of a checkpoint") for row in rows] for name in names}
    check_equal(table, "Give every rank the same arguments, and load the same checkpoint.", lambda name, value: value)


def check_shapes(shapes: Sequence[Sequence[str]]) -> None:
    """Raise with the first tensor that differs between replicas. ``shapes[rank]`` describes a rank's tensors."""
    for i in range(max(len(own) for own in shapes)):
        at_i = [own[i] if i < len(own) else "missing" for own in shapes]
        if len(set(at_i)) > 1:
            lines = [f"  rank {rank}: {len(own)} tensors, number {i}: {at_i[rank]}" for rank, own in enumerate(shapes)]
            raise DisagreementError(
                "replicas disagree on the number or shapes of the parameters, which must be equal on all of them:\n"
                + "\n".join(lines)
                + "\nBuild the same model and optimizer on every rank, with parameter groups in the same order."
            )


def _comparable(value: float | str) -> float | str:
    return "none" if value != value else value
