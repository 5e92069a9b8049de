"""A search in a checkpoint: plain numbers in lists, and tensors beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.optim import Optimizer

from hdet.auto.measure import Measure
from hdet.auto.rule import Phase, Snapshot, State
from hdet.auto.search import KIND, Memory, Search
from hdet.auto.telling import ADOPTED, Found
from hdet.checks import (
    STATE_VERSION,
    STATE_WORDS,
    check_run,
    in_pairs,
    reading,
    run_state,
    shown,
)
from hdet.distributed.group import Seat
from hdet.errors import ArgumentError
from hdet.parameters import Rate
from hdet.rollback.losses import Losses
from hdet.rollback.saving import fields_of, from_fields, losses_of, plain
from hdet.rollback.snapshots import Snapshots

_FIRST = "load the scheduler's own state first, of the same checkpoint, or leave the search out"


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
        with reading(STATE_WORDS):
            _read(state)

    @staticmethod
    def found_in(state: Mapping[str, Any]) -> Found:
        """What was found, of a state that :meth:`check` has seen."""
        return _read(state)[0].told

    def load(self, state: Mapping[str, Any], total_steps: int | None, t: int) -> None:
        """Go on at step ``t`` from what :meth:`check` has seen.

        Without :meth:`load_tensors`: from an origin of its own, and there is nothing to go back to yet.
        """
        memory, searches, made, begun = _read(state)
        self.rule = dataclasses.replace(self.rule, total_steps=total_steps, searches=searches)
        self.take_over()
        self.memory, self._sampler.made, self._sampler.begun = memory, made, begun
        self._begins_anew = self.found.phase is Phase.SEARCHING
        self._resume(t, state)

    def adopt(self, total_steps: int, t: int) -> None:
        """Go on from a checkpoint of torch's own scheduler: from its rate, without a search."""
        self.rule = dataclasses.replace(self.rule, total_steps=total_steps)
        if t > 0:
            self.memory.found, self.memory.kept_for = self.rule.kept(), ADOPTED
        self._resume(t, {})

    def finish(self, optimizer: Optimizer, t: int, steps: int, share: float) -> None:
        """The schedule falls from ``t`` on, over so many steps, and from the rate as it is. Collective.

        ``share``: the schedule over its peak, where it rises. Raises where ranks disagree, before anything is changed.
        """
        self.ranks.agree_to_finish(optimizer, t, steps)
        self.replan(t + steps, t - 1, share * self.found.rise(t, self.rule.constants))

    def replan(self, total_steps: int | None, peak: float, share: float = 1.0) -> None:
        """The run has another length, and its schedule another peak; see :meth:`State.peaking`."""
        self.rule = dataclasses.replace(self.rule, total_steps=total_steps)
        self.memory.found = self.found.peaking(peak, share)

    def _resume(self, t: int, state: Mapping[str, Any]) -> None:
        """The counter was set to ``t`` by a checkpoint: losses of the round so far are not in it."""
        self.losses.reset()
        self.meeting.resume({**state, "go_back": self._go_back, "highest": self._bounds.lowest})
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
    """By name; snapshots are saved with what lies in them."""
    found = in_pairs(fields_of(memory.found._replace(snapshots=())))
    return {**fields_of(memory), "found": found}


def _read(state: Mapping[str, Any]) -> tuple[Memory, bool, int, int]:
    """What is remembered, whether it searches, and how many steps and rounds were made."""
    found = from_fields(State, dict(state["found"]))
    memory = from_fields(Memory, {**state, "found": plain(found)})
    return memory, bool(state["searches"]), int(state["made"]), int(state["begun"])


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
        with reading("the state of a search", _FIRST):
            if (saved["version"], saved["step"]) != (STATE_VERSION, t):
                raise ValueError(
                    f"it is of version {saved['version']} at step {saved['step']}, the scheduler {STATE_VERSION} at {t}"
                )
            return cls(
                losses_of(saved["losses"], seat),
                tuple(Snapshot(int(step), int(slot)) for step, slot in saved["kept"]),
                Measure.loaded(saved["measure"], groups, optimizer),
                Snapshots.loaded(saved["snapshots"], optimizer),
            )
