"""Several runs over each other: their curves, and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hdet.errors import ArgumentError
from hdet.report import numbers as say
from hdet.report.data import RunData
from hdet.report.lines import Line
from hdet.report.series import Losses, base_rate, losses, time_shares
from hdet.report.verdict import base_movement, ending

__all__ = ["Comparison", "Table", "compare", "table_of"]


class Comparison(NamedTuple):
    """One line per run. A line without points: the run has none."""

    names: tuple[str, ...]
    kind: str
    """Which loss: the best that all runs with a loss have, so that like is compared with like."""
    losses: tuple[Line, ...]
    rates: tuple[Line, ...]


@dataclass(frozen=True)
class Table:
    """A table of texts for the page, which escapes them.

    >>> Table(["run", "final loss"], [["fixed", "3.294"]], caption="Ablation").rows
    [['fixed', '3.294']]
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ArgumentError(
                    f"a row must have one cell per column, here {len(self.columns)}, but got {row}; fill it with ''"
                )


def compare(runs: Sequence[RunData]) -> Comparison:
    """The runs' curves, all of one kind."""
    seen = [losses(run) for run in runs]
    kinds = {"Validation loss": _validation, "Train loss": _train, "Mean train loss of a round": _mean}
    with_loss = [one for one in seen if any(pick(one) for pick in kinds.values())]
    shared = [kind for kind, pick in kinds.items() if with_loss and all(pick(one) for one in with_loss)]
    kind = shared[0] if shared else "Validation or train loss"
    lines = tuple(kinds[kind](one) if shared else _best(one) for one in seen)
    return Comparison(tuple(run.name for run in runs), kind, lines, tuple(base_rate(run) for run in runs))


def table_of(runs: Sequence[RunData]) -> Table:
    """Last loss, rate given and found, rounds and seconds of every run, the lowest loss first; crashed ones last."""
    rows = [_row(run) for run in sorted(runs, key=_rank)]
    words = {ending(run).words for run in runs}
    loss = words.pop() if len(words) == 1 else "last loss"
    return Table(("run", loss, "rate given", "peak found", "rounds", "time"), rows, "Runs, the lowest loss first")


def _row(run: RunData) -> tuple[str, ...]:
    base, end = base_movement(run), ending(run)
    total = run.summary.seconds or sum(one.seconds for one in time_shares(run)) or None
    loss = "crashed" if run.summary.crashed else say.loss(end.loss)
    start, found = say.rates(base.start, base.end) if base else (say.NOTHING, say.NOTHING)
    if not run.rounds:
        found = "fixed"
    return (run.name, loss, start, found, str(run.number_of_rounds), say.seconds(total))


def _rank(run: RunData) -> tuple[bool, float]:
    loss = ending(run).loss
    return (run.summary.crashed or loss is None, loss if loss is not None else 0.0)


def _validation(one: Losses) -> Line:
    return one.validation


def _train(one: Losses) -> Line:
    return one.train


def _mean(one: Losses) -> Line:
    return one.mean


def _best(one: Losses) -> Line:
    return one.validation or one.train or one.mean
