"""What the figures show, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from hdet.report import series
from hdet.report.data import RunData, load_run
from hdet.report.series import LIMIT, Event, Line, line, thinned
from hdet.report.verdict import compare, table_of
from tests.report.made_up import a_header, a_round, searched_folder, trained_journal, write_folder, write_journal

FIXED = {"name": "fixed", "arguments": {"method": "none", "lr": 0.02}}


def run_of(tmp_path: Path, *records: dict[str, object], knobs: tuple[str, ...] = ("lr[0]",)) -> RunData:
    return load_run(write_journal(tmp_path / "x.jsonl", a_header(knobs), *records))


def test_rates_of_a_knob(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        a_round(0, base=[0.2], learned=[2.0], delta=[1.0]),
        a_round(1, base_before=[0.2], base=[0.1], learned=[1.0], delta=[-1.0]),
    )
    (one,) = series.rates(run)
    assert one.base == Line((9, 10, 19, 20), (0.1, 0.2, 0.2, 0.1))
    assert one.plain == Line((9, 10, 19, 20), (0.1, 0.1, 0.1, 0.1))
    assert one.band.low.y == pytest.approx((0.09, 0.09))
    assert one.band.high.y == pytest.approx((0.11, 0.11))
    assert one.marks == {"up": Line((10,), (0.2,)), "down": Line((20,), (0.1,)), "no signal": Line()}


def test_what_the_gradients_ask_for_is_a_line_with_gaps(tmp_path: Path) -> None:
    records = [a_round(k, knobs=2, reach=reach) for k, reach in enumerate((0.3, 0.0, 0.4))]
    first, second = series.rates(run_of(tmp_path, *records, knobs=("lr[0]", "lr[1]")))
    assert first.reach == Line((10, 20, 30), (0.3, None, 0.4))
    assert not second.reach
    assert not series.rates(run_of(tmp_path, a_round(0)))[0].reach


def test_what_the_schedule_gives_after_its_end_is_not_shown(tmp_path: Path) -> None:
    header = a_header(total_steps=20)
    records = [a_round(0, base=[0.2]), a_round(1, base=[7.0], delta=[1.0])]
    run = load_run(write_journal(tmp_path / "x.jsonl", header, *records))
    (one,) = series.rates(run)
    assert one.base == Line((9, 10, 19), (0.1, 0.2, 0.1))
    assert one.marks["up"] == Line((20,), (0.1,))
    assert series.base_rate(run).y == pytest.approx((0.1, 0.2, 0.1))


def test_losses_by_replica_and_round(tmp_path: Path) -> None:
    seen = series.losses(run_of(tmp_path, a_round(0, [1.0, 3.0]), a_round(1, [2.0, None])))
    assert seen.mean == Line((10, 20), (2.0, 2.0))
    assert (seen.band.low.y, seen.band.high.y) == ((1.0, 2.0), (3.0, 2.0))
    assert seen.points == Line((10, 10, 20), (1.0, 3.0, 2.0))
    assert seen.labels == ("replica 0, lr[0] 0.09", "replica 1, lr[0] 0.11", "replica 0, lr[0] 0.09")
    assert seen.dots == "replicas"
    assert not seen.train
    assert not seen.validation


def test_losses_of_a_search(tmp_path: Path) -> None:
    """The loss of every round that was kept is a line, that of a ruined one a dot."""
    rounds = [a_round(0, [3.0]), a_round(1, [9.0], went_back_to=0, event="ruined: rolled back to step 0")]
    run = load_run(write_journal(tmp_path / "x", a_header(max_lr="auto"), *rounds, a_round(2, [2.0])))
    seen = series.losses(run)
    assert seen.mean == Line((10, 30), (3.0, 2.0))
    assert (seen.dots, seen.points, seen.labels) == ("ruined", Line((20,), (9.0,)), ("lr[0] 0.1",))
    assert series.events(run) == (Event(20, "ruined: rolled back to step 0", is_setback=True),)


def test_journals_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """They have losses of a probe batch."""
    rounds = [a_round(k, [1.0], loss_before=1.0) for k in range(2)]
    for record in rounds:
        record["replicas"][0]["signal"] = 5.0
    run = load_run(write_journal(tmp_path / "x", a_header(fanout="probed", max_lr=0.1), *rounds))
    assert run.searched
    assert series.losses(run).mean == Line((10, 20), (1.0, 1.0))
    assert (series.losses(run).dots, series.losses(run).points.y) == ("probe", (5.0, 5.0))


def test_slopes_and_their_errors(tmp_path: Path) -> None:
    run = run_of(tmp_path, a_round(0, delta=[1.0], error=[0.5]), a_round(1, delta=[-0.1]))  # deviation 1/2
    (one,) = series.slopes(run)
    assert one.value == Line((10, 20), (1.0, -0.1))
    assert one.band == (Line((10,), (0.5,)), Line((10,), (1.5,)))
    assert one.marks["up"] == Line((10,), (1.0,))
    assert one.limit == pytest.approx(1.65)
    assert series.slopes(run_of(tmp_path, a_round(0))) == ()


def test_one_wild_slope_does_not_flatten_the_others(tmp_path: Path) -> None:
    run = run_of(tmp_path, *(a_round(k, delta=[100.0 if k == 3 else 1.0]) for k in range(40)))
    assert series.slopes(run)[0].limit == pytest.approx(1.1)


def test_up_is_never_below_zero(tmp_path: Path) -> None:
    said = ((-1.0, 0.2), (1.0, 0.2), (-1.0, 0.0), (0.1, 2.0))
    run = run_of(tmp_path, *(a_round(k, delta=[s], error=[e]) for k, (s, e) in enumerate(said)))
    marks = series.slopes(run)[0].marks
    assert marks == {"up": Line((20,), (1.0,)), "down": Line((10,), (-1.0,)), "no signal": Line((30, 40), (-1.0, 0.1))}
    assert series.rates(run)[0].marks["up"].x == (20,)


def test_a_fixed_schedule_is_drawn_from_its_curve(tmp_path: Path) -> None:
    curve = "step,train_loss,validation_loss,rate\n0,,5.0,\n1,4.0,,0.1\n2,3.0,,0.2\n"
    run = load_run(write_folder(tmp_path / "fixed", curve=curve, **FIXED))
    assert series.base_rate(run) == Line((1.0, 2.0), (0.1, 0.2))
    assert [one.base for one in series.rates(run)] == [series.base_rate(run)]
    assert series.steps_of(run) == (0.0, 2.0)


def test_alarms_are_told_once(tmp_path: Path) -> None:
    told = [{}, {"alarm": "blind", "event": "kept to the guess: blind"}, {"alarm": "blind"}, {"alarm": "never finite"}]
    run = run_of(tmp_path, *({**a_round(k), **more} for k, more in enumerate(told)))
    assert series.alarms(run) == (Event(20, "blind"), Event(40, "never finite"))
    assert series.events(run) == (Event(20, "kept to the guess: blind", is_setback=True),)
    assert series.alarms(run_of(tmp_path / "well", a_round(0, event="first step"))) == ()


def test_divergence_and_time(tmp_path: Path) -> None:
    run = run_of(tmp_path, a_round(0), a_round(1))
    middle, band = series.divergence(run)
    assert middle == Line((10, 20), (0.01, 0.01))
    assert not band
    spent = {one.phase: (one.seconds, one.share) for one in series.time_shares(run)}
    assert spent["train"] == pytest.approx((16.0, 0.8))
    assert spent["converge"] == pytest.approx((0.8, 0.04))
    assert list(spent) == ["train", "probe", "gather", "controller", "converge"]


def test_time_outside_rounds_is_the_rest(tmp_path: Path) -> None:
    run = load_run(write_folder(tmp_path, a_header(), a_round(0), seconds=20.0))
    rest = series.time_shares(run)[-1]
    assert (rest.phase, rest.seconds, rest.share) == pytest.approx(("outside rounds", 10.0, 0.5))


def test_events_are_told_once(tmp_path: Path) -> None:
    told = [
        {"event": "first step"},
        {"event": "first step"},
        {"event": None},
        {"event": "restarted", "excluded": [1]},
        {"not_finite": [0, 2]},
    ]
    records = [{**a_round(k), **more} for k, more in enumerate(told)]
    run = run_of(tmp_path, *records[:2], {"kind": "resume", "step": 25}, *records[2:])
    found = [(event.step, event.text) for event in series.events(run)]
    assert found == [
        (10, "first step"),
        (25, "resumed"),
        (40, "replica 1 left out"),
        (40, "restarted"),
        (50, "loss of rank 0, 2 not finite"),
    ]


def test_a_run_that_went_back_has_a_gap(tmp_path: Path) -> None:
    run = run_of(tmp_path, a_round(0), a_round(1), {**a_round(2), "step": 15})
    (one,) = series.rates(run)
    assert one.base.x == (9, 10, 19, 20, 14, 14, 15)
    assert one.base.y[4] is None
    outline = one.band.outline()
    assert outline.x == (9, 19, 19, 9, 14, 14, 14)
    assert outline.y == pytest.approx((0.09, 0.09, 0.11, 0.11, None, 0.09, 0.11))


def test_rounds_that_grow_are_noticed(tmp_path: Path) -> None:
    assert series.lengthening(load_run(searched_folder(tmp_path / "a")))
    assert not series.lengthening(load_run(trained_journal(tmp_path / "b")))
    assert not series.lengthening(run_of(tmp_path))


def test_long_runs_are_thinned(tmp_path: Path) -> None:
    run = run_of(tmp_path, *(a_round(k, [9.0 if k == 4321 else 1.0, 2.0], delta=[0.1]) for k in range(6000)))
    (one,), seen = series.rates(run), series.losses(run)
    for row in (one.base, one.plain, one.band.low, one.marks["up"], seen.mean, seen.band.high):
        assert 0 < len(row.x) <= LIMIT + 2
    assert max(y for y in seen.mean.y if y is not None) == 5.5  # the spike is kept
    assert len(seen.points.x) == len(seen.labels) <= 2 * LIMIT


def test_thinning_keeps_ends_and_gaps_and_leaves_short_lines_alone() -> None:
    short = line([(1, 2.0), (2, None)])
    assert thinned(short) is short
    y = [None if 3000 <= i < 3100 else float(i % 7) for i in range(9000)]
    thin = thinned(Line(tuple(range(9000)), tuple(y)), 300)
    assert (thin.x[0], thin.x[-1]) == (0, 8999)
    assert None in thin.y
    assert {0.0, 6.0} <= set(thin.y)
    assert len(thin.x) <= 302


def test_comparison_takes_the_best_loss_that_all_have(tmp_path: Path) -> None:
    auto = load_run(searched_folder(tmp_path / "auto"))
    fixed = load_run(write_folder(tmp_path / "fixed", name="fixed", curve="step,train_loss\n0,4.0\n9,3.0\n"))
    found = compare([auto, fixed])
    assert (found.names, found.kind) == (("auto", "fixed"), "Train loss")
    assert found.losses[1] == Line((0.0, 9.0), (4.0, 3.0))
    assert found.rates[0]
    assert not found.rates[1]
    assert compare([auto]).kind == "Validation loss"
    bare = load_run(write_journal(tmp_path / "bare.jsonl", a_header(), a_round(0)))
    assert compare([bare, fixed]).kind == "Validation or train loss"


def test_the_table_of_runs(tmp_path: Path) -> None:
    auto = load_run(searched_folder(tmp_path / "auto"))
    fixed = load_run(write_folder(tmp_path / "fixed", final={"loss": 3.294}, seconds=61, **FIXED))
    broken = load_run(write_folder(tmp_path / "broken", name="broken", final={"loss": 1.0}, crashed=True))
    table = table_of([fixed, broken, auto])
    assert [row[:2] for row in table.rows] == [("auto", "3.277"), ("fixed", "3.294"), ("broken", "crashed")]
    assert table.columns[1:4] == ("last loss", "rate given", "peak found")  # not all of them are validation losses
    assert table.rows[1] == ("fixed", "3.294", "0.02", "fixed", "0", "1 min 1 s")
    assert table.rows[0][2] == "1e-3"
    assert table_of([auto]).columns[1] == "final validation loss"
