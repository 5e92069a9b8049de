"""What a search remembers, and what of it stands in a checkpoint: plain numbers in lists, and tensors beside them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.optim import Optimizer

from hdet.auto.measure import Measure
from hdet.auto.rule import HIGHEST, LOWEST, Decision, Phase, Snapshot, State
from hdet.checks import (
    STATE_VERSION,
    STATE_WORDS,
    Rule,
    check_state,
    count,
    flag,
    in_pairs,
    number,
    pairs,
)
from hdet.distributed.group import Seat
from hdet.errors import ArgumentError
from hdet.rollback.losses import Losses
from hdet.rollback.ruin import Block, Course
from hdet.rollback.saving import any_number, check_course, loaded_course, losses_of, saved_course
from hdet.rollback.snapshots import Snapshots

__all__ = ["Held", "Memory", "check_saved", "loaded", "saved"]

_QUIET = 3
"""Rounds without a raise after which a rate counts as settled."""
_LEVEL = Rule(
    f"a number from {LOWEST:g} to {HIGHEST:g}", lambda value: number.fits(value) and LOWEST <= value <= HIGHEST
)
_STATE = {
    "phase": count(min(Phase), max(Phase)),
    "level": _LEVEL,
    "peak": number,
    **dict.fromkeys(("ceiling", "slowed_from", "pace", "rate"), any_number),
    "course": pairs,
}


@dataclass
class Memory:
    """What a search remembers beside tensors."""

    found: State
    """What was found so far."""
    rounds: int = 0
    """Rounds that have ended."""
    highest: float = 0.0
    """The schedule's highest value so far, of the leading group."""
    is_falling: bool = False
    """Whether the schedule has fallen so far that nothing is raised any more."""
    has_losses: bool = False
    """Whether a loss was given in any round. If not, gradients are judged in their place."""
    quiet: int = 0
    """Rounds in a row that have not raised the rate."""
    rolled_back: int = 0
    """How often training was rolled back."""

    @property
    def is_settled(self) -> bool:
        """Whether the rate has been found: it rises no more, or has not risen for some rounds."""
        return self.found.phase is Phase.SEARCHING and (self.is_falling or self.quiet >= _QUIET)

    @property
    def rate(self) -> float:
        """The peak rate that was found, of the leading group; NaN as long as no round has ended."""
        return self.highest * self.found.found if self.highest else math.nan

    def note(self, decision: Decision) -> None:
        """A round has ended so."""
        after = decision.state
        is_raised = after.found > self.found.found or after.phase is not self.found.phase
        self.quiet = 0 if is_raised else self.quiet + 1
        self.rolled_back += decision.rolled_back_to is not None
        self.found = after

    def judged(self, blocks: Sequence[Block], gradients: Sequence[float], sign: float) -> tuple[Block, ...]:
        """The losses of a round, lower is better; where none is ever given, the logarithms of the gradients' sizes.

        ``sign``: -1 where the loss is maximised; 0: some groups do that, others do not.
        """
        if blocks and not self.has_losses:
            self.has_losses = True
            self.found = self.found._replace(course=Course())  # gradients were judged until now
        if self.has_losses:
            return tuple(Block(sign * mean, steps) for mean, steps in blocks) if sign else ()
        sizes = gradients if self.found.phase is Phase.SEARCHING else ()
        return tuple(Block(math.log(size) if 0 < size < math.inf else math.nan, 1) for size in sizes if size != 0)

    def shape(self, before: float, now: float, *, climbs: bool) -> float:
        """The schedule over its highest value so far; 1 while it climbs, also where it falls from its first step on."""
        self.highest = max(self.highest, before, now)
        return 1.0 if climbs or not self.highest else now / self.highest

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "search": saved(self.found),
            "ended": self.rounds,
            "highest": self.highest,
            "falling": self.is_falling,
            "has_losses": self.has_losses,
            "quiet": self.quiet,
            "rolled_back": self.rolled_back,
        }

    @staticmethod
    def check(state: Mapping[str, Any]) -> None:
        """Raise unless :meth:`from_state` can read it."""
        rules = {"search": pairs, "ended": count(0), "highest": number, "falling": flag, "has_losses": flag}
        counted = {name: count(0) for name in ("quiet", "rolled_back") if name in state}  # earlier versions have none
        check_state(state, {**rules, **counted}, STATE_WORDS)
        check_saved(state["search"])

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Memory:
        """From :meth:`state`."""
        found = loaded(state["search"])
        counted = state.get("quiet", 0), state.get("rolled_back", 0)
        return cls(found, state["ended"], state["highest"], state["falling"], state["has_losses"], *counted)


def saved(state: State) -> list[list[Any]]:
    """Without snapshots: they are saved with what lies in them."""
    found = {**state._asdict(), "phase": int(state.phase), "course": saved_course(state.course)}
    del found["snapshots"]
    return in_pairs(found)


def check_saved(search: Sequence[Sequence[Any]]) -> None:
    """Raise unless :func:`loaded` can read it."""
    what = f"{STATE_WORDS}, in what it says about the search,"
    found = {str(name): value for name, value in search}
    check_state(found, _STATE, what)
    check_course(found["course"], what)


def loaded(search: Sequence[Sequence[Any]]) -> State:
    """From :func:`saved`."""
    found = {name: value for name, value in search if name in State._fields}
    return State(**{**found, "phase": Phase(found["phase"]), "course": loaded_course(found["course"])})


class Held(NamedTuple):
    """What a search holds in tensors, and the losses of the round so far."""

    losses: Losses
    kept: tuple[Snapshot, ...]
    measure: Measure
    snapshots: Snapshots

    def saved(self, optimizer: Optimizer, t: int) -> dict[str, Any]:
        """At step ``t``: the tensors themselves, no copies."""
        return {
            "version": STATE_VERSION,
            "step": t,
            "losses": [self.losses.saved()],
            "kept": [list(one) for one in self.kept],
            "measure": self.measure.saved(optimizer),
            "snapshots": self.snapshots.saved(optimizer),
        }

    @classmethod
    def read(cls, saved: Mapping[str, Any], optimizer: Optimizer, t: int, groups: Collection[int], seat: Seat) -> Held:
        """From :meth:`saved`; raises unless it is of step ``t`` and fits the optimizer."""
        with _fitting(saved, t):
            return cls(
                losses_of(saved["losses"], seat),
                tuple(Snapshot(int(step), int(slot)) for step, slot in saved["kept"]),
                Measure.loaded(saved["measure"], groups, optimizer),
                Snapshots.loaded(saved["snapshots"], optimizer),
            )


@contextmanager
def _fitting(search: Mapping[str, Any], t: int) -> Iterator[None]:
    """Inside, what lies in tensors is read, which must be of step ``t``: whatever does not fit becomes one error."""
    try:
        version, step = search["version"], search["step"]
        if (version, step) != (STATE_VERSION, t):
            raise ValueError(f"it is of version {version} at step {step}, the scheduler {STATE_VERSION} at {t}")
        yield
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"the state of a search does not fit this scheduler ({type(error).__name__}: {error}); load the "
            "scheduler's own state first, of the same checkpoint, or leave the search out"
        ) from error
