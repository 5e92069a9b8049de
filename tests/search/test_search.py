"""The search on real training: what it finds, what it undoes, and what it leaves alone."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

import hdet
from hdet.errors import ArgumentError, DivergedError, SearchWarning
from hdet.rule.constants import DEFAULT
from hdet.rule.decision import next_end
from hdet.rule.enums import Phase
from hdet.schedulers.trapezoid import Trapezoid
from tests.problems import batch_of, network
from tests.search import runs
from tests.search.runs import built, final_loss, fixed, loss_of, momentum, search_of, train, two_groups

pytestmark = [
    pytest.mark.filterwarnings("ignore:resumed at step:hdet.errors.ResumeWarning"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
]


# -- what is found -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:training diverged:hdet.errors.SearchWarning")
@pytest.mark.parametrize("make", [torch.optim.Adam, momentum], ids=["adam", "sgd"])
def test_from_any_guess_it_goes_most_of_the_way_to_the_best_of_a_sweep(make: Any) -> None:
    best = min(fixed(rate, make=make) for rate in (3e-3, 1e-2, 3e-2, 1e-1, 3e-1))
    untrained = final_loss(network())
    for guess in (1e-6, 1e-3, 1.0, 100.0):
        model, optimizer, scheduler = built(guess, make=make)
        train(model, optimizer, scheduler, range(300))
        assert final_loss(model) - best < 0.35 * (untrained - best)
    assert fixed(1e-6, make=make) > 0.9 * untrained  # what the first guess costs without


def test_the_guess_does_not_matter_after_the_first_step() -> None:
    rates = []
    for guess in (1e-5, 1e-3):
        run = built(guess, 200)
        rates.append(train(*run, range(20)))
    assert rates[0][0] != rates[1][0]
    for low, high in zip(rates[0][2:], rates[1][2:], strict=True):  # the second step may be measured once more
        assert low == pytest.approx(high, rel=0.1)


@pytest.mark.parametrize("make", [torch.optim.Adam, momentum], ids=["adam", "momentum"])
@pytest.mark.parametrize("guess", [1e-12, 1e-8, 1e-5, 1e-3, 1.0, 1e6])
def test_rounding_does_not_matter(guess: float, make: Any) -> None:
    """fp32 finds what fp64 finds: a first step that rounding has swallowed is made again, longer."""
    found = []
    for dtype in (torch.float64, torch.float32):
        model = network().to(dtype)
        optimizer = make(model.parameters(), lr=guess)
        scheduler = hdet.auto(optimizer, total_steps=300)
        for t in range(12):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch_of(t)[0].to(dtype)), batch_of(t)[1].to(dtype))
            loss.backward()
            optimizer.step()
            scheduler.step(loss)
        found.append(scheduler.found.rate)
    assert found[1] == pytest.approx(found[0], rel=0.1)


@pytest.mark.parametrize("calls", [2, 4])
def test_a_loss_that_is_given_again_counts_once(calls: int) -> None:
    """As by Accelerate, which steps the scheduler once for each process."""
    told = []
    for often in (1, calls):
        model, optimizer, scheduler = built(1e-4, 100 * often)
        for t in range(100):
            optimizer.zero_grad()
            loss = loss_of(model, batch_of(t, 8))
            loss.backward()
            optimizer.step()
            for _ in range(often):
                scheduler.step(loss)
        first = search_of(scheduler).memory.progress.stretches[:4]  # later the weights go another way
        told.append([number for one in first for number in (one.level, one.steps)])
        assert scheduler.found.rolled_back == 0
    assert told[1] == pytest.approx(told[0])


def test_a_run_that_is_too_short_keeps_its_guess() -> None:
    """The guess on the plain schedule; weights, BatchNorm and RNG: it only looks on."""
    weights = []
    for ours in (True, False):
        model = network(nn.BatchNorm1d(32))
        optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
        shape = Trapezoid.of(30)
        scheduler: Any = LambdaLR(optimizer, lambda t: shape.at(t, 0.01))  # noqa: B023
        if ours:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            with pytest.warns(SearchWarning, match="too short to find its rate"):
                scheduler = hdet.auto(optimizer, total_steps=30, model=model)
        before = torch.random.get_rng_state()
        rates = train(model, optimizer, scheduler, range(30), tells=lambda loss, t: loss if ours else None)  # noqa: B023
        assert torch.equal(before, torch.random.get_rng_state())
        assert [row[0] for row in rates] == [shape.at(t, 0.01) for t in range(30)]
        weights.append([v.clone() for v in model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_search_draws_no_random_numbers() -> None:
    model, optimizer, scheduler = built(steps=60)
    before = torch.random.get_rng_state()
    train(model, optimizer, scheduler, range(60))
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_journal_tells_what_happened_and_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model, optimizer, scheduler = built(1e-6, 400, journal=path)
    rates = [row[0] for row in train(model, optimizer, scheduler, range(400))]
    data = hdet.read_journal(path)
    assert data.header["arguments"]["guess"] == [1e-6]
    assert data.rounds[0]["event"] == "first_step"
    for record in data.rounds[1:]:
        assert record["base_before"] == [pytest.approx(rates[record["step"] - 1])]
        assert record["shape"][0] > 0
        (row,) = record["replicas"]
        assert row["values"] == record["base_before"]
        assert math.isfinite(row["loss"])
        assert row["loss"] == row["signal"]
        assert (record["rolled_back_to"] is not None) == (record["event"] == "rolled_back")
    replayed = torch.optim.Adam(network().parameters(), lr=123.0)
    schedule = hdet.schedule_from(path, replayed)
    seen = []
    for _ in range(400):
        seen.append(float(replayed.param_groups[0]["lr"]))
        replayed.step()
        schedule.step()
    for t in (60, 120, 200, 280, 380):
        assert seen[t] == pytest.approx(rates[t], rel=0.25)
    assert max(seen) == pytest.approx(max(rates), rel=0.05)


def test_any_schedule() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    scheduler = hdet.auto(optimizer, schedule=CosineAnnealingLR(optimizer, 300), total_steps=300)
    rates = [row[0] for row in train(model, optimizer, scheduler, range(300))]
    assert max(rates) > 1e-3
    assert rates[-1] < 1e-2 * max(rates)
    assert final_loss(model) < 0.5 * final_loss(network())


def test_groups_at_0_are_left_alone() -> None:
    model = network()
    groups = two_groups(model)
    groups[0]["lr"] = 0.0
    optimizer = torch.optim.Adam(groups, lr=1e-3)
    scheduler = hdet.auto(optimizer, total_steps=100)
    rates = train(model, optimizer, scheduler, range(100))
    assert {row[0] for row in rates} == {0.0}
    assert len({row[1] for row in rates}) > 10


def test_layers_may_be_frozen_and_thawed() -> None:
    model, optimizer, scheduler = built(steps=120)
    first = next(iter(model.parameters()))
    for begin, end, trains in ((0, 47, True), (47, 90, False), (90, 120, True)):
        first.requires_grad_(trains)
        train(model, optimizer, scheduler, range(begin, end))
    assert final_loss(model) < final_loss(network())


# -- losses ------------------------------------------------------------------------------------------------------------


def test_without_a_loss_it_finds_the_rate_and_warns_of_nothing() -> None:
    model, optimizer, scheduler = built(1e-5, 200)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, scheduler, range(200), tells=lambda loss, t: None)
    assert [w for w in caught if issubclass(w.category, SearchWarning)] == []
    assert final_loss(model) < 0.5 * final_loss(network())


@pytest.mark.parametrize("unit", [1e-6, 1e6])
@pytest.mark.parametrize("offset", [0.0, -3.0])
def test_what_the_loss_is_measured_in_does_not_matter(unit: float, offset: float) -> None:
    rates = []
    for tells in (lambda loss, t: loss, lambda loss, t: unit * (loss.double() + offset)):
        rates.append(train(*built(steps=120), range(120), tells=tells))
    assert rates[0] == rates[1]


@pytest.mark.parametrize("kind", [Tensor.item, Tensor.detach, lambda loss: loss.reshape(1)], ids=["float", "0", "1"])
def test_losses_of_every_kind(kind: Callable[[Tensor], Any]) -> None:
    rates = train(*built(steps=60), range(60), tells=lambda loss, t: kind(loss))
    assert rates == train(*built(steps=60), range(60))


def test_a_loss_may_be_observed_before_the_step() -> None:
    model, optimizer, scheduler = built(steps=60)
    expected = train(*built(steps=60), range(60))
    rates = []
    for t in range(60):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(t))
        scheduler.observe(loss)
        loss.backward()
        optimizer.step()
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        scheduler.step()
    assert rates == expected


# -- rolling back ------------------------------------------------------------------------------------------------------


def damage(model: nn.Module, how: Callable[[Tensor], Any]) -> None:
    with torch.no_grad():
        for p in model.parameters():
            how(p)


@pytest.mark.parametrize("gives_loss", [True, False])
def test_nan_weights_are_rolled_back(gives_loss: bool) -> None:
    """Where losses were fine until then, at the same rate for the first time; else at a third of it."""
    model, optimizer, scheduler = built()
    tells = (lambda loss, t: loss) if gives_loss else (lambda loss, t: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, optimizer, scheduler, range(120), tells=tells)
    rate = scheduler.search.learned.peak_factor
    damage(model, lambda p: p.mul_(math.nan))
    excused = "step 124: rolled back to step 104, at the same rate"
    paid = "diverged at step {}: rolled back to step {}, "
    with pytest.warns(SearchWarning, match=excused if gives_loss else paid.format(124, 87)) as caught:
        train(model, optimizer, scheduler, range(120, 130), tells=tells)
    assert [w.filename for w in caught if w.category is SearchWarning] == [runs.__file__]
    assert scheduler.search.learned.peak_factor == pytest.approx(rate if gives_loss else rate / 3)
    damage(model, lambda p: p.mul_(math.nan))
    with pytest.warns(SearchWarning, match=paid.format(148, 87)):
        train(model, optimizer, scheduler, range(130, 200), tells=tells)
    assert scheduler.search.learned.peak_factor == pytest.approx(rate / (3 if gives_loss else 9), rel=0.5)
    assert math.isfinite(final_loss(model))


def test_a_network_that_explodes_without_overflowing_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model, optimizer, scheduler = built(journal=path)
    train(model, optimizer, scheduler, range(126))
    alive = final_loss(model)
    damage(model, lambda p: p.mul_(30.0))
    with pytest.warns(SearchWarning, match="training diverged"):
        train(model, optimizer, scheduler, range(126, 299))
    assert final_loss(model) < 2 * alive
    events = [record["event"] for record in hdet.read_journal(path).rounds]
    assert events.count("rolled_back") == 1


def test_buffers_go_back_with_the_model_alone() -> None:
    """BatchNorm's statistics became NaN: with model= they are rolled back, without it they are not known."""
    for known in (True, False):
        model = network(nn.BatchNorm1d(32))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        scheduler = hdet.auto(optimizer, total_steps=200, model=model if known else None)
        train(model, optimizer, scheduler, range(60))
        norm: Any = model[1]
        norm.running_mean.fill_(math.nan)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, optimizer, scheduler, range(60, 100))
        assert bool(norm.running_mean.isfinite().all()) is known


def test_without_snapshots_weights_that_are_no_numbers_are_an_error() -> None:
    model, optimizer, scheduler = built(rollback=False)
    train(model, optimizer, scheduler, range(60))
    search = search_of(scheduler)
    assert search.tensors(optimizer, 60)["snapshots"] == []
    damage(model, lambda p: p.mul_(math.nan))
    with pytest.raises(DivergedError, match=r"NaN or infinite at step 61.*leave rollback=False out"):
        train(model, optimizer, scheduler, range(60, 80))


def test_where_the_loss_leaps_whatever_the_weights_the_rate_is_as_before() -> None:
    model, optimizer, scheduler = built()
    train(model, optimizer, scheduler, range(126))
    rate = scheduler.search.learned.peak_factor
    with pytest.warns(SearchWarning, match="training diverged") as caught:
        train(model, optimizer, scheduler, range(126, 299), tells=lambda loss, t: loss + 1000)
    assert len([w for w in caught if w.category is SearchWarning]) == 1
    assert scheduler.search.learned.peak_factor == pytest.approx(rate)


def test_a_first_step_to_nowhere_is_undone() -> None:
    model, optimizer, scheduler = built(1e14, make=torch.optim.SGD)
    train(model, optimizer, scheduler, range(100))
    assert final_loss(model) < final_loss(network())


# -- steps that are not steps ------------------------------------------------------------------------------------------


def test_rounds_count_the_optimizers_steps(tmp_path: Path) -> None:
    """The schedule is stepped three times for each of them, as Accelerate does."""
    path = tmp_path / "run.jsonl"
    model, optimizer, scheduler = built(1e-3, 300, journal=path)
    for t in range(100):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(t))
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        scheduler.step()
        scheduler.step()
    steps = [record["step"] for record in hdet.read_journal(path).rounds]
    ends = [1, 2]  # the first step was too short to be measured
    while ends[-1] < 100:
        ends.append(next_end(ends[-1]))
    assert steps == [*(3 * end - 2 for end in ends if 3 * end - 2 < 299), 299, 300]
    assert final_loss(model) < 0.5 * final_loss(network())


def test_steps_that_move_nothing_keep_to_the_guess_and_say_so() -> None:
    """Without gradients: as where GradScaler skips."""
    _, optimizer, scheduler = built()

    def stand() -> None:
        for _ in range(299):
            optimizer.step()
            scheduler.step()

    with pytest.warns(
        SearchWarning, match=r"search stopped at step 90: no step has moved the weights; .*Call optimizer.step\(\)"
    ):
        stand()
    assert search_of(scheduler).learned.phase is Phase.STOPPED
    assert scheduler.search.learned.peak_factor == 1.0


def test_a_first_step_is_looked_at_however_late_it_comes(tmp_path: Path) -> None:
    """The schedule has fallen already when GradScaler, or the user, makes the first step."""
    model, path = network(), tmp_path / "run.jsonl"
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    cosine = CosineAnnealingLR(optimizer, 200)
    scheduler = hdet.auto(optimizer, schedule=cosine, total_steps=200, journal=path)
    for _ in range(36):
        scheduler.step()
    train(model, optimizer, scheduler, range(36, 61))
    events = {record["step"]: record["event"] for record in hdet.read_journal(path).rounds}
    assert [step for step, event in events.items() if event == "first_step"] == [37, 38]


def test_it_is_no_part_of_a_sequence() -> None:
    optimizer = torch.optim.Adam(network().parameters(), lr=3e-3)
    first = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    second = hdet.auto(optimizer, total_steps=100)
    with pytest.raises(ArgumentError, match=r"cannot be a part of a SequentialLR; give .* hdet\.auto\(.*schedule="):
        torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[60])


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_lr", ["auto", "automatic"])
def test_a_word_in_place_of_a_rate_is_told_of_the_door(max_lr: Any) -> None:
    optimizer = torch.optim.Adam(network().parameters(), lr=0.5)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ArgumentError, match=r"write scheduler = hdet\.auto\(optimizer, total_steps=\.\.\.\)"):
        hdet.OneCycleLR(optimizer, max_lr, total_steps=100)
    assert optimizer.state_dict() == before


@pytest.mark.parametrize("name", ["auto_lr", "decay", "spread", "sync_every", "seed", "max_lr", "pct_start"])
def test_what_is_the_ensembles_is_not_the_searchs(name: str) -> None:
    optimizer = torch.optim.Adam(network().parameters(), lr=0.5)
    with pytest.raises(TypeError, match=name):
        hdet.auto(optimizer, total_steps=100, **{name: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["rollback", "highest"])
def test_what_is_the_searchs_is_not_the_ensembles(name: str) -> None:
    optimizer = torch.optim.Adam(network().parameters(), lr=0.5)
    with pytest.raises(TypeError, match=name):
        hdet.OneCycleLR(optimizer, 0.1, total_steps=100, **{name: False})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rollback": 1}, "rollback must be True or False"),
        ({"schedule_every": 2}, "schedule_every must be 1 without schedule="),
        ({"total_steps": 0}, "total_steps must be an integer, at least 1"),
        ({"highest": -1.0}, "highest must be a rate above 0"),
        ({"schedule": 3}, "schedule must be"),
    ],
)
def test_bad_arguments_are_refused_before_anything_changes(arguments: dict[str, Any], words: str) -> None:
    optimizer = torch.optim.Adam(network().parameters(), lr=0.5)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ArgumentError, match=words):
        hdet.auto(optimizer, **{"total_steps": 100, **arguments})
    assert optimizer.state_dict() == before
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("rate", [0.0, 1e-20, 1e20])
def test_guesses_from_which_nothing_can_be_found_are_refused(rate: float) -> None:
    optimizer = torch.optim.Adam(network().parameters(), lr=rate)
    with pytest.raises(ArgumentError, match="a search begins from the optimizer's own lr"):
        hdet.auto(optimizer, total_steps=100)


def test_a_journal_has_the_rates_that_were_used_also_with_other_constants() -> None:
    records: list[dict[str, Any]] = []
    sink = SimpleNamespace(write=records.append)
    model, optimizer, scheduler = built(steps=100, journal=sink)
    search = search_of(scheduler)
    search.rule = dataclasses.replace(search.rule, constants=DEFAULT._replace(min_rise=0.05))
    rates = train(model, optimizer, scheduler, range(100))
    rounds = [record for record in records if record["kind"] == "round"]
    assert [round_["base_before"] for round_ in rounds] == [rates[round_["step"] - 1] for round_ in rounds]
    assert [round_["base"] for round_ in rounds[:-1]] == [rates[round_["step"]] for round_ in rounds[:-1]]


def test_a_run_without_losses_is_not_warned_of_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """It may be a GAN, which must not give its loss."""
    model, optimizer, scheduler = built(steps=100)
    with warnings.catch_warnings(), caplog.at_level("INFO", logger="hdet"):
        warnings.simplefilter("error")
        train(model, optimizer, scheduler, range(2), tells=lambda loss, t: None)
        assert "no loss" not in caplog.text
        train(model, optimizer, scheduler, range(2, 100), tells=lambda loss, t: None)
    assert caplog.text.count("no loss was given until step 3") == 1
    assert "Give the loss" not in caplog.text
