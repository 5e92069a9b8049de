"""What runs have found, in sentences and tables: one run, how to use its rate again, and several side by side.

Everything is computed from a :class:`hdet.report.data.RunData`; the page and the command line show it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from statistics import geometric_mean
from typing import Literal, NamedTuple

from hdet.checks import is_int
from hdet.report import numbers as say
from hdet.report.data import RunData, kind_of, known
from hdet.search.reporting import NEW_CYCLE, REPLAYS

CURE = "Do not use the rate of this run. Fix that first, as the run's warning says, and train again."
_LOSS = "last full round's train loss"


class Movement(NamedTuple):
    """A knob's first and last value; of a rate, at the peak of its schedule, so that decay does not count."""

    knob: str
    start: float
    end: float

    @property
    def moved(self) -> bool:
        """Whether the two differ by more than a hundredth."""
        return not math.isclose(self.start, self.end, rel_tol=0.01)


def movements(run: RunData) -> tuple[Movement, ...]:
    """The movement of every knob of which the journal says enough."""
    found = (_movement(run, g) for g in range(len(run.knobs)))
    return tuple(one for one in found if one is not None)


def _movement(run: RunData, g: int) -> Movement | None:
    bases = known(value for r in run.rounds for value in (r.base_before[g], r.base[g]))
    if not bases:
        return None
    knob, first = run.knobs[g], run.starts[g]
    learned, plain = known(r.learned[g] for r in run.rounds), known(r.plain[g] for r in run.rounds)
    if run.decays_by_itself or not (learned and first and plain):
        return Movement(knob, max(bases) if run.decays_by_itself else bases[0], bases[-1])
    found, factor = run.rounds[-1].found[g], learned[-1] / first
    if found is not None and factor != 1.0:  # as the log has it
        return Movement(knob, found / factor, found)
    start = _given_rate(run, g) or max(plain, key=abs)
    return Movement(knob, start, start * factor)


def _given_rate(run: RunData, g: int) -> float | None:
    """The rate that the user gave: the peak, which a run that ended early has not reached; of a search, the guess."""
    given = run.arguments.get("guess" if run.searched else "max_lr") if g in run.rates else None
    if isinstance(given, list):
        given = given[g] if g < len(given) else None
    return say.finite(given)


def _rate_movements(run: RunData) -> list[Movement]:
    return [m for m in movements(run) if kind_of(m.knob) == "lr"]


def base_movement(run: RunData) -> Movement | None:
    """The movement of the learning rate as one: of a search, that of its first group; otherwise the geometric mean."""
    found = [m for m in _rate_movements(run) if m.start > 0 and m.end > 0]
    found = found[:1] if run.searched else found
    if not found:
        return None
    return Movement("base rate", geometric_mean(m.start for m in found), geometric_mean(m.end for m in found))


def verdict(run: RunData) -> str:
    """One sentence: how the rates moved, and the last loss."""
    parts = [_rate_words(run), f"the search has {run.stopped}" if run.stopped else ""]
    others = [m for m in movements(run) if kind_of(m.knob) != "lr" and m.moved]
    parts += ["{} from {} to {}".format(m.knob, *say.rates(m.start, m.end)) for m in others]
    parts.append("" if run.loss is None else f"{_LOSS} {say.loss(run.loss)}")
    text = "; ".join(filter(None, parts)) or "no round has ended yet"
    return f"{text[0].upper()}{text[1:]}."


def _rate_words(run: RunData) -> str:
    base, rounds = base_movement(run), f"{run.length} round{'s' if run.length != 1 else ''}"
    if base is None:
        return ""
    if not base.moved:
        return f"peak rate stayed at {say.rate(base.start)} over {rounds}"
    start, end = say.rates(base.start, base.end)
    start, end = _listed(run, "start", start), _listed(run, "end", end)
    what, more = ("base rate", ", its decay included") if run.decays_by_itself else ("peak rate", "")
    return f"{what} moved from {start} to {end} in {rounds}{more}"


def compared(runs: Sequence[RunData]) -> str:
    """Which run ended lowest, in one sentence."""
    best = min(runs, key=_rank)
    if best.loss is None:
        return f"{len(runs)} runs, none of which has a final loss."
    return f"{best.name} ended lowest, at {say.loss(best.loss)}."


class Advice(NamedTuple):
    """How to use what a run has found."""

    found: str
    """A sentence."""
    uses: tuple[tuple[str, str], ...]
    """Alternative lines to paste, and what each does."""

    def __str__(self) -> str:
        return f"{self.found} Use again: {'; '.join(f'`{code}` {does}' for code, does in self.uses)}."


def advice(run: RunData) -> Advice | None:
    """How to use the found rate; None if nothing was learned, or if it must not be used."""
    base = base_movement(run)
    if base is None or run.alarms or run.stopped:
        return None
    path = json.dumps(str(run.path), ensure_ascii=False)
    again = f"hdet.schedule_from({path}, optimizer)", REPLAYS
    length = run.arguments.get("total_steps", 0)  # None if it is unknown
    so_far = "" if is_int(length) and run.rounds[-1].step >= length else " so far"
    peaks = _listed(run, "end", say.rate(base.end))
    found = f"{'Found' if base.moved else 'Stayed at'} {peaks}{so_far}."
    has_peak = (run.searched or "max_lr" in run.arguments) and run.arguments.get("schedule", "trapezoid") == "trapezoid"
    if run.decays_by_itself or not has_peak:
        return Advice(found, (again,))
    return Advice(found, ((f"max_lr={peaks}", NEW_CYCLE), again))


def _listed(run: RunData, which: Literal["start", "end"], one: str) -> str:
    """The rates of all parameter groups; ``one`` if they do not differ."""
    found = [say.rate(getattr(move, which)) for move in _rate_movements(run)]
    return one if len(set(found)) <= 1 else f"[{', '.join(found)}]"


class Table(NamedTuple):
    """A table of texts, which the page escapes. A row has a cell for each column.

    >>> Table(["run", "final loss"], [["fixed", "3.294"]], caption="Ablation").rows
    [['fixed', '3.294']]
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


def table_of(runs: Sequence[RunData]) -> Table:
    """Last loss, rate given and found, rounds and seconds of every run, the lowest loss first."""
    columns = ("run", _LOSS, "rate given", "peak found", "rounds", "time")
    return Table(columns, [_row(run) for run in sorted(runs, key=_rank)], "Runs, the lowest loss first")


def _row(run: RunData) -> tuple[str, ...]:
    base, seconds = base_movement(run), sum(run.phases.values())
    given, found = say.rates(base.start, base.end) if base else (say.NOTHING, say.NOTHING)
    return (run.name, say.loss(run.loss), given, found, str(run.length), say.seconds(seconds or None))


def _rank(run: RunData) -> float:
    """For sorting: a run without a loss is the last."""
    return math.inf if run.loss is None else run.loss
