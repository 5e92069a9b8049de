"""What the figures show, as data: lines, bands and points over steps, and the captions.

figures.py draws them. Nothing here needs plotly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from statistics import geometric_mean
from types import MappingProxyType
from typing import Literal, NamedTuple

from hdet.report.data import Event, Numbers, Round, RunData, kind_of, known, mean

FEW = 12
"""The most knobs of a legend: a longer one would leave no room. The pointer shows their names too."""
_DOTS = 2000
"""The most dots of a figure, roughly."""
_FAR_ABOVE = 10.0
"""Dots that are this many times as high as all curves are not shown: how high a diverged loss was does not matter."""
_DECADES = 6
"""Powers of ten that are shown below the highest point, since schedules end many decades down."""
Style = Literal["line", "curve", "dashed", "thin", "band", "dots"]
"""Curves are several of a kind, which may lie on top of each other. A band is given by the line around it."""


class Line(NamedTuple):
    """Points in the order in which they are joined. The line is broken if ``y`` is None."""

    x: tuple[float, ...] = ()
    y: tuple[float | None, ...] = ()

    def __bool__(self) -> bool:
        return any(value is not None for value in self.y)

    @property
    def known(self) -> list[float]:
        """The heights, without gaps."""
        return known(self.y)


class Trace(NamedTuple):
    """One part of a figure."""

    name: str
    line: Line
    style: Style = "line"
    colour: int = 0
    """Index in the palette; -1 is grey."""
    labels: tuple[str, ...] = ()
    """One per point, shown at the pointer: which replica it is."""
    in_legend: bool = True


class Figure(NamedTuple):
    """One figure of the page: traces over steps, or bars."""

    title: str
    caption: str
    y_title: str = ""
    traces: tuple[Trace, ...] = ()
    is_log: bool = False
    y_range: tuple[float, float] = (0, 1)
    """What is shown at first; exponents of ten on a logarithmic axis."""
    steps: tuple[float, float] = (0, 1)
    events: tuple[Event, ...] = ()
    bars: Mapping[str, float] = MappingProxyType({})
    """Seconds by phase."""


def line(points: Iterable[tuple[float, float | None]]) -> Line:
    """A line through points.

    >>> line([(1, 0.5), (2, 0.4)])
    Line(x=(1, 2), y=(0.5, 0.4))
    """
    rows = list(points)
    return Line(tuple(x for x, _ in rows), tuple(y for _, y in rows))


def run_figures(run: RunData) -> tuple[Figure, ...]:
    """The figures of one run; those it has no data for are left out."""
    kinds = sorted({kind_of(knob) for knob in run.knobs}, key=lambda kind: (kind != "lr", kind))
    found = _aligned([*(_rates(run, kind) for kind in kinds), _losses(run), _slopes(run), _divergence(run), _time(run)])
    return tuple(figure._replace(events=run.events) for figure in found)


def comparison_figures(runs: Sequence[RunData]) -> tuple[Figure, ...]:
    """Curves of several runs over each other: of the loss, and of the learning rate."""
    losses, rates = ({run.name: pick(run) for run in runs} for pick in (_loss_of_rounds, base_rate))
    shown = curves("Loss", "Mean train loss of each round of every run.", losses, "train loss")
    shown += curves("Learning rate", "Base rate, the geometric mean over parameter groups.", rates, "learning rate")
    return _aligned(shown)


def curves(title: str, caption: str, lines: Mapping[str, Line], y_title: str) -> tuple[Figure, ...]:
    """One figure with a curve for each name; none if no curve has a point."""
    traces = [Trace(name, one, "curve", i) for i, (name, one) in enumerate(lines.items())]
    return _aligned([_figure(title, caption, y_title, traces)])


def _aligned(figures: Iterable[Figure | None]) -> tuple[Figure, ...]:
    """Those that there are, with one axis of steps, from the first to the last that any of them shows."""
    found = [figure for figure in figures if figure is not None]
    steps = [x for figure in found for trace in figure.traces for x in trace.line.x] or [0, 1]
    return tuple(figure._replace(steps=(min(steps), max(steps))) for figure in found)


def base_rate(run: RunData) -> Line:
    """One rate for the whole run: the geometric mean of its parameter groups'."""

    def common(row: Numbers) -> float | None:
        found = [value for value in known(row[g] for g in run.rates) if value > 0]
        return geometric_mean(found) if found else None

    return _course(run, common)


def _course(run: RunData, pick: Callable[[Numbers], float | None]) -> Line:
    """The base at each round's last step and at the step after it, if there is one."""
    rows = [(x, pick(row)) for r in run.rounds for x, row in ((r.step - 1, r.base_before), (r.step, r.base))]
    return line((x, y) for x, y in rows if y is not None and x != run.arguments.get("total_steps"))


def _rates(run: RunData, kind: str) -> Figure | None:
    """Base value, band of the replicas, plain schedule and estimated rate, of every knob of one kind."""
    knobs = [g for g, knob in enumerate(run.knobs) if kind_of(knob) == kind]
    bases = {run.knobs[g]: _course(run, itemgetter(g)) for g in knobs}
    inside = [r for r in run.rounds if r.step != run.arguments.get("total_steps")]
    plains = {f"plain {run.knobs[g]}": line((r.step, r.plain[g]) for r in inside) for g in knobs}
    if len({tuple(f"{y:.6g}" for y in one.known) for one in plains.values()}) == 1:  # they share it
        plains = {"plain schedule" if kind == "lr" else "as given": next(iter(plains.values()))}
    ends, few = [(r.step - 1, r) for r in run.rounds], len(bases) <= FEW
    bands = [_band([(x, [values[g] for values in r.values]) for x, r in ends], i) for i, g in enumerate(knobs)]
    traces = [
        *{band.line: band for band in reversed(bands)}.values(),  # the same area again would only be darker
        *(Trace(name, one, "curve", i, in_legend=few) for i, (name, one) in enumerate(bases.items())),
        *(Trace(name, one, "dashed", -1, in_legend=len(plains) == 1) for name, one in plains.items()),
        Trace("estimated rate", line((r.step, r.estimated_rate) for r in run.rounds if 0 in knobs), "thin", 2),
    ]
    caption = "Lines: base value, band: lowest to highest replica, grey dashes: if nothing were learned."
    if run.searched:
        caption = "Lines: the rate, grey dashes: if nothing were learned, thin line: estimated rate, "
        caption += "upright dashes: rollbacks, and where the search stopped."
    title = "Learning rate" if kind == "lr" else kind
    return _figure(title, caption, title.lower(), traces) if any(bases.values()) else None


def _band(rows: Iterable[tuple[float, Sequence[float | None]]], colour: int) -> Trace:
    """From the lowest to the highest known value; empty if it would have no width."""
    there = [(x, values) for x, row in rows if (values := known(row))]
    low, high = line((x, min(values)) for x, values in there), line((x, max(values)) for x, values in there)
    around = Line(low.x + high.x[::-1], low.y + high.y[::-1]) if low != high else Line()
    return Trace("", around, "band", colour, in_legend=False)


def _figure(title: str, caption: str, y_title: str, traces: Sequence[Trace], far: float = math.inf) -> Figure | None:
    """A figure, with a logarithmic axis if all is above 0 and the highest is more than 8 times as high as the lowest.

    All is shown at first, except what is many decades down, or more than ``far`` times as high as all lines. None if
    there is nothing to show.
    """
    shown = tuple(trace for trace in traces if trace.line)
    if not shown:
        return None
    drawn = [one for one in shown if one.style in ("line", "curve")]
    peak = max([y for one in drawn for y in one.line.known], default=math.inf)
    heights = [y for one in shown for y in one.line.known if y <= far * peak or peak <= 0]
    low, high = min(heights), max(heights)
    if low < 0 or high <= 8 * low:
        margin = 0.06 * (high - low) or 0.1 * abs(high) or 0.1
        return Figure(title, caption, y_title, shown, False, (low - margin, high + margin))
    low = max(min(y for y in heights if y > 0), high * 10**-_DECADES)
    return Figure(title, caption, y_title, shown, True, (math.log10(low) - 0.1, math.log10(high) + 0.1))


def _loss_of_rounds(run: RunData) -> Line:
    """The mean loss over replicas."""
    return line((r.step, r.loss) for r in _counted(run))


def _counted(run: RunData) -> list[Round]:
    """All rounds of an ensemble; of a search those that were not rolled back."""
    return [r for r in run.rounds if not run.searched or r.rolled_back_to is None]


def _losses(run: RunData) -> Figure | None:
    """The loss of each replica in each round, and their mean."""
    pairs = [pair for r in run.rounds for pair in zip(r.signals, r.losses, strict=True) if None not in pair]
    if any(signal != loss for signal, loss in pairs):
        dots, colour, dotted = "probe", 2, run.rounds
    elif run.searched:
        ruined = tuple(r for r in run.rounds if r.rolled_back_to is not None)
        dots, colour, dotted = "train, rounds that diverged", 4, ruined
    else:
        dots, colour, dotted = "train, every replica", 0, run.rounds
    points = [(r, i, y) for r in dotted for i, y in enumerate(r.signals) if y is not None]
    points = points[:: math.ceil(len(points) / _DOTS) or 1]
    labels = tuple(_label(run, r, i) for r, i, _ in points)
    traces = [
        _band([(r.step, r.losses) for r in _counted(run)], 0),
        Trace(dots, line((r.step, y) for r, _, y in points), "dots", colour, labels),
        Trace("train, mean of the round", _loss_of_rounds(run)),
    ]
    words = "The losses that were recorded, by step, round and replica."
    return _figure("Loss", words, "loss", traces, _FAR_ABOVE)


def _label(run: RunData, r: Round, i: int) -> str:
    """A replica's own values, learning rates first."""
    shown = (run.rates or tuple(range(len(run.knobs))))[:3]
    values = [f"{run.knobs[g]} {value:.3g}" for g in shown if (value := r.values[i][g]) is not None]
    return ", ".join([*([f"replica {i}"] if len(r.values) > 1 else []), *values])


def _slopes(run: RunData) -> Figure | None:
    """The hypergradient of every knob that has one, with two standard errors to both sides."""
    bands, histories = [], []
    for i, knob in enumerate(run.knobs):
        said = [(r.step, slope, r.errors[i]) for r in run.rounds if (slope := r.slopes[i]) is not None]
        bands.append(_band([(x, [y - 2 * error, y + 2 * error]) for x, y, error in said if error is not None], i))
        history = line((x, y) for x, y, _ in said)
        histories.append(Trace(knob, history, "curve", i, in_legend=len(run.knobs) <= FEW))
    traces = tuple(one for one in (*bands, *histories) if one.line)
    words = (
        "Up: above 0, a higher value would have been better. Down: below 0, a lower one. Band, if there is one: two "
    )
    words += "standard errors; if 0 is in it, there is no signal."
    heights = sorted(abs(y) for trace in traces for y in trace.line.known) or [1.0]
    most = heights[math.ceil(0.95 * len(heights)) - 1]  # a few that are far off are not shown at first
    limit = 1.1 * (heights[-1] if heights[-1] < 3 * most else most) or 1.0
    return Figure("Hypergradient", words, "hypergradient", traces, y_range=(-limit, limit)) if traces else None


def _divergence(run: RunData) -> Figure | None:
    """How far replicas were from their mean, relative to its norm."""
    seen = [(r.step, [distance or None for distance in r.divergences]) for r in run.rounds]
    middle = line((x, mean(values)) for x, values in seen)
    caption = "Distance of a replica's weights from the mean, relative to its norm, at the end of each round. "
    caption += "Line: mean over replicas; band: the nearest and the furthest."
    traces = [_band(seen, 3), Trace("mean over replicas", middle, colour=3, in_legend=False)]
    return _figure("Replica divergence", caption, "distance / norm", traces)


def _time(run: RunData) -> Figure | None:
    caption = "Seconds of the rank that wrote the journal; gather includes waiting for the others."
    return Figure("Where the time went", caption, bars=run.phases) if any(run.phases.values()) else None
