"""A search in a checkpoint: plain numbers in lists, and tensors beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.optim import Optimizer

from hdet.auto import rule
from hdet.auto.measure import Measure
from hdet.auto.progress import UNKNOWN, Progress, Stretch
from hdet.auto.rule import HIGHEST, LOWEST, Phase, Snapshot, State
from hdet.auto.search import KIND, Memory, Search
from hdet.auto.telling import ADOPTED, Found
from hdet.checks import (
    STATE_VERSION,
    STATE_WORDS,
    Rule,
    check_run,
    check_state,
    count,
    flag,
    in_pairs,
    number,
    pairs,
    run_state,
    shown,
    some_rates,
    text,
)
from hdet.distributed.group import Seat
from hdet.errors import ArgumentError
from hdet.parameters import Rate
from hdet.rollback.losses import Losses
from hdet.rollback.ruin import Block
from hdet.rollback.saving import any_number, check_course, loaded_course, losses_of, rows_of_numbers, saved_course
from hdet.rollback.snapshots import Snapshots

_LEVEL = Rule(
    f"a number from {LOWEST:g} to {HIGHEST:g}", lambda value: number.fits(value) and LOWEST <= value <= HIGHEST
)
_TOLD = {"kept_for": text, **dict.fromkeys(("rests", "is_bound", "has_settled", "has_peaked"), flag)}
"""What of a search was told, and what it says."""
_ROWS: dict[str, type[Block] | type[Stretch]] = {"start": Block, "stretches": Stretch, "last": Block}
_PROGRESS = {
    **{name: rows_of_numbers(len(row._fields)) for name, row in _ROWS.items()},
    "before": any_number,
    "turned": count(0),
    "fell": flag,
}
_STATE = {
    "phase": count(min(Phase), max(Phase)),
    "level": _LEVEL,
    "peak": number,
    **dict.fromkeys(("ceiling", "slowed_from", "pace", "rate"), any_number),
    "course": pairs,
    "spared": flag,
}


class ResumableSearch(Search):
    """A search whose length may change, and that goes on from a checkpoint as if nothing had happened."""

    def state(self) -> dict[str, Any]:
        """Plain numbers, lists and strings; the same on every rank, with keys that never change."""
        counts = {"made": self._sampler.made, "begun": self._sampler.begun}
        envelope = run_state(KIND, self.knobs, [0.0] * len(self.knobs))
        return {**envelope, "searches": self.rule.searches, **_saved_memory(self.memory), **counts}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise unless :meth:`load` can go on from it. Changes nothing."""
        check_run(state, KIND, self.knobs)
        _check_memory(state)
        check_state(state, {"searches": flag, "made": count(0), "begun": count(0)}, STATE_WORDS)

    @staticmethod
    def found_in(state: Mapping[str, Any]) -> Found:
        """What was found, of a state that :meth:`check` has seen."""
        return _loaded_memory(state).told

    def load(self, state: Mapping[str, Any], total_steps: int | None, t: int) -> None:
        """Go on at step ``t`` from what :meth:`check` has seen.

        Without :meth:`load_tensors`: from an origin of its own, and there is nothing to go back to yet.
        """
        self._follow(dataclasses.replace(self.rule, total_steps=total_steps, searches=state["searches"]))
        self.take_over()
        self.memory = _loaded_memory(state)
        self._begins_anew = self.found.phase is Phase.SEARCHING
        self._sampler.made, self._sampler.begun = state["made"], state["begun"]
        self._resume(t)

    def adopt(self, total_steps: int, t: int) -> None:
        """Go on from a checkpoint of torch's own scheduler: from its rate, without a search."""
        self._follow(dataclasses.replace(self.rule, total_steps=total_steps))
        if t > 0:
            self.memory.found, self.memory.kept_for = self.rule.kept(), ADOPTED
        self._resume(t)

    def finish(self, optimizer: Optimizer, t: int, steps: int, share: float) -> None:
        """The schedule falls from ``t`` on, over so many steps, and from the rate as it is. Collective.

        ``share``: the schedule over its peak, where it rises. Raises where ranks disagree, before anything is changed.
        """
        self.ranks.agree_to_finish(optimizer, t, steps)
        self.replan(t + steps, t - 1, share * self.found.rise(t, self.rule.constants))

    def replan(self, total_steps: int | None, peak: float, share: float = 1.0) -> None:
        """The run has another length, and its schedule another peak; see :meth:`State.peaking`."""
        self._follow(dataclasses.replace(self.rule, total_steps=total_steps))
        self.memory.found = self.found.peaking(peak, share)

    def _follow(self, followed: rule.Rule) -> None:
        self.rule = followed
        self.ranks.terms = self._terms()

    def _resume(self, t: int) -> None:
        """The counter was set to ``t`` by a checkpoint: losses of the round so far are not in it."""
        self.losses.reset()
        self.meeting.resume()
        self.is_just_loaded, self._is_finished = True, False
        self.chronicle.resume(t, mid_round=self._sampler.progress > 0)

    def tensors(self, optimizer: Optimizer, t: int) -> dict[str, Any]:
        """What it holds in tensors at step ``t``, and the losses of the round so far: this rank's."""
        return Held(self.losses, self.found.snapshots, self._sampler.measure, self._snapshots).saved(optimizer, t)

    def check_tensors(self, search: Mapping[str, Any], optimizer: Optimizer, t: int) -> None:
        """Raise unless :meth:`load_tensors` can go on with it at step ``t``. Changes nothing."""
        if has_tensors(search):
            Held.read(search, optimizer, t, self._groups, self.seat)

    def load_tensors(self, search: Mapping[str, Any], optimizer: Optimizer, t: int) -> None:
        """Go on with :meth:`tensors`, after :meth:`load`. Checks everything before it changes anything."""
        if has_tensors(search):
            held = Held.read(search, optimizer, t, self._groups, self.seat)
            self.losses, kept, self._sampler.measure, self._snapshots = held
            self.memory.found = self.found._replace(snapshots=kept)
            self._begins_anew = False

    def base(self, schedule: Sequence[Rate], t: int) -> list[Rate]:
        """The rates of all ranks: none has another one."""
        return self.rates(schedule, t)

    def multipliers(self, t: int, seat: Seat) -> list[float]:
        """Of a rank's rates: all have the same."""
        return [1.0] * len(self.knobs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ResumableSearch):
            return False
        return repr(self.state()) == repr(other.state()) and self.chronicle.sink == other.chronicle.sink

    __hash__ = None  # type: ignore[assignment]  # equal by value and, like a list, not meant as a key


def _saved_memory(memory: Memory) -> dict[str, Any]:
    return {
        "search": saved(memory.found),
        "ended": memory.rounds,
        "highest": memory.highest,
        "falling": memory.is_falling,
        "has_losses": memory.has_losses,
        "quiet": memory.quiet,
        "rolled_back": memory.rolled_back,
        "peaks": list(memory.peaks),
        **{name: getattr(memory, name) for name in _TOLD},
        "progress": _saved_progress(memory.progress),
    }


def _check_memory(state: Mapping[str, Any]) -> None:
    """Raise unless :func:`_loaded_memory` can read it."""
    rules = {"search": pairs, "ended": count(0), "highest": number, "falling": flag, "has_losses": flag}
    later = {"quiet": count(0), "rolled_back": count(0), "peaks": _peaks_of(len(state["knobs"]))}
    later |= {**_TOLD, "progress": pairs}
    known = {name: rule for name, rule in later.items() if name in state}  # earlier versions have none
    check_state(state, {**rules, **known}, STATE_WORDS)
    check_saved(state["search"])
    if "progress" in state:
        check_state({str(name): value for name, value in state["progress"]}, _PROGRESS, STATE_WORDS)


def _loaded_memory(state: Mapping[str, Any]) -> Memory:
    later = state.get("quiet", 0), state.get("rolled_back", 0), list(state.get("peaks", ()))
    found, told = loaded(state["search"]), {name: state[name] for name in _TOLD if name in state}
    plain = found, state["ended"], state["highest"], state["falling"], state["has_losses"]
    return Memory(*plain, *later, **told, progress=_loaded_progress(state.get("progress")))


def _saved_progress(progress: Progress) -> list[list[Any]]:
    rows = {name: [list(row) for row in getattr(progress, name)] for name in _ROWS}
    return in_pairs({**rows, "before": progress.before, "turned": progress.turned, "fell": progress.fell})


def _loaded_progress(saved: Sequence[Sequence[Any]] | None) -> Progress:
    if saved is None:  # of an earlier version
        return UNKNOWN
    found: dict[str, Any] = {str(name): value for name, value in saved}
    rows: dict[str, Any] = {
        name: tuple(kind(row[0], int(row[1]), *row[2:3], *map(int, row[3:])) for row in found[name])
        for name, kind in _ROWS.items()
    }
    return Progress(**rows, before=found["before"], turned=int(found["turned"]), fell=found["fell"])


def _peaks_of(groups: int) -> Rule:
    return Rule(f"a list of at most {groups} rates", lambda value: some_rates.fits(value) and len(value) <= groups)


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


def has_tensors(search: Any) -> bool:
    """Whether there is something to load in what a search held in tensors. Raises for what is no dict."""
    if not isinstance(search, Mapping):
        raise ArgumentError(
            f"the state of a search does not fit this scheduler: it must be a dict, but got {shown(search)}; give what "
            "search_state_dict() returned"
        )
    return len(search) > 0


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
    def read(cls, saved: Mapping[str, Any], optimizer: Optimizer, t: int, groups: Sequence[int], seat: Seat) -> Held:
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
