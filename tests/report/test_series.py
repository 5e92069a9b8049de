"""What the figures show, by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hdet.report import series
from hdet.report.data import MOST, Event, RunData, load_run
from hdet.report.series import Figure, Line, Style, Trace, comparison_figures, run_figures
from hdet.report.verdict import table_of
from tests.report.made_up import a_header, a_round, searched_folder, trained_journal, write_journal


def run_of(tmp_path: Path, *records: dict[str, object], knobs: tuple[str, ...] = ("lr[0]",)) -> RunData:
    return load_run(write_journal(tmp_path / "x.jsonl", a_header(knobs), *records))


def figure_of(run: RunData, title: str = "Learning rate") -> Figure:
    (found,) = (one for one in run_figures(run) if one.title == title)
    return found


def traces(figure: Figure, style: Style) -> list[Trace]:
    return [one for one in figure.traces if one.style == style]


def test_rates_of_a_knob(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        a_round(0, base=[0.2], learned=[2.0], delta=[1.0]),
        a_round(1, base_before=[0.2], base=[0.1], learned=[1.0], delta=[-1.0]),
    )
    figure = figure_of(run)
    (base,), (plain,), (band,) = (traces(figure, s) for s in ("curve", "dashed", "band"))
    assert (base.name, base.line) == ("lr[0]", Line((9, 10, 19, 20), (0.1, 0.2, 0.2, 0.1)))
    assert (plain.name, plain.line) == ("plain schedule", Line((10, 20), (0.1, 0.1)))
    assert band.line.x == (9, 19, 19, 9)
    assert band.line.y == pytest.approx((0.09, 0.09, 0.11, 0.11))
    assert figure.caption == (
        "Lines: base value, band: lowest to highest replica, grey dashes: if nothing were learned."
    )


def test_what_the_gradients_ask_for_is_a_line_with_gaps(tmp_path: Path) -> None:
    records = [a_round(k, knobs=2, estimated_rate=estimated_rate) for k, estimated_rate in enumerate((0.3, 0.0, 0.4))]
    (asked,) = traces(figure_of(run_of(tmp_path, *records, knobs=("lr[0]", "lr[1]"))), "thin")
    assert asked.line == Line((10, 20, 30), (0.3, None, 0.4))
    assert not traces(figure_of(run_of(tmp_path / "none", a_round(0))), "thin")


def test_what_the_schedule_gives_after_its_end_is_not_shown(tmp_path: Path) -> None:
    header = a_header(total_steps=20)
    records = [a_round(0, base=[0.2]), a_round(1, base=[7.0], delta=[1.0])]
    run = load_run(write_journal(tmp_path / "x.jsonl", header, *records))
    figure = figure_of(run)
    assert traces(figure, "curve")[0].line == Line((9, 10, 19), (0.1, 0.2, 0.1))
    assert series.base_rate(run).y == pytest.approx((0.1, 0.2, 0.1))


def test_losses_by_replica_and_round(tmp_path: Path) -> None:
    figure = figure_of(run_of(tmp_path, a_round(0, [1.0, 3.0]), a_round(1, [2.0, None])), "Loss")
    band, dots, mean = figure.traces
    assert (mean.name, mean.line) == ("train, mean of the round", Line((10, 20), (2.0, 2.0)))
    assert band.line == Line((10, 20, 20, 10), (1.0, 2.0, 2.0, 3.0))
    assert (dots.name, dots.line) == ("train, every replica", Line((10, 10, 20), (1.0, 3.0, 2.0)))
    assert dots.labels == ("replica 0, lr[0] 0.09", "replica 1, lr[0] 0.11", "replica 0, lr[0] 0.09")


def test_losses_of_a_search(tmp_path: Path) -> None:
    """The loss of every round that was kept is a line, that of a ruined one a dot."""
    rounds = [a_round(0, [3.0]), a_round(1, [9.0], rolled_back_to=0, event="rolled_back")]
    run = load_run(write_journal(tmp_path / "x", a_header(guess=[0.1]), *rounds, a_round(2, [2.0])))
    dots, mean = figure_of(run, "Loss").traces
    assert mean.line == Line((10, 30), (3.0, 2.0))
    assert (dots.name, dots.line, dots.labels) == (
        "train, rounds that diverged",
        Line((20,), (9.0,)),
        ("lr[0] 0.1",),
    )
    assert run.events == (Event(20, "diverged: rolled back to step 0", is_setback=True),)


def test_the_loss_says_which_it_is(tmp_path: Path) -> None:
    searched, trained = load_run(searched_folder(tmp_path / "a")), load_run(trained_journal(tmp_path / "b.jsonl"))
    rows = [a_round(k)["replicas"] for k in range(2)]
    probes = [[{**row, "signal": 7.0} for row in one] for one in rows]
    probed = load_run(
        write_journal(tmp_path / "c.jsonl", a_header(), *(a_round(k, replicas=probes[k]) for k in (0, 1)))
    )
    losses = [figure_of(run, "Loss") for run in (searched, trained, probed)]
    per_round = "train, mean of the round"
    assert [[one.name for one in figure.traces if one.in_legend] for figure in losses] == [
        ["train, rounds that diverged", per_round],
        ["train, every replica", per_round],
        ["probe", per_round],
    ]
    assert comparison_figures([searched, searched])[0].y_title == "train loss"


def test_dots_far_above_all_curves_do_not_flatten_them(tmp_path: Path) -> None:
    records = [a_round(0, [1.0]), a_round(1, [1e9], rolled_back_to=0, event="rolled_back")]
    run = load_run(write_journal(tmp_path / "x", a_header(guess=[0.1]), *records))
    loss = figure_of(run, "Loss")
    assert loss.y_range[1] < 10
    assert "upright dashes: rollbacks" in figure_of(run).caption
    assert [event.is_setback for event in loss.events] == [True]


def test_slopes_and_their_errors(tmp_path: Path) -> None:
    run = run_of(tmp_path, a_round(0, delta=[1.0], error=[0.5]), a_round(1, delta=[-0.1]))  # deviation 1/2
    figure = figure_of(run, "Hypergradient")
    band, course = figure.traces
    assert course.line == Line((10, 20), (1.0, -0.1))
    assert band.line == Line((10, 10), (0.5, 1.5))
    assert figure.y_range == pytest.approx((-1.65, 1.65))
    assert not figure.is_log
    assert "Hypergradient" not in [one.title for one in run_figures(run_of(tmp_path / "none", a_round(0)))]


def test_one_wild_slope_does_not_flatten_the_others(tmp_path: Path) -> None:
    run = run_of(tmp_path, *(a_round(k, delta=[100.0 if k == 3 else 1.0]) for k in range(40)))
    assert figure_of(run, "Hypergradient").y_range == pytest.approx((-1.1, 1.1))


def test_groups_with_schedules_of_their_own_have_dashes_of_their_own(tmp_path: Path) -> None:
    figure = figure_of(run_of(tmp_path, a_round(0, knobs=2, base=[0.1, 0.2]), knobs=("lr[a]", "lr[b]")))
    assert [one.name for one in traces(figure, "dashed")] == ["plain lr[a]", "plain lr[b]"]


def test_many_knobs_leave_room_for_the_figure(tmp_path: Path) -> None:
    knobs = tuple(f"lr[{g}]" for g in range(30))
    run = run_of(tmp_path, a_round(0, knobs=30, delta=[0.1] * 30), knobs=knobs)
    assert [one.name for one in figure_of(run).traces if one.in_legend] == ["plain schedule"]
    assert not [one for one in figure_of(run, "Hypergradient").traces if one.in_legend]


def test_divergence_and_time(tmp_path: Path) -> None:
    run = run_of(tmp_path, a_round(0), a_round(1))
    (middle,) = figure_of(run, "Replica divergence").traces  # no band: replicas are as far apart
    assert middle.line == Line((10, 20), (0.01, 0.01))
    bars = figure_of(run, "Where the time went").bars
    assert bars == pytest.approx({"train": 16.0, "probe": 2.0, "gather": 1.0, "controller": 0.2, "converge": 0.8})
    assert list(bars) == ["train", "probe", "gather", "controller", "converge"]


def test_events_are_told_once(tmp_path: Path) -> None:
    told = [
        {"event": "first_step"},
        {"event": "first_step"},
        {"event": None},
        {"event": "restarted", "excluded": [1]},
        {"not_finite": [0, 2]},
    ]
    records = [{**a_round(k), **more} for k, more in enumerate(told)]
    run = run_of(tmp_path, *records[:2], {"kind": "resume", "step": 25}, *records[2:])
    found = [(event.step, event.text) for event in run.events]
    assert found == [
        (10, "first step"),
        (25, "resumed"),
        (40, "replica 1 left out"),
        (40, "restarted: the first step was too long"),
        (50, "loss of rank 0, 2 not finite"),
    ]


def test_bands_are_inside_the_figure_and_steps_are_aligned(tmp_path: Path) -> None:
    wide = a_round(0)
    wide["replicas"][1]["values"] = [100.0]
    run = run_of(tmp_path, wide, a_round(1))
    rate = figure_of(run)
    assert rate.is_log
    assert rate.y_range[0] < math.log10(0.09) < math.log10(100) < rate.y_range[1]
    assert {one.steps for one in run_figures(run)} == {(9, 20)}


def test_the_end_of_a_schedule_does_not_flatten_the_figure(tmp_path: Path) -> None:
    figure = figure_of(run_of(tmp_path, a_round(0), a_round(1, base=[1e-30])))
    assert figure.is_log
    assert -8 < figure.y_range[0] < -6


@pytest.mark.parametrize(("losses", "is_log"), [((1.0, 9.0), True), ((1.0, 8.0), False), ((-1.0, 9.0), False)])
def test_an_axis_is_logarithmic_if_it_can_and_if_that_helps(
    tmp_path: Path, losses: tuple[float, float], is_log: bool
) -> None:
    run = run_of(tmp_path, *(a_round(k, [loss]) for k, loss in enumerate(losses)))
    figure = figure_of(run, "Loss")
    assert figure.is_log is is_log
    low, high = (10**y for y in figure.y_range) if is_log else figure.y_range
    assert low < min(losses) < max(losses) < high


@pytest.mark.slow
def test_long_runs_are_thinned(tmp_path: Path) -> None:
    run = run_of(tmp_path, *(a_round(k, [9.0 if k == 4321 else 1.0, 2.0], delta=[0.1]) for k in range(6000)))
    (base,), (plain,) = (traces(figure_of(run), style) for style in ("curve", "dashed"))
    band, dots, mean = figure_of(run, "Loss").traces
    for one in (plain, mean):
        assert 0 < len(one.line.x) <= MOST
    for one in (base, band, dots):
        assert 0 < len(one.line.x) <= 2 * MOST
    assert max(mean.line.known) == 5.5  # the spike is kept
    assert len(dots.line.x) == len(dots.labels)


def test_several_runs_over_each_other(tmp_path: Path) -> None:
    auto = load_run(searched_folder(tmp_path / "auto"))
    short = run_of(tmp_path, a_round(0, [1.0, 2.0]))
    loss, rate = comparison_figures([auto, short])
    assert [[one.name for one in figure.traces] for figure in (loss, rate)] == [["auto", "x"], ["auto", "x"]]
    assert (loss.y_title, loss.traces[1].line) == ("train loss", Line((10,), (1.5,)))
    assert loss.steps == rate.steps
    back = [r.step for r in auto.rounds if r.rolled_back_to is not None]
    assert not set(back) & set(loss.traces[0].line.x)


def test_the_table_of_runs(tmp_path: Path) -> None:
    runs = [
        load_run(write_journal(tmp_path / name, a_header(max_lr=0.1), a_round(0, [loss]), a_round(1, [loss])))
        for name, loss in (("high", 3.294), ("low", 3.277), ("lost", None))
    ]
    table = table_of(runs)
    assert table.columns == ("run", "last full round's train loss", "rate given", "peak found", "rounds", "time")
    assert [row[:2] for row in table.rows] == [("low", "3.277"), ("high", "3.294"), ("lost", "–")]
    assert table.rows[0][2:] == ("0.1", "0.1", "2", "20.0 s")
