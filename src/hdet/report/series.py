"""What the figures show, as data: lines, bands and points over steps, and the captions.

figures.py draws them. Nothing here needs plotly.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from statistics import geometric_mean
from types import MappingProxyType
from typing import Literal, NamedTuple

from hdet.report.data import Event, Numbers, Round, RunData, Slope, kind_of, mean

LIMIT = 1000
"""The most points of a line: more than a screen has columns."""
FEW = 12
"""The most knobs of a legend: a longer one would leave no room. The pointer shows their names too."""
_FAR_ABOVE = 10.0
"""Dots that are this many times as high as all curves are not shown: how high a diverged loss was does not matter."""
_DECADES = 6
"""Powers of ten that are shown below the highest point, since schedules end many decades down."""
_STEPS, _ROUNDS, _VALIDATION = "train, every step", "train, mean of the round", "validation"
_COMPARED = {_VALIDATION: "Validation loss", _STEPS: "Train loss", _ROUNDS: "Mean train loss of a round"}
"""Losses by which runs may be compared, the best first, and their titles."""
Style = Literal["line", "curve", "bold", "fine", "dashed", "thin", "band", "dots", "verdicts"]
"""Curves are several of a kind, which may lie on top of each other. A bold one is in front of the fine ones that it is
compared with. A band is given by the line around it."""


class Line(NamedTuple):
    """Points in the order in which they are joined. The line is broken if ``y`` is None."""

    x: tuple[float, ...] = ()
    y: tuple[float | None, ...] = ()

    def __bool__(self) -> bool:
        return any(value is not None for value in self.y)

    @property
    def known(self) -> list[float]:
        """The heights, without gaps."""
        return [value for value in self.y if value is not None]


class Trace(NamedTuple):
    """One part of a figure."""

    name: str
    line: Line
    style: Style = "line"
    colour: int = 0
    """Index in the palette; -1 is grey."""
    labels: tuple[str, ...] = ()
    """One per point, shown at the pointer: which replica it is, or what the round has said."""
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


def line(points: Iterable[tuple[float, float | None]], limit: int = LIMIT) -> Line:
    """A line through points; of a long one each stretch's lowest and highest point, so that no spike is lost.

    First and last point and gaps are kept.

    >>> line([(1, 0.5), (2, 0.4)])
    Line(x=(1, 2), y=(0.5, 0.4))
    >>> spike = line(((x, 9.0 if x == 1234 else 0.0) for x in range(5000)), limit=100)
    >>> len(spike.x) <= 102, max(spike.known), spike.x[0], spike.x[-1]
    (True, 9.0, 0, 4999)
    """
    rows = list(points)
    if len(rows) > limit:
        size = math.ceil(3 * len(rows) / limit)
        stretches = [range(i, min(i + size, len(rows))) for i in range(0, len(rows), size)]
        known = [[(y, i) for i in stretch if (y := rows[i][1]) is not None] for stretch in stretches]
        gaps = [next((i for i in stretch if rows[i][1] is None), stretch[0]) for stretch in stretches]
        extremes = [i for some in known if some for _, i in (min(some), max(some))]
        rows = [rows[i] for i in sorted({0, len(rows) - 1, *gaps, *extremes})]
    return Line(tuple(x for x, _ in rows), tuple(y for _, y in rows))


def run_figures(run: RunData) -> tuple[Figure, ...]:
    """The figures of one run; those it has no data for are left out."""
    kinds = sorted({kind_of(knob) for knob in run.knobs} or {"lr"}, key=lambda kind: (kind != "lr", kind))
    found = [
        *(_rates(run, kind) for kind in kinds),
        _losses(run),
        _slopes(run),
        _divergence(run),
        _time(run),
    ]
    steps = _span([*(x for r in run.rounds for x in (r.step - 1, r.step)), *run.curve.steps])
    return tuple(one._replace(steps=steps, events=events(run)) for one in found if one is not None)


def comparison_figures(runs: Sequence[RunData]) -> tuple[Figure, ...]:
    """Curves of several runs over each other: of the best loss that all runs with a loss have, and of the rate.

    hdet's runs are bold beside those of plain schedulers, which have no rounds.
    """
    rows = [{trace.name: trace.line for trace in _loss_traces(run)} for run in runs]
    shared = [name for name in _COMPARED if all(name in row for row in rows if row.keys() & _COMPARED.keys())]
    kind = _COMPARED[shared[0]] if shared else "Validation or train loss"
    losses = [next((row[name] for name in shared[:1] or _COMPARED if name in row), Line()) for row in rows]
    rates = [base_rate(run) for run in runs]
    steps = _span(x for one in (*losses, *rates) for x in one.x)
    is_mixed = len({bool(run.rounds) for run in runs}) > 1
    styles: tuple[Style, Style] = ("fine", "bold") if is_mixed else ("curve", "curve")

    def drawn(title: str, caption: str, lines: list[Line], y_title: str) -> tuple[Figure, ...]:
        pairs = enumerate(zip(runs, lines, strict=True))
        traces = [Trace(run.name, one, styles[bool(run.rounds)], i) for i, (run, one) in pairs]
        return (_figure(title, caption, y_title, traces)._replace(steps=steps),) if any(lines) else ()

    rate = "Base rate, the geometric mean over parameter groups."
    shown = drawn("Loss", f"{kind} of every run.", losses, kind.lower())
    return shown + drawn("Learning rate", rate, rates, "learning rate")


def base_rate(run: RunData) -> Line:
    """One rate for the whole run: the geometric mean of its parameter groups'; without rounds that of its curve."""
    if not run.rounds:
        return line((x, y) for x, y in zip(run.curve.steps, run.curve.rates, strict=True) if y is not None)

    def common(row: Numbers) -> float | None:
        known = [value for g in run.rates if (value := row[g]) is not None and value > 0]
        return geometric_mean(known) if known else None

    return _course(run, common)


def _course(run: RunData, pick: Callable[[Numbers], float | None]) -> Line:
    """The base at each round's last step and at the step after it, if there is one."""
    rows = [(x, pick(row)) for r in run.rounds for x, row in ((r.step - 1, r.base_before), (r.step, r.base))]
    return line((x, y) for x, y in rows if y is not None and x != run.total_steps)


def _rates(run: RunData, kind: str) -> Figure | None:
    """Base value, band of the replicas, plain schedule and estimated rate, of every knob of one kind."""
    knobs = [g for g, knob in enumerate(run.knobs) if kind_of(knob) == kind and run.rounds]
    bases = {run.knobs[g]: _course(run, itemgetter(g)) for g in knobs} or {"lr": base_rate(run)}
    inside = [r for r in run.rounds if r.step != run.total_steps]
    plains = {f"plain {run.knobs[g]}": line((r.step, r.plain[g]) for r in inside) for g in knobs}
    if len({tuple(f"{y:.6g}" for y in one.known) for one in plains.values()}) == 1:  # they share it
        plains = {"plain schedule" if kind == "lr" else "as given": next(iter(plains.values()))}
    ends, few = [(r.step - 1, r) for r in run.rounds], len(bases) <= FEW
    bands = [_band([(x, [row.values[g] for row in r.replicas]) for x, r in ends], i) for i, g in enumerate(knobs)]
    traces = [
        *{band.line: band for band in reversed(bands)}.values(),  # the same area again would only be darker
        *(Trace(name, one, "curve", i, in_legend=few) for i, (name, one) in enumerate(bases.items())),
        *(Trace(name, one, "dashed", -1, in_legend=len(plains) == 1) for name, one in plains.items()),
        Trace("estimated rate", line((r.step, r.estimated_rate) for r in run.rounds if 0 in knobs), "thin", 2),
        *(_verdicts(run.knobs[g], [(x, r.base_before[g], r.slopes[g]) for x, r in ends]) for g in knobs),
    ]
    if not any(bases.values()):
        return None
    lines = "Lines: the rate" if run.searched else "Lines: base value" if run.rounds else "Line: the fixed schedule"
    words = {"band": "band: lowest to highest replica", "dashed": "grey dashes: if nothing were learned"}
    words |= {"thin": "thin line: estimated rate", "verdicts": "markers: what the round said"}
    there = {trace.style for trace in traces if trace.line}
    parts = [lines, *(text for style, text in words.items() if style in there)]
    if any(one.is_setback for one in events(run)):
        parts.append("upright dashes: rollbacks, and where the search stopped")
    title, y_title = ("Learning rate", "learning rate") if kind == "lr" else (kind, kind)
    return _figure(title, f"{', '.join(parts)}.", y_title, traces)


def _band(rows: Iterable[tuple[float, list[float | None]]], colour: int) -> Trace:
    """From the lowest to the highest known value; empty if it would have no width."""
    known = [(x, values) for x, row in rows if (values := [value for value in row if value is not None])]
    low, high = line((x, min(values)) for x, values in known), line((x, max(values)) for x, values in known)
    around = Line(low.x + high.x[::-1], low.y + high.y[::-1]) if low != high else Line()
    return Trace("", around, "band", colour, in_legend=False)


def _verdicts(knob: str, rounds: Iterable[tuple[float, float | None, Slope | None]]) -> Trace:
    """Markers at the rounds that have said something about a knob."""
    said = [(x, y, slope.word) for x, y, slope in rounds if slope is not None and y is not None]
    said = said[:: math.ceil(len(said) / LIMIT) or 1]
    marks = Line(tuple(x for x, _, _ in said), tuple(y for _, y, _ in said))
    return Trace(knob, marks, "verdicts", labels=tuple(word for _, _, word in said), in_legend=False)


def _figure(title: str, caption: str, y_title: str, traces: Sequence[Trace], far: float = math.inf) -> Figure:
    """A figure, with a logarithmic axis if all is above 0 and the highest is more than 8 times as high as the lowest.

    All is shown at first, except what is many decades down, or more than ``far`` times as high as all lines.
    """
    shown = tuple(trace for trace in traces if trace.line)
    curves = [one for one in shown if one.style in ("line", "curve", "bold", "fine")]
    peak = max([y for one in curves for y in one.line.known], default=math.inf)
    known = [y for one in shown for y in one.line.known if y <= far * peak or peak <= 0]
    low, high = min(known), max(known)
    if low < 0 or high <= 8 * low:
        margin = 0.06 * (high - low) or 0.1 * abs(high) or 0.1
        return Figure(title, caption, y_title, shown, False, (low - margin, high + margin))
    low = max(min(y for y in known if y > 0), high * 10**-_DECADES)
    return Figure(title, caption, y_title, shown, True, (math.log10(low) - 0.1, math.log10(high) + 0.1))


def _loss_traces(run: RunData) -> list[Trace]:
    """Losses by replica and round, and the run's own curves; those without points are left out."""
    replicas = [row for r in run.rounds for row in r.replicas if row.signal is not None and row.loss is not None]
    probed = any(row.signal != row.loss for row in replicas)
    dots = (
        ("probe", 2) if probed else ("train, rounds that diverged", 4) if run.searched else ("train, every replica", 0)
    )
    kept = [r for r in run.rounds if probed or not run.searched or r.rolled_back_to is None]
    dotted = [r for r in run.rounds if probed or not run.searched or r.rolled_back_to is not None]
    points = [(r, i, y) for r in dotted for i, row in enumerate(r.replicas) if (y := row.signal) is not None]
    points = points[:: math.ceil(len(points) / (2 * LIMIT)) or 1]
    labels, curve = tuple(_label(run, r, i) for r, i, _ in points), run.curve
    validation = line((x, y) for x, y in zip(curve.steps, curve.validation, strict=True) if y is not None)
    traces = [
        Trace(_STEPS, line(zip(curve.steps, curve.train, strict=True)), "thin", -1),
        _band([(r.step, [row.loss for row in r.replicas]) for r in kept], 0),
        Trace(dots[0], Line(tuple(r.step for r, *_ in points), tuple(y for *_, y in points)), "dots", dots[1], labels),
        Trace(_ROUNDS, line((r.step, r.loss) for r in kept)),
        Trace(_VALIDATION, validation, colour=1),
    ]
    return [one for one in traces if one.line]


def _label(run: RunData, r: Round, i: int) -> str:
    """A replica's own values, learning rates first."""
    shown = (run.rates or tuple(range(len(run.knobs))))[:3]
    values = [f"{run.knobs[g]} {value:.3g}" for g in shown if (value := r.replicas[i].values[g]) is not None]
    return ", ".join([*([f"replica {i}"] if len(r.replicas) > 1 else []), *values])


def _losses(run: RunData) -> Figure | None:
    """Every replica's loss in every round, and the run's own curves."""
    traces, words = _loss_traces(run), "The losses that were recorded, by step, round and replica."
    return _figure("Loss", words, "loss", traces, _FAR_ABOVE) if traces else None


def _slopes(run: RunData) -> Figure | None:
    """The hypergradient of every knob that has one, with two standard errors to both sides."""
    bands, histories, said = [], [], []
    for i, knob in enumerate(run.knobs):
        known = [(r.step, slope) for r in run.rounds if (slope := r.slopes[i]) is not None]
        errors = [(x, one.value, 2 * one.error) for x, one in known if one.error is not None]
        bands.append(_band([(x, [y - error, y + error]) for x, y, error in errors], i))
        history = line((x, one.value) for x, one in known)
        histories.append(Trace(knob, history, "curve", i, in_legend=len(run.knobs) <= FEW))
        said.append(_verdicts(knob, [(x, one.value, one) for x, one in known]))
    words = "Up: above 0, a higher value would have been better. Down: below 0, a lower one."
    words += " Band: two standard errors; no signal: 0 is in it." if any(band.line for band in bands) else ""
    traces = tuple(one for one in (*bands, *histories, *said) if one.line)
    heights = sorted(abs(y) for trace in traces for y in trace.line.known) or [1.0]
    most = heights[math.ceil(0.95 * len(heights)) - 1]  # a few that are far off are not shown at first
    limit = 1.1 * (heights[-1] if heights[-1] < 3 * most else most) or 1.0
    return Figure("Hypergradient", words, "hypergradient", traces, y_range=(-limit, limit)) if traces else None


def _divergence(run: RunData) -> Figure | None:
    """How far replicas were from their mean, relative to its norm."""
    seen = [(r.step, [row.divergence or None for row in r.replicas]) for r in run.rounds]
    middle = line((x, mean(values)) for x, values in seen)
    caption = "Distance of a replica's weights from the mean, relative to its norm, at the end of each round. "
    caption += "Line: mean over replicas; band: the nearest and the furthest."
    traces = [_band(seen, 3), Trace("mean over replicas", middle, colour=3, in_legend=False)]
    return _figure("Replica divergence", caption, "distance / norm", traces) if middle else None


def _time(run: RunData) -> Figure | None:
    caption = "Seconds of the rank that wrote the journal; gather includes waiting for the others."
    return Figure("Where the time went", caption, bars=bars) if (bars := seconds_by_phase(run)) else None


def seconds_by_phase(run: RunData) -> dict[str, float]:
    """What each phase of the rounds took; the rest is what the run took outside its rounds (evaluation, start)."""
    spent, inside = dict(run.phases), math.fsum(run.phases.values())
    rest = (run.seconds or 0.0) - inside
    more = {"outside rounds": rest} if rest > 0.01 * inside > 0 else {}
    return spent | more if inside > 0 else {}


def _span(steps: Iterable[float]) -> tuple[float, float]:
    """The first and the last step of all that is shown, so that figures can have one axis."""
    known = list(steps) or [0, 1]
    return min(known), max(known)


def lengthening(run: RunData) -> bool:
    """Whether rounds grow longer, so that a logarithmic axis of steps shows them evenly."""
    pairs = itertools.pairwise(itertools.chain([0], run.steps))
    lengths = array("q", (after - before for before, after in pairs if after > before))
    return len(lengths) > 2 and lengths[len(lengths) // 2] >= 2 * lengths[0] and max(lengths) >= 8 * lengths[0]


def events(run: RunData) -> tuple[Event, ...]:
    """What happened in the run, and where it was resumed."""
    return tuple(sorted([*(Event(step, "resumed") for step in run.resumes), *run.events]))
