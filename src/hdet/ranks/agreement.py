"""Agreement: the one row of numbers that each rank gathers from the others, and what all of them conclude from it.

Conclusions are functions of the gathered rows alone, so every rank takes the same branch. If values must be equal and
are not, the error lists every rank's value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import zip_longest
from typing import NamedTuple

from torch import Tensor

from hdet.errors import DisagreementError
from hdet.ranks.group import ReplicaGroup
from hdet.ranks.shards import place
from hdet.ranks.weights import Weights, fingerprint, fingerprint_of_words, to_host

_CURE = (
    "Give every rank the same arguments and the same checkpoint, and call step(), observe(), converge(), consensus() "
    "and finish() equally often on all of them; metrics must be reduced over all ranks, or come from consensus()."
)
_SAME_MODEL = "Build the same model and optimizer on every rank, with parameter groups in the same order."
_LONGEST = 200
"""Length of a value in a message, in characters."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def in_text(values: Mapping[str, object]) -> dict[str, str]:
    """Values as text that is equal on all ranks if the values are: without addresses in memory."""
    return {name: _ADDRESS.sub("", repr(value)) for name, value in values.items()}


def check_equal(rows: Sequence[Mapping[str, str]], cure: str) -> None:
    """Raise if texts of the same name differ; one row for each rank. ``cure``: what to do then."""
    names = dict.fromkeys(name for row in rows for name in row)
    unequal = [name for name in names if len({row.get(name) for row in rows}) > 1]
    if not unequal:
        return
    shown = [", ".join(f"{name} = {row.get(name, 'missing')[:_LONGEST]}" for name in unequal) for row in rows]
    usual = max(shown, key=shown.count)
    odd = [rank for rank, text in enumerate(shown) if text != usual]
    look = f" (look at rank {', '.join(map(str, odd))})" if len(odd) < len(shown) / 2 else ""
    lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(shown))
    raise DisagreementError(
        f"replicas disagree on {' and '.join(unequal)}, which must be equal on all of them{look}:\n{lines}\n{cure}"
    )


class Occasion(Enum):
    """The call in which the replicas communicate, as users write it."""

    FIRST_STEP = "step(), the first"
    ROUND_END = "step(), at the end of a round"
    CONVERGE = "converge()"
    CONSENSUS = "consensus()"
    METRICS = "step(metrics=...)"
    BUFFERS = "step(), averaging buffers"
    FINISH = "finish()"


_GIVEN = {Occasion.METRICS: "metrics", Occasion.FINISH: "finish(steps)"}
"""Occasions at which the signal was given by the user, by this argument, and must be equal."""


class Agreement(NamedTuple):
    """What the replicas know of each other once they agree."""

    losses: list[float]
    """Mean loss of the round per replica; NaN if there is none."""
    signals: list[float]
    """The number that the controller compares, per replica: the loss, or a probe."""
    has_losses: bool
    """Whether the replicas observed losses in this round (all did, or none)."""
    finite: list[bool]
    """Whether the replica's weights are finite."""
    moving_equal: bool
    """Whether trained weights are known to be bitwise equal on all replicas, part by part."""
    still_equal: bool
    """Whether frozen weights are bitwise equal on all replicas."""
    writer: int | None
    """The rank (its place in the group) that writes the journal: the first that has one."""
    held: list[float]
    """For each rank, which parts of sharded weights it holds, as a number; all equal if weights are whole."""

    @classmethod
    def alone(cls) -> Agreement:
        """A single replica without a journal: nothing is read, nothing is synchronised."""
        return cls([math.nan], [math.nan], False, [True], True, True, None, [0.0])

    @property
    def live(self) -> list[bool]:
        """Which replicas count: those with finite weights and, if losses were observed, a finite loss.

        A single replica always counts: no other can replace it, and torch's scheduler does not stop it either.
        """
        if len(self.losses) == 1:
            return [True]
        return [
            finite and (not self.has_losses or abs(loss) < math.inf)
            for finite, loss in zip(self.finite, self.losses, strict=True)
        ]


class Shown(NamedTuple):
    """What a replica shows the others, beside its weights."""

    loss: float = math.nan
    """Its mean loss of the round; NaN: none."""
    given: bool = False
    """Whether it has observed losses in the round."""
    signal: float | None = None
    """The number that is compared; None: its mean loss."""
    journal: bool = False
    """Whether it keeps a journal."""


def fingerprints_of(weights: Weights, expect_equal: bool) -> list[Tensor]:
    """Fingerprints of the moving and of the still tensors, on the device.

    ``expect_equal``: whether trained weights may be bitwise equal (no spread), so that they are compared.
    """
    device = weights.device
    trained = fingerprint(weights.moving if expect_equal else [], device)
    return [trained, fingerprint(weights.still, device)]


def call(
    group: ReplicaGroup,
    occasion: Occasion,
    step: int,
    weights: Weights,
    shown: Shown,
    *,
    expect_equal: bool,
    values: Sequence[float] | None = None,
    arguments: Mapping[str, str] | None = None,
) -> Agreement:
    """Gather the rows of all ranks, raise if they disagree, conclude. Collective.

    Args:
        group: the replicas.
        occasion: the call that brought them here.
        step: that of this replica; must be equal on all of them.
        weights: this replica's.
        shown: what else it shows.
        expect_equal: whether trained weights may be bitwise equal (no spread), so that they are compared.
        values: whether the weights are finite, and their two fingerprints, if that was read already; otherwise host and
            device are synchronised.
        arguments: further texts that must be equal on all of them.
    """
    given = shown.signal if occasion in _GIVEN else None
    alike = {
        "call": occasion.value,
        "step": str(step),
        "loss": ("given" if shown.given else "missing") if occasion is Occasion.ROUND_END else "not asked for",
        _GIVEN.get(occasion, "metrics"): "none" if given is None else str(given).removesuffix(".0"),
        **(arguments or {}),
    }
    held = fingerprint_of_words(sorted({place(tensor) for tensor in weights.tensors}))
    if values is None:
        values = to_host([weights.all_finite(), *fingerprints_of(weights, expect_equal)])
    signal = shown.loss if shown.signal is None else shown.signal
    texts = fingerprint_of_words(f"{name}={text}" for name, text in alike.items())
    own = [texts, fingerprint_of_words(weights.outline), float(shown.journal), held]
    rows = group.gather([*own, shown.loss, signal, *map(float, values)], weights.device)
    if len({row[0] for row in rows}) > 1:
        check_equal(group.gather_objects(alike), _CURE)
    _, shapes, has_journal, parts, loss, probe, sound, moving, still = map(list, zip(*rows, strict=True))
    if len(set(shapes)) > 1:
        for i, at_i in enumerate(zip_longest(*group.gather_objects(weights.outline), fillvalue="missing")):
            check_equal([{f"tensor {i} of the model": text} for text in at_i], _SAME_MODEL)
    return Agreement(
        losses=_per_replica(loss, group.members, _mean),
        signals=_per_replica(probe, group.members, _mean),
        has_losses=shown.given and occasion is Occasion.ROUND_END,
        finite=[flag > 0 for flag in _per_replica(sound, group.members, min)],
        moving_equal=expect_equal and _all_equal(parts, moving),
        still_equal=_all_equal(parts, still),
        writer=next((rank for rank, flag in enumerate(has_journal) if flag), None),
        held=parts,
    )


def _per_replica(
    column: list[float], members: Sequence[Sequence[int]], fold: Callable[[list[float]], float]
) -> list[float]:
    """One number per replica from one per rank, so that all ranks of an arm conclude the same."""
    return [fold([column[rank] for rank in ranks]) for ranks in members]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _all_equal(parts: list[float], fingerprints: list[float]) -> bool:
    """Whether ranks that hold the same parts of the weights hold the same numbers."""
    return len(set(zip(parts, fingerprints, strict=True))) == len(set(parts))
