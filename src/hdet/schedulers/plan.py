"""OneCycle and trapezoid: their phases, the rates in them, and runs that are finished or of unknown length.

A phase is a dict, as in torch's OneCycleLR: the step at which it ends, and the levels between which it goes, by their
names in a parameter group ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch.optim.lr_scheduler import OneCycleLR

from hdet.errors import ArgumentError
from hdet.schedulers.arguments import check_peak

_HOLD = 0.6
"""The part of a run after which a trapezoid falls."""


class LengthError(ArgumentError):
    """A run that was saved cannot go on with the length that was given.

    Args:
        must: what the length must be, and why.
        got: the length, None if it is unknown, and what follows from it.
        needed: the length that the run needs, in words; None: any greater one.
        max_lr: the peak rates that were found.
    """

    def __init__(self, must: str, got: str, needed: str | None, max_lr: str) -> None:
        again = f"give that, or begin a new run from the weights with max_lr={max_lr}, which was found"
        cure = "give more" if needed is None else again
        super().__init__(f"total_steps must be {must}, but got total_steps={got}; {cure}")
        self.must, self.got, self.needed, self.max_lr = must, got, needed, max_lr


class Plan(NamedTuple):
    """The length of a run and the phases of its schedule."""

    total_steps: float
    """Infinite if the length is unknown."""
    phases: Any
    """A list of dicts, as torch has it."""
    anneal: str
    """How rates go between the levels of a phase; in :data:`ANNEALINGS`."""

    @classmethod
    def of(cls, scheduler: OneCycleLR) -> Plan:
        """That of a scheduler, as it is now."""
        return cls(scheduler.total_steps, scheduler._schedule_phases, scheduler._anneal_func_type)

    @classmethod
    def saved_in(cls, state: Mapping[str, Any]) -> Plan:
        """That of a checkpoint."""
        anneal = state.get("_anneal_func_type", "cos")  # older torch saves a function in its place
        return cls(state["total_steps"], state["_schedule_phases"], anneal)

    def put(self, scheduler: OneCycleLR) -> None:
        """Write it into a scheduler."""
        scheduler.total_steps = self.total_steps  # type: ignore[assignment]  # torch only compares it
        scheduler._schedule_phases, scheduler._anneal_func_type = self.phases, self.anneal  # type: ignore[assignment]

    @property
    def length(self) -> int | None:
        """The length of the run in steps; None if it is unknown."""
        return None if self.total_steps == math.inf else int(self.total_steps)

    @property
    def falls_from(self) -> float:
        """The last step at the peak; minus infinity if there is none."""
        return float(max((one["end_step"] for one in self.phases if one["end_lr"] == "max_lr"), default=-math.inf))

    @property
    def is_finished(self) -> bool:
        """Whether it was made by :meth:`finished`."""
        return bool(self.phases[0]["start_lr"] == "max_lr")

    def trapezoid(self) -> Plan:
        """It is held at its peak after its rise, until 60 % of the run, and falls by 1 - sqrt."""
        rise, fall = self.phases[0], self.phases[-1]
        hold = _held(max(rise["end_step"], _HOLD * self.total_steps - 1))
        return Plan(self.total_steps, [rise, hold, fall], "trapezoid")

    def without_end(self) -> Plan:
        """It stays at its peak after its rise."""
        return self._replace(total_steps=math.inf, phases=[self.phases[0], _held(math.inf)])

    def finished(self, now: int, steps: int) -> Plan:
        """The rate falls over ``steps`` steps from ``now`` on. If it falls already, it falls faster or slower."""
        end = now + steps - 1
        if not self.has_fallen(now) or steps == 1:
            fall = {**_held(end), "end_lr": "min_lr", "end_momentum": "max_momentum"}
            return self._replace(total_steps=now + steps, phases=[_held(now - 1), fall])
        pace = (end - now) / (self.phases[-1]["end_step"] - now)
        falls = [phase for phase in self.phases if phase["end_lr"] != "max_lr"]
        moved = [{**phase, "end_step": now + pace * (phase["end_step"] - now)} for phase in falls]
        phases = [_held(now + pace * (self.falls_from - now)), *moved]
        return self._replace(total_steps=now + steps, phases=phases)

    def has_fallen(self, now: float) -> bool:
        """Whether it is below its peak at step ``now``, on its way down."""
        return now > self.falls_from

    def check_goes_on(self, saved: Plan, length: int | None, now: float, found: str) -> None:
        """Raise unless a run that was saved at step ``now`` can go on by this plan.

        ``saved``: its own; ``length``: that it was made with; ``found``: its ``max_lr``, in words.
        """
        if saved.has_fallen(now):
            since = f"its rate falls from step {saved.falls_from:g} on and this is step {now:g}"
            must = f"{length} as in the run that was saved, since {since}"
            raise LengthError(must, f"{self.length}", f"{length}", found)
        if self.has_fallen(now):
            must = f"such that the schedule falls after step {now:g}, at which the run was saved"
            got = f"{self.length}, with which it falls from step {self.falls_from:g} on"
            raise LengthError(must, got, None, found)

    def going_on(self, saved: Plan, now: float) -> Plan:
        """The plan for a run that was saved at step ``now``: if it is held already, it does not rise again."""
        is_held = now > saved.phases[0]["end_step"] and self.phases[1]["end_lr"] == "max_lr"
        return self._replace(phases=[saved.phases[0], *self.phases[1:]]) if is_held else self


def _held(until: float) -> dict[str, Any]:
    return {
        "end_step": until,
        "start_lr": "max_lr",
        "end_lr": "max_lr",
        "start_momentum": "base_momentum",
        "end_momentum": "base_momentum",
    }


Phase = Mapping[str, Any]
"""As in torch's states; see above."""


def phase_at(phases: Sequence[Phase], t: float) -> tuple[Phase, float]:
    """The phase that step ``t`` is in, which may be a fraction of a step, and which part of it is over.

    >>> phase_at([{"end_step": 4, "start_lr": "max_lr", "end_lr": "min_lr"}], 3)[1]
    0.75
    """
    start = end = 0.0
    for phase in phases:
        start, end = end, phase["end_step"]
        if t <= end:
            break
    if start == end and len(phases) > 1 and phase is phases[-1]:
        return phases[-2], 1.0  # pct_start leaves no step to the last phase: torch divides by zero
    return phase, (t - start) / (end - start)


def _cosine(start: Any, end: Any, part: float) -> Any:
    return end + (start - end) / 2.0 * (math.cos(math.pi * part) + 1)


def _linear(start: Any, end: Any, part: float) -> Any:
    return (end - start) * part + start


def _trapezoid(start: Any, end: Any, part: float) -> Any:
    """Up along a line, down by 1 - sqrt; it stays at the end.

    >>> [round(_trapezoid(1.0, 0.0, part), 3) for part in (0.0, 0.01, 0.25, 1.0, 1.1)]
    [1.0, 0.9, 0.5, 0.0, 0.0]
    """
    part = min(part, 1.0)
    return _linear(start, end, part if start < end else math.sqrt(part))


ANNEALINGS: dict[str, Callable[[Any, Any, float], Any]] = {"cos": _cosine, "linear": _linear, "trapezoid": _trapezoid}
"""The value between two levels, numbers or tensors of one element, when ``part`` of a phase is over."""


def annealing_in(state: Mapping[str, Any]) -> dict[str, str]:
    """The kind of annealing in a state of torch before 2.0, which has a function in place of its name."""
    kind = getattr(state.get("anneal_func"), "__name__", "").rpartition("_")[2]
    return {"_anneal_func_type": kind} if kind in ANNEALINGS else {}


def levels_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rates between which the schedule of each parameter group goes."""
    return [{name: group[name] for name in ("initial_lr", "max_lr", "min_lr")} for group in groups]


def take_in(groups: Sequence[dict[str, Any]], new: Collection[int], *, by_lr: bool, momenta: bool) -> None:
    """Give groups that were added to the optimizer the levels of the schedule. Raises before it changes any.

    Args:
        groups: of the optimizer.
        new: the numbers of those that were added.
        by_lr: the rate of a group that brings no ``max_lr`` is its peak, as that of the others was.
        momenta: whether they are cycled.
    """
    added = [(g, groups[g]) for g in new]
    for g, group in added:
        if "max_lr" not in group and not by_lr:
            raise ArgumentError(
                f"param_groups[{g}], which was added to the optimizer, has no max_lr, which must be its rate at the "
                'schedule\'s peak; give it: optimizer.add_param_group({"params": ..., "max_lr": 0.1})'
            )
        peak = group.get("max_lr", group["lr"])
        check_peak(peak, **{f"max_lr of param_groups[{g}]": peak})
    known = [group for g, group in enumerate(groups) if g not in new]
    example = next((group for group in known if group["max_lr"] > 0), known[0])
    for _, group in added:
        peak = group.setdefault("max_lr", float(group["lr"]))
        for name in ("initial_lr", "min_lr"):
            group.setdefault(name, peak * (float(example[name]) / (float(example["max_lr"]) or 1.0)))
        for name in ("base_momentum", "max_momentum") if momenta else ():
            group.setdefault(name, example[name])
