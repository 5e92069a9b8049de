"""Runs of unknown length, runs that are finished, and runs that go on with another length."""

from __future__ import annotations

import logging
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

import hdet
from hdet.report.data import load_run
from hdet.report.verdict import advice
from hdet.rule.constants import DEFAULT
from tests.checkpoint.searching import Searching
from tests.problems import batch_of, network
from tests.processes import error_of, run_ranks
from tests.search.runs import built, final_loss, fixed, loss_of, momentum, train

HELD = 150
"""Steps, by which the rate has risen."""


def falling(peak: float, steps: int) -> list[float]:
    """The rates of a fall over so many steps, to 1/250,000 of the peak."""
    return [peak * (1 - (1 - 1 / 25e4) * math.sqrt((t + 1) / steps)) for t in range(steps)]


def watched(run: Any, steps: range) -> tuple[list[float], list[float]]:
    """Rates and momenta of a run's steps."""
    model, optimizer, scheduler = run
    rates, momenta = [], []
    for t in steps:
        momenta.append(optimizer.param_groups[0]["momentum"])
        rates += [row[0] for row in train(model, optimizer, scheduler, range(t, t + 1))]
    return rates, momenta


# -- no end -----------------------------------------------------------------------------------------------------------


def test_a_rate_is_found_and_held() -> None:
    run = built(1e-6, None, momentum)
    rates, momenta = watched(run, range(250))
    found = run[2].found
    assert run[2].total_steps == math.inf
    assert found is not None
    assert found.status in ("settled", "unsure")
    assert max(rates[200:]) < 1.1 * min(rates[200:])
    assert rates[-1] == pytest.approx(found.rate, rel=0.05)
    assert set(momenta) == {0.9}  # a search leaves it alone
    assert "unknown length" in run[2]._repr_html_()
    # a OneCycle that is held finds about the rate of one that is as long
    ordinary = built(1e-6, 250, momentum)
    train(*ordinary, range(250))
    assert found.rate == pytest.approx(ordinary[2].found.rate, rel=2)


def test_the_rate_rises_over_the_first_part() -> None:
    model, optimizer, scheduler = built(1e-3, None)
    rates = [row[0] for row in train(model, optimizer, scheduler, range(DEFAULT.min_steps + 50))]
    peak = DEFAULT.min_steps
    state = scheduler.state_dict()["hdet"]["learned"]
    assert dict(state)["peak"] == peak
    assert rates[peak + 1] >= rates[peak] > rates[peak - 20]


@pytest.mark.parametrize("several", [False, True])
def test_auto_needs_no_length(several: bool) -> None:
    model = network()
    halves = [list(layer.parameters()) for layer in model.children() if list(layer.parameters())]
    optimizers = [torch.optim.Adam(half, 1e-5) for half in halves]
    if not several:
        optimizers = [torch.optim.Adam(model.parameters(), 1e-5)]
    scheduler = hdet.auto(optimizers)
    rate = math.nan
    for t in range(HELD + 20):
        if t == HELD:
            scheduler.finish(20)
        loss = loss_of(model, batch_of(t))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        rate = optimizers[0].param_groups[0]["lr"]
        scheduler.step(loss.detach())
    assert scheduler.total_steps == HELD + 20
    assert rate == pytest.approx(scheduler.found.rate / 25e4)


@pytest.mark.parametrize("arguments", [{}, {"epochs": 3}, {"steps_per_epoch": 3}])
def test_a_rate_that_is_given_needs_a_length(arguments: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD(network().parameters(), 0.1, momentum=0.9)
    with pytest.raises(ValueError, match="total_steps"):
        hdet.OneCycleLR(optimizer, 0.1, **arguments)


def test_a_schedule_of_ones_own_needs_a_length() -> None:
    optimizer = torch.optim.SGD(network().parameters(), 0.1)
    with pytest.raises(hdet.ArgumentError, match="total_steps must be an integer"):
        hdet.auto(optimizer, schedule=CosineAnnealingLR(optimizer, 100))


# -- finish -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 30])
@pytest.mark.parametrize("total", [None, 1000])
def test_it_falls_to_the_last_rate_of_a_schedule(total: int | None, steps: int) -> None:
    run = built(1e-4, total, momentum)
    watched(run, range(HELD))
    held = run[1].param_groups[0]["lr"]  # in the longer schedule below the target, since it has not peaked
    run[2].finish(steps)
    rates, momenta = watched(run, range(HELD, HELD + steps))
    assert rates == pytest.approx(falling(held, steps))
    assert set(momenta) == {0.9}
    assert rates[-1] == pytest.approx(held / 25e4)
    assert run[2].total_steps == HELD + steps
    with pytest.raises(hdet.ArgumentError, match=f"but the run has {HELD + steps} steps; give a larger total_steps"):
        run[2].step()


def test_what_can_be_finished() -> None:
    def scheduler(*arguments: Any) -> hdet.AutoScheduler:
        return hdet.auto(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1), *arguments)

    assert scheduler().can_finish
    assert scheduler(100).can_finish
    given = scheduler(100, lambda t: 1.0)
    assert not given.can_finish
    with pytest.raises(hdet.ArgumentError, match="for runs without schedule="):
        given.finish(5)


@pytest.mark.parametrize("now", [0, 1, 2, 60])
def test_finished_while_the_rate_rises(now: int) -> None:
    run = built(1e-3, None, momentum)
    before, _ = watched(run, range(now))
    lr = run[1].param_groups[0]["lr"]
    run[2].finish(50)
    assert run[1].param_groups[0]["lr"] == pytest.approx(falling(lr, 50)[0], rel=1e-5)
    rates, _ = watched(run, range(now, now + 50))
    if now > 40:  # until the schedule has fallen by a tenth, the rate may still be revised
        assert rates[15:] == sorted(rates[15:], reverse=True)
    assert rates[-1] < 1e-3 * max(*before, *rates)


@pytest.mark.filterwarnings("ignore:training diverged")
def test_a_false_alarm_after_finish_has_its_rate_back_and_no_more() -> None:
    """Data become harder while the rate rises; finish() comes before the round that shows it."""
    model, optimizer, scheduler = built(1e-3, 2000)

    def go_on(steps: range) -> list[float]:
        return [row[0] for row in train(model, optimizer, scheduler, steps, tells=lambda x, t: x + 99.0 * (t >= 104))]

    before = go_on(range(125))
    assert scheduler.found.rolled_back == 1
    scheduler.finish(2000)
    go_on(range(125, 149))
    again = optimizer.param_groups[0]["lr"]  # the round that shows it may revise the rate, too
    fallen = falling(1.0, 2000)[24]
    assert 0.95 < again / (before[123] * fallen) < 1.25


def test_a_finished_run_is_as_good_as_one_of_its_length() -> None:
    model, optimizer, scheduler = built(1e-3, None)
    train(model, optimizer, scheduler, range(200))
    held = final_loss(model)
    scheduler.finish(100)
    train(model, optimizer, scheduler, range(200, 300))
    assert final_loss(model) < 0.7 * held
    assert final_loss(model) < 1.2 * min(fixed(rate) for rate in (3e-2, 1e-1))


def test_a_finished_run_is_told_as_any_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "journal.jsonl"
    model, optimizer, scheduler = built(1e-6, None, journal=path)
    with caplog.at_level(logging.INFO, "hdet"):
        train(model, optimizer, scheduler, range(HELD))
        scheduler.finish(20)
        train(model, optimizer, scheduler, range(HELD, HELD + 20))
    assert caplog.messages[-1].startswith("found ")
    journal = hdet.read_journal(path)
    assert journal.header["arguments"]["total_steps"] is None
    assert journal.rounds[-1]["step"] == HELD + 20
    assert {record["step"]: record["total_steps"] for record in journal.rounds[-3:]} == {
        journal.rounds[-3]["step"]: None,
        HELD + 19: HELD + 20,
        HELD + 20: HELD + 20,
    }
    with path.open("ab"):  # it is not held any more
        hdet.auto(optimizer, journal=path).step()


def test_the_report_and_what_was_found_know_the_end(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    path = tmp_path / "journal.jsonl"
    model, optimizer, scheduler = built(1e-6, None, journal=path)
    train(model, optimizer, scheduler, range(HELD))
    shown = hdet.show(path)
    assert "so far" in str(advice(load_run(path)))
    assert "max_lr=" in repr(shown)
    assert "total_steps" in shown._repr_html_()
    scheduler.finish(20)
    train(model, optimizer, scheduler, range(HELD, HELD + 20))
    run = load_run(path)
    assert run.arguments["total_steps"] == HELD + 20
    assert "so far" not in str(advice(run))
    replayed = hdet.schedule_from(path, torch.optim.SGD(model.parameters(), 1.0))
    held, last = (replayed.lr_lambdas[0](t) for t in (HELD - 1, HELD + 19))
    assert held == pytest.approx(scheduler.found.rate, rel=0.1)  # a journal knows the ends of rounds
    assert last == pytest.approx(scheduler.found.rate / 25e4)


def run_with(total: int | None, made: int = 0, **more: Any) -> Any:
    optimizer = momentum([torch.ones(2, requires_grad=True)], 0.1)
    scheduler = hdet.auto(optimizer, total, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(made):
            optimizer.step()
            scheduler.step()
    return scheduler


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, "3", None, math.nan])
def test_steps_are_a_positive_integer(steps: Any) -> None:
    scheduler = run_with(None)
    before = repr(scheduler.state_dict())
    with pytest.raises(hdet.ArgumentError, match=r"steps must be an integer, at least 1, but got steps=.*; "):
        scheduler.finish(steps)
    assert repr(scheduler.state_dict()) == before


def finished(steps: int) -> Any:
    scheduler = run_with(None)
    scheduler.finish(steps)
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step(1.0)
    return scheduler


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: run_with(100, schedule=lambda optimizer: CosineAnnealingLR(optimizer, 100)),
            "follows a schedule of 100 steps",
        ),
        (lambda: run_with(100, 99), "is at step 99 of 100"),
        (lambda: run_with(100, 100), "is at step 100 of 100"),
        (lambda: finished(10), "is at step 10 of 10"),
    ],
)
def test_what_has_ended_cannot_be_finished(make: Any, match: str) -> None:
    scheduler = make()
    before = repr(scheduler.state_dict())
    with pytest.raises(hdet.ArgumentError, match=match):
        scheduler.finish(10)
    assert repr(scheduler.state_dict()) == before


@pytest.mark.parametrize("steps", [1, 2, 20, 30, 90])
def test_what_falls_already_goes_on_from_where_it_is(steps: int) -> None:
    plain, run = (built(1e-4, 100, momentum) for _ in range(2))
    rates, momenta = watched(plain, range(100))
    early = watched(run, range(70))
    found = run[2].found.rate
    run[2].finish(steps)
    late = watched(run, range(70, 70 + steps))
    assert early == (rates[:70], momenta[:70])
    if steps > 1:
        assert late[0][0] == pytest.approx(rates[70])
        assert late[1][0] == pytest.approx(momenta[70])
    if steps == 30:  # as it would have
        assert late[0] == pytest.approx(rates[70:])
    assert late[0] == sorted(late[0], reverse=True)
    assert late[0][-1] == pytest.approx(rates[-1])
    assert late[1][-1] == pytest.approx(momenta[-1])
    assert run[2].found.rate == found
    assert run[2].total_steps == 70 + steps


def test_finished_at_the_last_step_of_the_peak() -> None:
    scheduler = run_with(100, 29)
    scheduler.finish(10)
    assert scheduler.total_steps == 39


@pytest.mark.parametrize(("total", "now"), [(None, HELD), (100, 70), (100, 10)])
def test_a_group_that_was_added_before_falls_too(total: int | None, now: int) -> None:
    model, optimizer, scheduler = built(1e-3, total, momentum)
    train(model, optimizer, scheduler, range(now))
    optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)], "lr": 2e-3})
    scheduler.finish(10)
    first = [group["lr"] for group in optimizer.param_groups]
    rates = train(model, optimizer, scheduler, range(now, now + 10))
    assert first[1] == pytest.approx(2 * first[0])
    assert rates[-1] == pytest.approx([rate * rates[-1][0] / first[0] for rate in first])


def test_a_search_climbs_in_place_of_the_rise_and_settles_when_it_falls() -> None:
    model, optimizer, scheduler = built(1e-4, 100)
    rates = [row[0] for row in train(model, optimizer, scheduler, range(60))]
    assert scheduler.found.status == "searching"
    rates += [row[0] for row in train(model, optimizer, scheduler, range(60, 100))]
    assert scheduler.found.status in ("settled", "unsure")
    assert rates[58:60] == pytest.approx([scheduler.found.rate] * 2)
    assert rates[60:] == pytest.approx(falling(scheduler.found.rate, 40))
    assert dict(scheduler.state_dict()["hdet"]["learned"])["peak"] == 29


@pytest.mark.parametrize("finishes", [None, 500])
def test_it_is_replayed_from_a_journal(finishes: int | None, tmp_path: Path) -> None:
    """Whose rounds end before and after the fall has begun."""
    steps = 1000 if finishes is None else finishes + 100
    model, optimizer, scheduler = built(1e-4, 1000, journal=tmp_path / "run.jsonl")
    rates = train(model, optimizer, scheduler, range(finishes or steps))
    if finishes is not None:
        scheduler.finish(100)
        rates += train(model, optimizer, scheduler, range(finishes, steps))
    replayed = hdet.schedule_from(tmp_path / "run.jsonl", torch.optim.SGD(model.parameters(), 1.0)).lr_lambdas[0]
    expected = [row[0] for row in rates[400:]]
    assert [replayed(t) for t in range(400, steps)] == pytest.approx(expected, abs=1e-3 * max(expected))


# -- ranks ------------------------------------------------------------------------------------------------------------


def finished_on(rank: int, steps: list[int | None], at: int) -> tuple[str, list[float], Any]:
    model, optimizer, scheduler = built(1e-4, None)
    train(model, optimizer, scheduler, range(at))

    def rest() -> None:
        mine = steps[rank]
        if mine is not None:
            scheduler.finish(mine)
        train(model, optimizer, scheduler, range(at, at + (mine or 200)))

    error = error_of(rest) if len(set(steps)) > 1 else rest()
    return repr(error), [p.sum().item() for p in model.parameters()], scheduler.total_steps


@pytest.mark.slow
def test_all_ranks_finish_at_one_step() -> None:
    assert run_ranks(finished_on, 2, [20, 20], 50) == [finished_on(0, [20], 50)] * 2


@pytest.mark.parametrize(
    ("second", "words"), [(30, "finish(steps) = 30"), (None, "call = step(), at the end of a round")]
)
def test_ranks_that_disagree_are_told(second: int | None, words: str) -> None:
    for error, _, total in run_ranks(finished_on, 2, [20, second], 50):
        assert "DisagreementError" in error
        assert words in error
        assert ("finish(steps) = 20" if second else "rank 0: call = finish()") in error
        assert total == math.inf  # nothing was changed


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 37, 104, 131, 150])
def test_training_goes_on_from_before_it_was_finished(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "held.pt"
    branched = Searching(steps=None).go(0, cut)
    branched.save(path)
    branched.scheduler.finish(20)
    branched.go(cut, cut + 20)

    another = Searching.loaded(path, steps=None).go(cut, 150)
    whole = Searching(steps=None).go(0, 150)
    for run in (another, whole):
        run.scheduler.finish(30)
        run.go(150, 180)
    assert another.equals(whole)
    assert not another.equals(branched)
    # the same object, which was finished, goes back as well
    hdet.load(path, **branched.parts)
    branched.rates = branched.rates[:cut]
    branched.go(cut, 150).scheduler.finish(30)
    assert branched.go(150, 180).equals(whole)


@pytest.mark.parametrize("made_with", [None, 1000])
@pytest.mark.parametrize("cut", [120, 121, 133, 149])
def test_resumed_while_it_is_being_finished(cut: int, made_with: int | None, tmp_path: Path) -> None:
    path = tmp_path / "finishing.pt"
    whole = Searching(steps=made_with).go(0, 120)
    whole.scheduler.finish(30)
    whole.go(120, cut)
    whole.save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = Searching.loaded(path, steps=made_with).go(cut, 150)
    assert resumed.equals(whole.go(cut, 150))
    assert resumed.scheduler.total_steps == 150


# -- another length ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "then"), [(200, 400), (200, None), (None, 400), (400, 200)])
def test_a_run_goes_on_with_another_length(first: int | None, then: int | None, tmp_path: Path) -> None:
    path = tmp_path / "before.pt"
    Searching(steps=first).go(0, 45).save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = Searching.loaded(path, steps=then)
    assert run.scheduler.total_steps == (then or math.inf)
    peak = DEFAULT.min_steps if None in (first, then) else 0.3 * then - 1  # what is held already does not rise again
    found = dict(run.scheduler.state_dict()["hdet"]["learned"])
    assert found["peak"] == peak
    rate = run.optimizer.param_groups[0]["lr"]
    assert rate == run.scheduler.get_last_lr()[0]
    rises = math.exp(found["log_factor"]) * max(0.3, 46 / (peak + 1))
    assert rate == pytest.approx(1e-5 * min(rises, math.exp(found["ceiling"])))
    run.go(45, 180 if then is None else then)
    if then is None:
        run.scheduler.finish(20)
        run.go(180, 200)
    assert run.rates[-2] < 1e-3 * run.scheduler.found.rate  # of the last step


@pytest.mark.parametrize(("first", "then"), [(200, 400), (400, 120), (None, 200), (200, None)])
def test_a_run_with_another_length_from_its_first_step_on(first: int | None, then: int | None, tmp_path: Path) -> None:
    """Nothing is left of the length that it began with."""
    path = tmp_path / "first.pt"
    Searching(steps=first).go(0, 1).save(path)
    resumed, whole = Searching.loaded(path, steps=then), Searching(steps=then)
    assert resumed.go(1, 120).equals(whole.go(0, 120))


@pytest.mark.parametrize(("first", "then"), [(200, 300), (None, 300), (200, None)])
def test_a_run_that_is_held_is_held_on(first: int | None, then: int | None, tmp_path: Path) -> None:
    path, cut = tmp_path / "run.pt", 70
    before = Searching(steps=first).go(0, cut)
    before.save(path)
    run = Searching.loaded(path, steps=then)
    found = run.scheduler.found
    assert run.optimizer.param_groups[0]["lr"] == before.optimizer.param_groups[0]["lr"] == pytest.approx(found.rate)
    run.go(cut, 178)
    if then is None:
        run.scheduler.finish(122)
    run.go(178, 299)
    peak, begins = run.scheduler.found.rate, 180 if then else 178
    assert run.rates[176] == pytest.approx(peak)  # of step 177
    assert run.rates[179:] == pytest.approx(falling(peak, 300 - begins)[180 - begins :])


@pytest.mark.parametrize(("first", "then", "cut"), [(60, 600, 40), (60, None, 45)])
def test_a_run_that_falls_keeps_its_length(first: int, then: int | None, cut: int, tmp_path: Path) -> None:
    path = tmp_path / "falling.pt"
    Searching(steps=first).go(0, cut).save(path)
    run = Searching(seed=1, steps=then)
    before = repr((run.scheduler.state_dict(), run.numbers))
    match = rf"total_steps must be 60 .* got total_steps={then}; give that, or .* with the rate \d"
    with pytest.raises(hdet.ArgumentError, match=match):
        hdet.load(path, **run.parts)
    assert repr((run.scheduler.state_dict(), run.numbers)) == before


def test_a_shorter_schedule_must_not_have_begun_to_fall(tmp_path: Path) -> None:
    path = tmp_path / "late.pt"
    Searching(steps=None).go(0, 70).save(path)
    with pytest.raises(hdet.ArgumentError, match=r"falls from step 59 on; give more"):
        Searching.loaded(path, steps=100)


def test_a_finished_run_does_not_become_longer(tmp_path: Path) -> None:
    path = tmp_path / "finished.pt"
    run = Searching(steps=None).go(0, 50)
    run.scheduler.finish(20)
    run.go(50, 55).save(path)
    with pytest.raises(hdet.ArgumentError, match="must be 70 as in the run that was saved"):
        Searching.loaded(path, steps=1000)
    for steps in (None, 70):  # the length it was planned with, and the one it has
        assert Searching.loaded(path, steps=steps).go(55, 70).rates == run.go(int(run.scheduler.last_epoch), 70).rates


def test_a_schedule_of_ones_own_keeps_its_length() -> None:
    def made(steps: int) -> Any:
        optimizer = torch.optim.Adam(network().parameters(), 1e-3)
        return hdet.auto(optimizer, schedule=CosineAnnealingLR(optimizer, steps), total_steps=steps)

    state, longer = made(80).state_dict(), made(160)
    before = repr(longer.state_dict())
    with pytest.raises(hdet.ArgumentError, match=r"total_steps must be 80 .*got total_steps=160; give that"):
        longer.load_state_dict(state)
    assert repr(longer.state_dict()) == before
    made(80).load_state_dict(state)
