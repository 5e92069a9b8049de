"""The protocol of a way: what a run does. There are two, replicas that train apart and a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.algorithm.controller import Controller, Update
from hdet.algorithm.knob import KnobSpec
from hdet.distributed import fingerprint
from hdet.distributed.group import ReplicaGroup, Seat
from hdet.distributed.meeting import Meeting
from hdet.distributed.rollcall import Occasion, RollCall
from hdet.distributed.weights import Weights
from hdet.errors import ArgumentError
from hdet.rates import Rate
from hdet.rollback.losses import Losses

__all__ = ["RoundEnd", "RoundReport", "Way", "check_moves", "in_words", "terms"]


class RoundEnd(NamedTuple):
    """What is known when a round ends."""

    before: int
    """The step counter in the round that ends."""
    after: int
    """The step counter to come: a round end."""
    optimizer: Optimizer
    schedule: Callable[[int], list[float]]
    """The plain schedule per knob at a step; anything for knobs that have none."""
    floors: Callable[[], list[float]]
    """The schedule's lowest value per knob."""
    peak: Callable[[], float]
    """The step at which the schedule's rising phase ends."""
    losses: Losses
    """What was observed in the round."""
    keeps_journal: bool
    """Whether this rank has a journal."""


class RoundReport(NamedTuple):
    """What is to be told of a round."""

    record: dict[str, Any] | None
    """For the journal, on the one rank that writes it."""
    warning: str | None = None
    """For people, at once."""


class Way(Protocol):
    """How the replicas differ, what they learn from it, and what becomes of their weights."""

    @property
    def name(self) -> str:
        """What tells the two ways apart in a checkpoint."""

    @property
    def specs(self) -> Sequence[KnobSpec]:
        """The knobs."""

    @property
    def total_steps(self) -> int | None:
        """The run's length, if it is known."""

    @property
    def learned(self) -> Sequence[float]:
        """What was learned of each knob: a value, or a factor on a schedule."""

    @property
    def holds_rise(self) -> bool:
        """Whether the schedule's rising phase is held at its peak, since the way climbs by itself."""

    @property
    def drifts_apart(self) -> bool:
        """Whether the replicas hold different weights or buffers inside a round."""

    @property
    def model(self) -> nn.Module | None:
        """Whose forward passes read the weights, if it is known."""

    def base(self, schedule: Sequence[Rate], t: int) -> list[Rate]:
        """The shared base values of scheduled knobs at step ``t``; each keeps the type of its schedule."""

    def rates(self, schedule: Sequence[Rate], t: int, seat: Seat) -> list[Rate]:
        """This replica's values of scheduled knobs at step ``t``: base times rho."""

    def multipliers(self, t: int, seat: Seat) -> list[float]:
        """rho of this replica per knob."""

    def values(self, t: int, seat: Seat) -> list[float]:
        """This replica's value of each knob that has no schedule; anything for the others."""

    def terms(self) -> dict[str, float]:
        """Numbers that must be equal on all replicas; made by :func:`terms`."""

    def grow(self, more: Sequence[KnobSpec]) -> None:
        """Parameter groups were added to the optimizer: their rates become knobs."""

    def begin(self, optimizer: Optimizer) -> None:
        """The optimizer is known."""

    def take_over(self) -> None:
        """Until now another scheduler was in charge, as in SequentialLR: what was trained is not this one's."""

    def first_weights(self, optimizer: Optimizer) -> Weights:
        """The weights when the replicas first meet, checked."""

    def met(self, group: ReplicaGroup, roll: RollCall) -> None:
        """The replicas have met, and their roll was called. Collective."""

    @property
    def progress(self) -> int:
        """The step of the round that a loss which is observed now belongs to."""

    def after_step(self, optimizer: Optimizer, t: int, meeting: Meeting) -> None:
        """A step of training has been made: the counter goes to ``t``."""

    def end_round(self, end: RoundEnd, meeting: Meeting) -> RoundReport:
        """A round ends. Collective."""

    def round_ends(self, t: int) -> bool:
        """Whether a round ends when the counter arrives at ``t``."""

    def inside_round(self, t: int) -> bool:
        """Whether a run that goes on at ``t`` does so inside a round."""

    def weights(self, optimizer: Optimizer) -> Weights:
        """What :meth:`converge` changes."""

    def converge(self, optimizer: Optimizer, t: int, meeting: Meeting, occasion: Occasion) -> None:
        """Make the replicas equal now, and nothing else. Collective."""

    def state(self) -> dict[str, Any]:
        """Plain numbers, lists and strings for a checkpoint; the same on every replica."""

    def tensors(self) -> list[list[Tensor]]:
        """Copies of tensors that belong into a checkpoint too; the same on every replica."""

    def check(self, state: Mapping[str, Any], tensors: Sequence[Sequence[Tensor]], total_steps: int | None) -> None:
        """Raise unless :meth:`load` can go on from this. Changes nothing."""

    def load(self, state: Mapping[str, Any], tensors: Sequence[Sequence[Tensor]], total_steps: int | None) -> None:
        """Go on from :meth:`state` and :meth:`tensors`, which :meth:`check` has seen."""

    def search(self, optimizer: Optimizer) -> dict[str, Any]:
        """What a search holds in tensors, for a checkpoint: the tensors themselves. Empty where nothing is searched."""

    def check_search(self, search: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Raise unless :meth:`load_search` can go on with it. Changes nothing."""

    def load_search(self, search: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Go on with :meth:`search`, after :meth:`load`. What does not fit raises before anything is changed."""

    def lost(self, t: int, seat: Seat) -> str | None:
        """What a run that went on at step ``t`` has no more, in words for its user; None: nothing is lost."""

    def adopt(self, total_steps: int, t: int) -> None:
        """Go on from a checkpoint of torch's own scheduler: only the counters are known."""


def terms(
    specs: Sequence[KnobSpec],
    parts: Sequence[object],
    *,
    controller: Controller | None,
    total_steps: int | None,
    sync_every: int | None,
    seed: int,
    start: int | None,
    decays: bool = False,
) -> dict[str, float]:
    """Numbers that must be equal on all replicas; always the same keys, since rows must have one length.

    ``parts``: further settings, compared by their words.
    """
    spreads = {spec.spread for spec in specs}
    text = repr([(spec.name, spec.scale.name, spec.spread, spec.bounds) for spec in specs])
    nothing = float("nan")
    return {
        "number of knobs": float(len(specs)),
        "spread": spreads.pop() if len(spreads) == 1 else nothing,
        "knobs (fingerprint)": fingerprint.words([text]),
        "fanout, controller, signal, outer (fingerprint)": fingerprint.words(map(in_words, parts)),
        "total_steps": nothing if total_steps is None else float(total_steps),
        "sync_every": float(sync_every or 0),
        "seed": float(seed),
        "decay (0: schedule, 1: exponential)": float(decays),
        "auto_lr_start": nothing if start is None else float(start),
        "auto_lr (0: off, 1: on)": float(controller is not None),
        **{name: float(getattr(controller, name, nothing)) for name in ("sigma", "meta_momentum", "meta_lr")},
    }


def in_words(part: object) -> str:
    """Equal words for equal parts on all ranks: an address in memory would not be."""
    return repr(part) if type(part).__repr__ is not object.__repr__ else type(part).__name__


def check_moves(controller: Controller | None, update: Update, knobs: int, signals: Sequence[float]) -> None:
    """Raise for what no controller may return."""
    if len(update.moves) != knobs or not all(abs(move) < float("inf") for move in update.moves):
        raise ArgumentError(
            f"a controller must return one finite move per knob, here {knobs}, but {controller!r} "
            f"returned {update.moves} for the signals {signals}; correct its update()"
        )
