"""The painter: series in, plotly figures out, as plain dicts. Nothing is computed here and plotly is not imported."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hdet.report import numbers as say
from hdet.report import series
from hdet.report.brush import Steps, dashed, decades, event_lines, filled, label, layout, palette, stroke, word_marks
from hdet.report.data import WORDS, RunData, kind_of
from hdet.report.series import Band, Dots, Event, Line, Losses, Rates, Slopes, TimeShare
from hdet.report.verdict import Comparison

_PANELS = 12
"""Knobs that have a panel in the figure of hypergradients, and at most so many stand in a legend."""
_DOWN = 6
"""Decades of losses that are shown below the highest."""
_UP = 10.0
"""How far above all curves dots are shown: nobody needs to see how high the loss of ruined weights was."""

_DOTS: dict[Dots, tuple[str, str]] = {
    "replicas": ("train loss of each replica", palette(0)),
    "probe": ("probe loss", palette(2)),
    "ruined": ("train loss of rounds that were ruined", "--down"),
}
"""What they are, and their colour."""
ASKED = "what the gradients ask for"
SETBACKS = "upright dashes: earlier weights were put back, or the guess was kept to"


class Figure(NamedTuple):
    """One figure of the page."""

    title: str
    caption: str
    plot: dict[str, Any]
    """plotly's data and layout."""


def run_figures(run: RunData) -> list[Figure]:
    """The figures of one run; those it has no data for are left out."""
    turned, marked, steps = [one for one in series.rates(run) if one.base], series.events(run), series.steps_of(run)
    kinds = sorted({kind_of(one.knob) for one in turned}, key=lambda kind: (kind != "lr", kind))
    figures = [draw_rates(kind, [one for one in turned if kind_of(one.knob) == kind], marked, run) for kind in kinds]
    seen = series.losses(run)
    if seen.mean or seen.points or seen.train or seen.validation:
        figures.append(draw_losses(seen, marked, steps))
    if found := series.slopes(run):
        figures.append(draw_slopes(found, steps))
    middle, band = series.divergence(run)
    if middle:
        figures.append(draw_divergence(middle, band, steps))
    if spent := series.time_shares(run):
        figures.append(draw_time(spent))
    return figures


def comparison_figures(found: Comparison) -> list[Figure]:
    """Curves of several runs over each other."""
    figures, steps = [], series.span([*found.losses, *found.rates])
    if any(found.losses):
        plot = _overlay(found.names, found.losses, found.kind.lower(), steps)
        figures.append(Figure("Loss", f"{found.kind} of every run.", plot))
    if any(found.rates):
        plot = _overlay(found.names, found.rates, "learning rate", steps, form=".3~e")
        figures.append(Figure("Learning rate", "Base rate, the geometric mean over parameter groups.", plot))
    return figures


def _known(lines: Iterable[Line]) -> list[float]:
    return [y for one in lines for y in one.y if y is not None]


def draw_rates(kind: str, found: Sequence[Rates], marked: Sequence[Event], run: RunData) -> Figure:
    """Base value, replicas' band, plain schedule and what gradients ask for, of every knob of one kind."""
    traces: list[dict[str, Any]] = []
    for i, one in enumerate(found):
        if not any(one.band == other.band for other in found[:i]):  # the same area again would only be darker
            traces += filled(one.band, f"{palette(i)}/0.2", legendgroup=f"g{i}")
    for i, one in enumerate(found):
        # A longer legend would leave no room; the pointer tells.
        style = dashed(i) | {"legendgroup": f"g{i}", "showlegend": len(found) <= _PANELS}
        traces.append(stroke(one.base, one.knob, palette(i), form=".3~e", **style))
    traces += _plain_schedules(found)  # on top: where nothing was learned it is the same line
    traces += [stroke(one.reach, ASKED, f"{palette(2)}/0.7", width=1, form=".3~e") for one in found if one.reach]
    for word in WORDS:
        rows = [(one.knob, one.marks[word]) for one in found if one.marks[word]]
        traces += [word_marks(word, rows, form=".3~e")] if rows else []
    curves = [row for one in found for row in (one.base, one.plain)]
    values, around = _known(curves), _known(row for one in found for row in (*one.band, one.reach))
    page = layout("learning rate" if kind == "lr" else kind, steps=series.steps_of(run))
    page["shapes"] = event_lines(marked)
    if min(values) >= 0 < max(values) and min(around, default=0.0) >= 0:
        page["yaxis"] |= decades(curves, around)
    title = "Learning rate" if kind == "lr" else kind
    return Figure(title, _words_of_rates(found, run), {"data": traces, "layout": page})


def _words_of_rates(found: Sequence[Rates], run: RunData) -> str:
    words = [("Lines: the rate" if run.searched else "Lines: base value") if run.rounds else "Line: the fixed schedule"]
    if any(one.band for one in found):
        words.append("band: lowest to highest replica")
    words += ["grey dashes: if nothing were learned"] if any(one.plain for one in found) else []
    words += [f"thin line: {ASKED}"] if any(one.reach for one in found) else []
    words += ["markers: what the round said"] if any(one.marks[w] for one in found for w in WORDS) else []
    words += [SETBACKS] if any(one.is_setback for one in series.events(run)) else []
    return f"{', '.join(words)}."


def _plain_schedules(found: Sequence[Rates]) -> list[dict[str, Any]]:
    """One line for all where they share it."""
    plains = [one.plain for one in found if one.plain]
    if plains and all(series.alike(plain, plains[0]) for plain in plains):
        name = "plain schedule" if kind_of(found[0].knob) == "lr" else "as given"
        return [stroke(plains[0], name, "--muted", dash="dash", width=1.5, form=".3~e", legendrank=1500)]
    style: dict[str, Any] = {"dash": "dash", "width": 1.5, "form": ".3~e", "showlegend": False}
    return [
        stroke(one.plain, f"plain {one.knob}", f"{palette(i)}/0.6", legendgroup=f"g{i}", **style)
        for i, one in enumerate(found)
        if one.plain
    ]


def draw_losses(seen: Losses, marked: Sequence[Event], steps: Steps) -> Figure:
    """Every replica's loss in every round, and the run's own curves."""
    traces: list[dict[str, Any]] = []
    if seen.train:
        traces.append(stroke(seen.train, "train", "--muted/0.4", width=1))
    traces += filled(seen.band, f"{palette(0)}/0.2", legendgroup="rounds")
    if seen.points:
        traces.append(_points(seen))
    if seen.mean:
        traces.append(stroke(seen.mean, "train, per round", palette(0), legendgroup="rounds"))
    if seen.validation:
        traces.append(stroke(seen.validation, "validation", palette(1)))
    course = [one for one in (seen.mean, seen.validation) if one] or [seen.train]  # single steps may be far above
    top = _UP * max(_known(course), default=math.inf)
    top = top if top > 0 else math.inf
    curves = [_below(one, top) for one in (seen.mean, seen.train, seen.validation, *seen.band)]
    dots = _known([seen.points])
    near = [v for v in dots if v <= top]
    values = [*_known(curves), *near]
    page = layout(f"loss ({_kinds(seen)})", steps=steps) | {"shapes": event_lines(marked)}
    if min(values) > 0 and max(values) > 8 * min(values):
        page["yaxis"] |= decades(curves if any(curves) else [seen.points], near, _DOWN)
    else:
        margin = 0.06 * (max(values) - min(values)) or 0.1
        page["yaxis"]["range"] = [min(values) - margin, max(values) + margin]
    caption = _words_of_losses(seen, above=len(dots) - len(near))
    return Figure("Loss", caption, {"data": traces, "layout": page})


def _below(one: Line, top: float) -> Line:
    return Line(one.x, tuple(None if y is None or y > top else y for y in one.y))


def _kinds(seen: Losses) -> str:
    """Which losses the figure shows."""
    probed = seen.points and seen.dots == "probe"
    train = seen.train or seen.mean or (seen.points and not probed)
    shown = {"train": train, "probe": probed, "validation": seen.validation}
    return ", ".join(kind for kind, there in shown.items() if there)


def _words_of_losses(seen: Losses, above: int) -> str:
    words = [f"Dots: {_DOTS[seen.dots][0]}"] if seen.points else []
    words += ["blue: mean train loss of the round"] if seen.mean else []
    words += ["grey: train loss of each step"] if seen.train else []
    words += ["orange: validation loss"] if seen.validation else []
    text = f"{', '.join(words)}."
    return f"{text[0].upper()}{text[1:]}" + _above(above)


def _above(dots: int) -> str:
    return f" {'One dot is' if dots == 1 else f'{dots} dots are'} above the figure." if dots else ""


def _points(seen: Losses) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": seen.dots,
        "x": list(seen.points.x),
        "y": list(seen.points.y),
        "text": [html.escape(text, quote=False) for text in seen.labels],
        "marker": {"color": f"{_DOTS[seen.dots][1]}/0.55", "size": 8 if seen.dots == "ruined" else 4},
        "hovertemplate": "%{text}<br>step %{x}: %{y:.4~g}<extra></extra>",
    }


def draw_slopes(found: Sequence[Slopes], steps: Steps) -> Figure:
    """One panel per knob, above each other, over one axis of steps."""
    shown, traces = found[:_PANELS], list[dict[str, Any]]()
    page = layout("", height=100 + 140 * len(shown), steps=steps)
    axis, page["annotations"] = page.pop("yaxis"), []
    page["xaxis"]["anchor"] = f"y{len(shown)}" if len(shown) > 1 else "y"
    gap = 0.17 / len(shown)
    for i, one in enumerate(shown):
        name = f"y{i + 1}" if i else "y"
        top, limit = 1 - i / len(shown) - gap, one.limit or 1.0
        where = [1 - (i + 1) / len(shown), top]
        page[f"yaxis{name[1:]}"] = {**axis, "domain": where, "range": [-limit, limit], "nticks": 5}
        page["annotations"].append(_heading(one.knob, top))
        panel = filled(one.band, "--muted/0.22")
        panel.append(stroke(one.value, one.knob, "--muted", width=1, showlegend=False, hoverinfo="skip"))
        panel += [word_marks(w, [(one.knob, one.marks[w])], form=".3~g", showlegend=i == 0) for w in WORDS]
        traces += [{**trace, "yaxis": name} for trace in panel]
    more = f" {len(found) - _PANELS} more knobs are not drawn." if len(found) > _PANELS else ""
    known = any(one.band for one in shown)
    band = " Band: two standard errors; no signal: 0 is in it." if known else ""
    caption = f"Up: above 0, a higher value would have been better. Down: below 0, a lower one.{band}{more}"
    return Figure("Hypergradient", caption, {"data": traces, "layout": page})


def _heading(text: str, y: float) -> dict[str, Any]:
    """A panel's name, at its upper left."""
    place = {"x": 0, "xref": "paper", "xanchor": "left", "y": y, "yref": "paper", "yanchor": "bottom"}
    return {**place, "text": label(text), "showarrow": False, "font": {"color": "--text", "size": 12}}


def draw_divergence(middle: Line, band: Band, steps: Steps) -> Figure:
    """How far the replicas' weights were apart at the end of each round."""
    traces = filled(band, f"{palette(3)}/0.22")
    traces.append(stroke(middle, "mean over replicas", palette(3), form=".3~e", showlegend=False))
    page = layout("distance / norm", height=260, steps=steps)
    page["yaxis"] |= decades([middle], _known(band))
    caption = "Distance of a replica's weights from the mean, relative to its norm, at the end of each round. "
    caption += "Line: mean over replicas; band: the nearest and the furthest."
    return Figure("Replica divergence", caption, {"data": traces, "layout": page})


def draw_time(spent: Sequence[TimeShare]) -> Figure:
    """A bar per phase, and beside or on it what it comes to."""
    texts = [f"{say.seconds(one.seconds)}, {say.percent(one.share)}" for one in spent]
    long = [one.seconds > 0.5 * max(s.seconds for s in spent) for one in spent]
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": [label(one.phase) for one in spent],
        "x": [one.seconds for one in spent],
        "text": texts,
        "textposition": "none",
        "marker": {"color": palette(0)},
        "hovertemplate": "%{y}: %{text}<extra></extra>",
    }
    words = {
        "type": "scatter",
        "mode": "text",
        "y": bars["y"],
        "x": bars["x"],
        "text": [f"{text} " if inside else f" {text}" for text, inside in zip(texts, long, strict=True)],
        "textposition": ["middle left" if inside else "middle right" for inside in long],
        "textfont": {"color": ["--card" if inside else "--text" for inside in long]},
        "hoverinfo": "skip",
    }
    page = layout("", height=80 + 34 * len(spent)) | {"showlegend": False}
    page["xaxis"] |= {"title": {"text": "seconds"}, "rangemode": "tozero"}
    page["yaxis"] |= {"autorange": "reversed", "showgrid": False, "ticksuffix": "  ", "automargin": True}
    caption = "Seconds of the rank that wrote the journal; gather includes waiting for the others."
    return Figure("Where the time went", caption, {"data": [bars, words], "layout": page})


def _overlay(
    names: Sequence[str], lines: Sequence[Line], y_title: str, steps: Steps, form: str = ".4~g"
) -> dict[str, Any]:
    """One line per run."""
    traces = [
        stroke(one, name, palette(i), form=form, **dashed(i))
        for i, (name, one) in enumerate(zip(names, lines, strict=True))
        if one
    ]
    values = _known(lines)
    page = layout(y_title, height=360 + 12 * max(0, len(names) - 6), steps=steps)  # the legend grows
    if min(values) >= 0 < max(values) and (y_title == "learning rate" or 0 < 8 * min(values) < max(values)):
        page["yaxis"] |= decades(lines)
    return {"data": traces, "layout": page}
