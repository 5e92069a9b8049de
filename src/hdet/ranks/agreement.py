"""The ranks of a run, seen from one of them: they connect at the first step, and agree at each further occasion.

To agree, each rank gathers one row of numbers from the others, and all conclude the same from them. Conclusions are
functions of the gathered rows alone, so every rank takes the same branch. If values must be equal and are not, the
error lists the ranks whose values are unusual, and one of the others.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from hdet.errors import ArgumentError, DisagreementError
from hdet.ranks.arms import Arms
from hdet.ranks.group import Group, ReplicaGroup, ReplicaIndex, Solo, connect, find_replica_index
from hdet.ranks.presence import listed, presence
from hdet.ranks.shards import place
from hdet.ranks.weights import NO_WEIGHTS, Weights, fingerprint, fingerprint_of_words, to_host

_CURE = (
    "Give every rank the same arguments and the same checkpoint, and call step(), observe(), converge(), consensus() "
    "and finish() equally often on all of them; metrics must be reduced over all ranks, or come from consensus()."
)
_SAME_MODEL = "Build the same model and optimizer on every rank, with parameter groups in the same order."
_initialised: Callable[[], bool] = dist.is_initialized if dist.is_available() else lambda: False
"""Whether torch.distributed is initialised. The function is looked up once, because every step calls it."""
_LONGEST = 200
"""Length of a value in a message, in characters."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def in_text(values: Mapping[str, object]) -> dict[str, str]:
    """Values as texts, without addresses in memory, so that equal values have equal texts on all ranks."""
    return {name: _ADDRESS.sub("", repr(value)) for name, value in values.items()}


def check_equal(rows: Sequence[Mapping[str, str]], cure: str) -> None:
    """Raise if texts of the same name differ; one row for each rank. ``cure``: what to do then.

    The message shows a rank with the usual text and all whose text is another, at most 16 ranks in all.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    unequal = [name for name in names if len({row.get(name) for row in rows}) > 1]
    if not unequal:
        return
    shown = [", ".join(f"{name} = {row.get(name, 'missing')[:_LONGEST]}" for name in unequal) for row in rows]
    (usual, count), *_ = Counter(shown).most_common(1)
    odd = [rank for rank, text in enumerate(shown) if text != usual]
    look = f" (look at rank {listed([*map(str, odd)], ', ', '')})" if len(odd) < len(shown) / 2 else ""
    alike = f" ({count} ranks alike)" if count > 1 else ""
    lines = [f"rank {shown.index(usual)}: {usual}{alike}", *(f"rank {rank}: {shown[rank]}" for rank in odd)]
    raise DisagreementError(
        f"replicas disagree on {' and '.join(unequal)}, which must be equal on all of them{look}:\n{listed(lines)}\n"
        f"{cure}"
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


@dataclass(frozen=True)
class Agreement:
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
        """The agreement of a single replica without a journal. Nothing is read, and nothing is synchronised."""
        return cls([math.nan], [math.nan], False, [True], True, True, None, [0.0])

    @cached_property
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


class RankReport(NamedTuple):
    """What a rank reports to the others, beside its weights."""

    loss: float = math.nan
    """Its mean loss of the round; NaN if there is none."""
    has_loss: bool = False
    """Whether it has observed losses in the round."""
    signal: float | None = None
    """The number that is compared; None: its mean loss."""
    keeps_journal: bool = False


def fingerprints_of(weights: Weights, expect_equal: bool) -> list[Tensor]:
    """Fingerprints of the moving and of the still tensors, on the device.

    ``expect_equal``: whether trained weights may be bitwise equal (no spread), so that they are compared.
    """
    device = weights.device
    trained = fingerprint(weights.moving if expect_equal else [], device)
    return [trained, fingerprint(weights.still, device)]


def agree(
    group: ReplicaGroup,
    occasion: Occasion,
    step: int,
    weights: Weights,
    own: RankReport,
    *,
    expect_equal: bool,
    values: Sequence[float] = (),
    arguments: Mapping[str, str] | None = None,
) -> Agreement:
    """Gather the rows of all ranks, raise if they disagree, conclude. Collective.

    Args:
        group: the replicas.
        occasion: the call that brought them here.
        step: that of this replica; must be equal on all of them.
        weights, own: this replica's weights, and what this rank reports beside them.
        expect_equal: whether trained weights may be bitwise equal (no spread), so that they are compared.
        values: whether the weights are finite, and their two fingerprints; empty: they are read from the device.
        arguments: further texts that must be equal on all of them.
    """
    alike = {"call": occasion.value, "step": str(step)}
    if occasion is Occasion.ROUND_END:
        alike["loss"] = "given" if own.has_loss else "missing"
    if occasion in _GIVEN:
        alike[_GIVEN[occasion]] = str(own.signal).removesuffix(".0")
    alike |= arguments or {}
    values = values or to_host([weights.all_finite(), *fingerprints_of(weights, expect_equal)])
    row = {
        "alike": fingerprint_of_words(f"{name}={text}" for name, text in alike.items()),
        "outline": fingerprint_of_words(weights.outline),
        "keeps_journal": float(own.keeps_journal),
        "held": fingerprint_of_words(sorted({place(tensor) for tensor in weights.tensors})),
        "loss": own.loss,
        "signal": own.loss if own.signal is None else own.signal,
        **dict(zip(("finite", "moving", "still"), map(float, values), strict=True)),
    }
    rows = group.gather(list(row.values()), weights.device)
    of = {name: list(column) for name, column in zip(row, zip(*rows, strict=True), strict=True)}
    if len(set(of["alike"])) > 1:
        check_equal(group.gather_objects(alike), _CURE)
    if len(set(of["outline"])) > 1:
        for i, at_i in enumerate(zip_longest(*group.gather_objects(weights.outline), fillvalue="missing")):
            check_equal([{f"tensor {i} of the model": text} for text in at_i], _SAME_MODEL)
    return Agreement(
        losses=[_mean(of["loss"], ranks) for ranks in group.members],
        signals=[_mean(of["signal"], ranks) for ranks in group.members],
        has_losses=own.has_loss and occasion is Occasion.ROUND_END,
        finite=[all(of["finite"][rank] > 0 for rank in ranks) for ranks in group.members],
        moving_equal=expect_equal and _all_equal(of["held"], of["moving"]),
        still_equal=_all_equal(of["held"], of["still"]),
        writer=next((rank for rank, keeps in enumerate(of["keeps_journal"]) if keeps), None),
        held=of["held"],
    )


def _mean(of: Sequence[float], ranks: Sequence[int]) -> float:
    """The mean of a replica's ranks; most replicas are one rank."""
    return of[ranks[0]] if len(ranks) == 1 else sum(of[rank] for rank in ranks) / len(ranks)


def _all_equal(held: list[float], fingerprints: list[float]) -> bool:
    """Whether ranks that hold the same parts of the weights hold the same numbers."""
    return len(set(zip(held, fingerprints, strict=True))) == len(set(held))


@dataclass(eq=False)
class RankGroup:
    """The ranks of a run, seen from one of them. All must make the same calls, in the same order.

    Args:
        user_group: the user's process group or arms; None: the default group, once there is one.
        alike: arguments that must be equal on all ranks, as texts.
    """

    user_group: Group
    alike: Mapping[str, str]
    in_consensus: bool = field(default=False, init=False)
    """Whether this replica holds the replicas' mean."""
    _group: ReplicaGroup | None = field(default=None, init=False)

    @property
    def group(self) -> ReplicaGroup:
        """The replicas, once they are connected; this one alone before that."""
        return self._group or Solo()

    @property
    def replica_index(self) -> ReplicaIndex:
        """This replica's place, known at any time. Not a collective."""
        if self._group is not None:
            return self._group.replica_index
        return find_replica_index(self.user_group) if _initialised() else Solo.replica_index

    @property
    def is_due(self) -> bool:
        """Whether the replicas can be connected now and are not."""
        return self._group is None and _initialised()

    def check_step(self, t: int) -> None:
        """Raise if a step is made, at ``t``, while this replica holds the mean."""
        if self.in_consensus:
            raise ArgumentError(
                f"step() was called inside consensus(), at step {t}: the weights are restored afterwards, so training "
                "inside is lost; leave the `with` block first"
            )

    def resume(self, state: Mapping[str, object]) -> None:
        """After a checkpoint was loaded, its values must be equal on all ranks in place of the arguments."""
        self.alike = in_text(state)

    # -- communication ----------------------------------------------------------------------------------------------

    def first(
        self, t: int, weights: Weights, arguments: Mapping[str, object], *, keeps_journal: bool
    ) -> tuple[ReplicaGroup, Agreement]:
        """A group over the replicas, to be given to :meth:`begin`, and their agreement. Collective.

        It is hdet's own, so that its collectives cannot pair with others'. ``arguments``: further arguments
        that must be equal on all ranks.
        """
        presence().arrive(f"the first step, {t}")
        group, own = connect(self.user_group), RankReport(keeps_journal=keeps_journal)
        given = {**self.alike, **in_text(arguments), **self.alike}  # these count, and come first in messages
        return group, agree(group, Occasion.FIRST_STEP, t, weights, own, expect_equal=False, arguments=given)

    def begin(self, group: ReplicaGroup) -> None:
        """Use a group from here on: its replicas agree."""
        self._group = group

    def agree(
        self,
        occasion: Occasion,
        t: int,
        weights: Weights,
        own: RankReport,
        *,
        expect_equal: bool,
        values: Sequence[float] = (),
    ) -> Agreement:
        """Gather, raise on disagreement, conclude. Collective."""
        if self.group.replica_index.size > 1:
            presence().arrive(f"{occasion.value}, step {t}")
        else:
            weights = NO_WEIGHTS  # there is none to compare with: do not read them
        return agree(self.group, occasion, t, weights, own, expect_equal=expect_equal, values=values)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, this replica holds the replicas' mean, and must not make a step. It cannot be entered twice."""
        if self.in_consensus:
            raise ArgumentError("consensus() is entered already; leave the outer `with ...consensus():` first")
        self.in_consensus = True
        try:
            yield
        finally:
            self.in_consensus = False

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: a process group cannot be copied, so the copy looks for the default group."""
        group = self.user_group if isinstance(self.user_group, Arms) else None
        return {**vars(self), "user_group": group, "_group": None}
