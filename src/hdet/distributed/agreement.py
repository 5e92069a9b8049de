"""Agreement: replicas show each other the values that must be equal, and errors list every rank's value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from hdet.distributed import fingerprint
from hdet.distributed.group import ReplicaGroup
from hdet.errors import DisagreementError

__all__ = ["check_arguments", "check_equal", "check_shapes", "terms_of"]

Value = TypeVar("Value", float, str)


def terms_of(
    kind: str,
    knobs: Sequence[object],
    parts: Iterable[object],
    *,
    total_steps: int | None,
    spread: float = 0.0,
    sync_every: int = 0,
    seed: int = 0,
    start: int | None = None,
    decays: bool = False,
    controller: object = None,
) -> dict[str, float]:
    """Numbers that must be equal on all replicas; always the same names, since rows must have one length.

    Args:
        kind: of the run.
        knobs: compared by their words.
        parts: further settings, compared by their words.
        total_steps, spread, sync_every, seed, start, decays, controller: as the user knows them; NaN for None.
    """
    return {
        "number of knobs": float(len(knobs)),
        "spread": spread,
        "knobs (fingerprint)": fingerprint.words([repr(list(knobs))]),
        "fanout, controller, signal (fingerprint)": fingerprint.words([kind, *map(_in_words, parts)]),
        "total_steps": _or_nan(total_steps),
        "sync_every": float(sync_every),
        "seed": float(seed),
        "decay (0: schedule, 1: exponential)": float(decays),
        "auto_lr_start": _or_nan(start),
        "auto_lr (0: off, 1: on)": float(controller is not None),
        **{name: float(getattr(controller, name, math.nan)) for name in ("sigma", "meta_momentum", "meta_lr")},
    }


def _or_nan(value: int | None) -> float:
    return math.nan if value is None else float(value)


def _in_words(part: object) -> str:
    """Equal words for equal parts on all ranks: an address in memory would not be."""
    return repr(part) if type(part).__repr__ is not object.__repr__ else type(part).__name__


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
