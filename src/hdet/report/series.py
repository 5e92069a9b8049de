"""What the figures show: computed here, drawn elsewhere. A line has points over steps, with gaps, and few enough of
them for a browser."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, geometric_mean
from typing import Literal, NamedTuple

from hdet.report.data import WORDS, Numbers, Round, RunData, Word

LIMIT = 1000
"""Points that a line may have: more than a screen has columns."""

Dots = Literal["replicas", "probe", "ruined"]
"""What single points are: train losses of replicas, losses of a probe batch (``signal=ProbeLoss``), or train losses of
those rounds of a search that were ruined."""


class Line(NamedTuple):
    """Points in the order in which they are joined. Where ``y`` is None the line is broken."""

    x: tuple[float, ...] = ()
    y: tuple[float | None, ...] = ()

    def __bool__(self) -> bool:
        return any(value is not None for value in self.y)


class Band(NamedTuple):
    """What lies between two lines."""

    low: Line
    high: Line

    def __bool__(self) -> bool:
        """Whether it is wider than a line."""
        return any(a is not None and b is not None and a < b for a, b in zip(self.low.y, self.high.y, strict=False))

    def outline(self) -> Line:
        """Around it: forth below and back above, one closed piece for each stretch without a gap.

        >>> Band(Line((1, 2), (0.1, 0.2)), Line((1, 2), (0.3, 0.4))).outline()
        Line(x=(1, 2, 2, 1), y=(0.1, 0.2, 0.4, 0.3))
        """
        x: list[float] = []
        y: list[float | None] = []
        for low, high in zip(_pieces(self.low), _pieces(self.high), strict=False):
            around = [*low, *reversed(high)]
            if x:
                around.insert(0, (around[0][0], None))
            x += [point[0] for point in around]
            y += [point[1] for point in around]
        return Line(tuple(x), tuple(y))


def line(points: Iterable[tuple[float, float | None]], limit: int = LIMIT) -> Line:
    """A line through points; broken where a run went back to an earlier step, and thinned.

    >>> line([(1, 0.5), (2, 0.4), (1, 0.5)])
    Line(x=(1, 2, 1, 1), y=(0.5, 0.4, None, 0.5))
    """
    x: list[float] = []
    y: list[float | None] = []
    for step, value in points:
        if x and step < x[-1]:
            x.append(step)
            y.append(None)
        x.append(step)
        y.append(value)
    return thinned(Line(tuple(x), tuple(y)), limit)


def _pieces(broken: Line) -> list[list[tuple[float, float | None]]]:
    """The stretches between gaps."""
    points = zip(broken.x, broken.y, strict=True)
    groups = itertools.groupby(points, key=lambda point: point[1] is None)
    return [list(piece) for gap, piece in groups if not gap]


def alike(a: Line, b: Line) -> bool:
    """Whether two lines are one, up to rounding.

    >>> alike(Line((1,), (0.1 + 0.2,)), Line((1,), (0.3,)))
    True
    """
    if a.x != b.x:
        return False
    return all(
        u == v or (u is not None and v is not None and math.isclose(u, v)) for u, v in zip(a.y, b.y, strict=True)
    )


def span(lines: Iterable[Line]) -> tuple[float, float]:
    """The first and the last step of all of them.

    >>> span([Line((3, 9), (0.1, 0.2)), Line((1,), (0.1,)), Line()])
    (1, 9)
    """
    steps = [x for one in lines for x in one.x]
    return (min(steps), max(steps)) if steps else (0, 1)


def thinned(long: Line, limit: int = LIMIT) -> Line:
    """At most about ``limit`` points: of each stretch the lowest and the highest, so that no spike is lost.

    First and last point and gaps are kept.

    >>> spike = [0.0] * 5000
    >>> spike[1234] = 9.0
    >>> short = thinned(Line(tuple(range(5000)), tuple(spike)), limit=100)
    >>> len(short.x) <= 102, max(short.y), short.x[0], short.x[-1]
    (True, 9.0, 0, 4999)
    """
    size = len(long.x)
    if size <= limit:
        return long
    stretches = max(1, limit // 3)  # a lowest, a highest and perhaps a gap of each
    edges = [i * size // stretches for i in range(stretches + 1)]
    keep = {0, size - 1}
    for begin, end in itertools.pairwise(edges):
        keep |= _worth_keeping(long.y, begin, end)
    chosen = sorted(keep)
    return Line(tuple(long.x[i] for i in chosen), tuple(long.y[i] for i in chosen))


def _worth_keeping(y: Sequence[float | None], begin: int, end: int) -> set[int]:
    known = [(value, i) for i, value in enumerate(y[begin:end], start=begin) if value is not None]
    gap = next((i for i in range(begin, end) if y[i] is None), begin)
    return {gap} if not known else {min(known)[1], max(known)[1], gap}


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None if none is.

    >>> mean([1.0, None, 2.0]), mean([None])
    (1.5, None)
    """
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


Marks = Mapping[Word, Line]
"""Where in a figure stands what a round said."""


class Rates(NamedTuple):
    """One knob over steps."""

    knob: str
    base: Line
    band: Band
    """From the lowest replica to the highest, at each round's last step."""
    plain: Line
    """The schedule as it would be if nothing were learned."""
    reach: Line
    """What the gradients ask for, of a search."""
    marks: Marks


class Losses(NamedTuple):
    """Losses over steps."""

    mean: Line
    """Mean of a round's replicas; of a search without the rounds that were ruined."""
    band: Band
    points: Line
    """What was compared: every replica's signal, in every round."""
    labels: tuple[str, ...]
    """One per point."""
    dots: Dots
    """What the points are."""
    train: Line
    validation: Line


class Slopes(NamedTuple):
    """One knob's hypergradient over rounds."""

    knob: str
    value: Line
    band: Band
    """Two standard errors to both sides; empty where the controller knows none."""
    marks: Marks
    """What each round says: "up" is never below 0."""
    limit: float
    """Height of a figure in which all rounds are seen, but for a few that are far off."""


class TimeShare(NamedTuple):
    """Where time went."""

    phase: str
    seconds: float
    share: float


class Event(NamedTuple):
    """Something that happened once."""

    step: int
    text: str
    is_setback: bool = False
    """Whether weights were put back, or the search has given up."""


def rates(run: RunData) -> tuple[Rates, ...]:
    """Every knob over steps, learning rates or not; of a fixed schedule its rate."""
    if not run.rounds:
        nothing = Band(Line(), Line())
        return (Rates("lr", base_rate(run), nothing, Line(), Line(), {word: Line() for word in WORDS}),)
    return tuple(_rates(run, g) for g in range(len(run.knobs)))


def _rates(run: RunData, g: int) -> Rates:
    base = [point for r in run.rounds for point in _both(run, r, r.base_before[g], r.base[g])]
    plain = [point for r in run.rounds for point in _both(run, r, r.plain_before[g], r.plain[g])]
    seen = [(r.step - 1, [row.values[g] for row in r.replicas]) for r in run.rounds]
    return Rates(
        knob=run.knobs[g],
        base=line(base),
        band=_band(seen),
        plain=line(plain),
        reach=line((r.step, r.reach) for r in run.rounds) if g == 0 else Line(),
        marks=_marks(run, g, lambda r: r.base[g] if r.step != run.total_steps else r.base_before[g]),
    )


def _both(run: RunData, r: Round, before: float | None, after: float | None) -> list[tuple[float, float | None]]:
    """A round's last step and the step after it, if there is one."""
    points = [(r.step - 1, before)] + ([(r.step, after)] if r.step != run.total_steps else [])
    return [(x, y) for x, y in points if y is not None]


def base_rate(run: RunData) -> Line:
    """One rate for the whole run: the geometric mean of its parameter groups'; without rounds that of its curve."""

    def common(row: Numbers) -> float | None:
        return _geometric_mean(row[g] for g in run.rates)

    if not run.rounds:
        points = zip(run.curve.steps, run.curve.rates, strict=False)
        return line((x, y) for x, y in points if y is not None)
    return line(point for r in run.rounds for point in _both(run, r, common(r.base_before), common(r.base)))


def steps_of(run: RunData) -> tuple[float, float]:
    """The first and the last step of all that is shown, so that all figures can have one axis."""
    rounds = [Line((r.step - 1, r.step)) for r in run.rounds]
    return span([*rounds, Line(run.curve.steps)])


def losses(run: RunData) -> Losses:
    """Losses by replica and round, and the run's own curves."""
    dots = _dots(run)
    ruined = [r for r in run.rounds if dots == "ruined" and r.rolled_back_to is not None]
    by_round = [(r.step, [row.loss for row in r.replicas]) for r in run.rounds if r not in ruined]
    compared = ruined if dots == "ruined" else run.rounds
    known = [(r, i, row.signal) for r in compared for i, row in enumerate(r.replicas) if row.signal is not None]
    known = known[:: math.ceil(len(known) / (2 * LIMIT)) or 1]
    curve = run.curve
    return Losses(
        mean=line((x, mean(values)) for x, values in by_round),
        band=_band(by_round),
        points=Line(tuple(r.step for r, _, _ in known), tuple(signal for _, _, signal in known)),
        labels=tuple(_label(run, r, i) for r, i, _ in known),
        dots=dots,
        train=line(zip(curve.steps, curve.train, strict=True)),
        validation=line((x, y) for x, y in zip(curve.steps, curve.validation, strict=True) if y is not None),
    )


def _dots(run: RunData) -> Dots:
    known = [row for r in run.rounds for row in r.replicas if row.signal is not None and row.loss is not None]
    if any(row.signal != row.loss for row in known):
        return "probe"
    return "ruined" if run.searched else "replicas"


def _label(run: RunData, r: Round, i: int) -> str:
    """A replica's own values, learning rates first."""
    shown = (run.rates or tuple(range(len(run.knobs))))[:3]
    values = [f"{run.knobs[g]} {value:.3g}" for g in shown if (value := r.replicas[i].values[g]) is not None]
    return ", ".join([*([f"replica {i}"] if len(r.replicas) > 1 else []), *values])


def slopes(run: RunData) -> tuple[Slopes, ...]:
    """The hypergradient of every knob that has one."""
    found = (_slopes(run, g) for g in range(len(run.knobs)))
    return tuple(one for one in found if one.value)


def _slopes(run: RunData, g: int) -> Slopes:
    known = [(r.step, slope) for r in run.rounds if (slope := r.slopes[g]) is not None]
    heights = sorted(abs(slope.value) + 2 * (slope.error or 0.0) for _, slope in known) or [0.0]
    most = heights[math.ceil(0.95 * len(heights)) - 1]
    with_error = [(x, slope.value, 2 * slope.error) for x, slope in known if slope.error is not None]
    return Slopes(
        knob=run.knobs[g],
        value=line((x, slope.value) for x, slope in known),
        band=Band(line((x, y - e) for x, y, e in with_error), line((x, y + e) for x, y, e in with_error)),
        marks=_marks(run, g, lambda r: getattr(r.slopes[g], "value", None)),
        limit=1.1 * (heights[-1] if heights[-1] < 3 * most else most),
    )


def lengthening(run: RunData) -> bool:
    """Whether rounds grow with the run, so that a logarithmic axis of steps shows them evenly."""
    steps = [0, *(r.step for r in run.rounds)]
    lengths = [after - before for before, after in itertools.pairwise(steps) if after > before]
    return len(lengths) > 2 and lengths[len(lengths) // 2] >= 2 * lengths[0] and max(lengths) >= 8 * lengths[0]


def divergence(run: RunData) -> tuple[Line, Band]:
    """How far replicas were from their mean, relative to its norm: mean over replicas, lowest and highest."""
    seen = [(r.step, [row.divergence or None for row in r.replicas]) for r in run.rounds]
    return line((x, mean(values)) for x, values in seen), _band(seen)


def time_shares(run: RunData) -> tuple[TimeShare, ...]:
    """Seconds by phase; what the run took outside its rounds (evaluation, start) is the rest."""
    there = {phase for r in run.rounds for phase in r.seconds}
    usual = [phase for phase in ("train", "probe", "gather", "controller", "converge") if phase in there]
    phases = [*usual, *sorted(there - set(usual))]
    known = {phase: math.fsum(r.seconds.get(phase, 0.0) for r in run.rounds) for phase in phases}
    inside = math.fsum(known.values())
    rest = (run.summary.seconds or 0.0) - inside
    if inside > 0 and rest > 0.01 * inside:
        known["outside rounds"] = rest
    total = math.fsum(known.values())
    return tuple(TimeShare(phase, s, s / total) for phase, s in known.items() if total > 0)


def events(run: RunData) -> tuple[Event, ...]:
    """What the journal tells besides numbers. Repetitions in rounds that follow each other are one event."""
    found = [Event(step, "resumed") for step in run.resumes]
    last = None
    for r in run.rounds:
        out = f"replica {', '.join(map(str, r.excluded))} left out" if r.excluded else None
        lost = f"loss of rank {', '.join(map(str, r.not_finite))} not finite" if r.not_finite else None
        texts = [text for text in (r.event, out, lost) if text]
        is_setback = r.rolled_back_to is not None or r.alarm is not None
        found += [Event(r.step, text, is_setback and text == r.event) for text in texts if texts != last]
        last = texts
    return tuple(sorted(found))


def alarms(run: RunData) -> tuple[Event, ...]:
    """What makes the found rate worthless, each told once, where it was first noticed."""
    first: dict[str, int] = {}
    for r in run.rounds:
        if r.alarm:
            first.setdefault(r.alarm, r.step)
    return tuple(Event(step, text) for text, step in first.items())


def _band(rows: Iterable[tuple[float, list[float | None]]]) -> Band:
    known = [(x, [v for v in values if v is not None]) for x, values in rows]
    known = [(x, values) for x, values in known if values]
    return Band(line((x, min(values)) for x, values in known), line((x, max(values)) for x, values in known))


def _marks(run: RunData, g: int, height: Callable[[Round], float | None]) -> Marks:
    marks: dict[Word, Line] = {}
    for word in WORDS:
        chosen = [r for r in run.rounds if (slope := r.slopes[g]) is not None and slope.word == word]
        marks[word] = line(((r.step, height(r)) for r in sorted(chosen, key=lambda r: r.step)), LIMIT // 3)
    return marks


def _geometric_mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and value > 0]
    return geometric_mean(known) if known else None
