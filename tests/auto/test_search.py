"""The search on real training: what it finds, what it leaves alone, and that ranks decide alike."""

from __future__ import annotations

import copy
import gc
import json
import math
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import hdet
from hdet.auto.rounds import next_end
from hdet.auto.rule import Phase
from hdet.auto.search import Search
from hdet.errors import ArgumentError, DisagreementError, DivergedError, SearchWarning
from tests.ranks import error_of, run_ranks

Batch = tuple[Tensor, Tensor]
pytestmark = [
    pytest.mark.filterwarnings("ignore:resumed at step:hdet.errors.ResumeWarning"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
]


def problem(k: int, size: int = 64) -> Batch:
    """Batch ``k`` of an endless stream: a smooth target with a little noise."""
    g = torch.Generator().manual_seed(1000 + k)
    x = torch.randn(size, 6, generator=g)
    y = torch.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3]
    return x, y + 0.05 * torch.randn(size, 1, generator=g)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def network(batch_norm: bool = False) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        middle = [nn.BatchNorm1d(32)] if batch_norm else []
        return nn.Sequential(nn.Linear(6, 32), *middle, nn.Tanh(), nn.Linear(32, 1))


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    layers = list(model.children())
    return [{"params": layers[0].parameters()}, {"params": layers[-1].parameters()}]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    steps: range,
    own: int = 0,
    tells: Callable[[Tensor, int], Any] = lambda loss, t: loss,
) -> list[list[float]]:
    """The rates of all steps. ``tells``: what the scheduler is given."""
    rates = []
    for t in steps:
        optimizer.zero_grad()
        loss = loss_of(model, problem(t + own))
        loss.backward()
        optimizer.step()
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        told = tells(loss, t)
        scheduler.step(*([] if told is None else [told]))
    return rates


def final_loss(model: nn.Module) -> float:
    with torch.no_grad():
        return float(loss_of(model, problem(999_999, 2000)))


def built(
    guess: float = 1e-3, steps: int = 300, make: Any = torch.optim.Adam, **arguments: Any
) -> tuple[nn.Module, torch.optim.Optimizer, hdet.OneCycleLR]:
    model = network()
    optimizer = make(model.parameters(), lr=guess)
    return model, optimizer, hdet.OneCycleLR(optimizer, max_lr="auto", total_steps=steps, **arguments)


def search_of(scheduler: hdet.OneCycleLR) -> Search:
    search = scheduler._run.way
    assert isinstance(search, Search)
    return search


def fixed(rate: float, steps: int = 300, make: Any = torch.optim.Adam) -> float:
    model = network()
    optimizer = make(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    train(model, optimizer, scheduler, range(steps - 1), tells=lambda loss, t: None)
    return final_loss(model)


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


# -- what is found -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:training was ruined:hdet.errors.SearchWarning")
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
    for low, high in zip(rates[0][1:], rates[1][1:], strict=True):
        assert low == pytest.approx(high, rel=0.1)


def test_without_a_search_it_is_torchs_scheduler_bit_for_bit() -> None:
    """Rates with their warm-up, weights, BatchNorm and RNG: it only looks on."""
    weights = []
    for ours in (True, False):
        model = network(batch_norm=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=60)
        if ours:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            scheduler = hdet.OneCycleLR(optimizer, max_lr="auto", total_steps=60, auto_lr=False, model=model)
        before = torch.random.get_rng_state()
        train(model, optimizer, scheduler, range(60), tells=lambda loss, t: loss if ours else None)  # noqa: B023
        assert torch.equal(before, torch.random.get_rng_state())
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
    assert data.header["arguments"]["max_lr"] == "auto"
    assert data.rounds[0]["event"] == "first step"
    for record in data.rounds[1:]:
        assert record["base_before"] == [pytest.approx(rates[record["step"] - 1])]
        assert record["shape"][0] > 0
        (row,) = record["replicas"]
        assert row["values"] == record["base_before"]
        assert math.isfinite(row["loss"])
        assert row["loss"] == row["signal"]
        assert record["alarm"] is None
        assert (record["went_back_to"] is not None) == (record["event"] or "").startswith("ruined: rolled back")
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
    scheduler = hdet.OneCycleLR(optimizer, max_lr="auto", total_steps=100)
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


def test_without_a_loss_it_finds_the_rate_and_says_once_what_is_missing() -> None:
    model, optimizer, scheduler = built(1e-5, 200)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, scheduler, range(200), tells=lambda loss, t: None)
    told = [w for w in caught if issubclass(w.category, SearchWarning)]
    assert len(told) == 1
    assert "scheduler.step(loss)" in str(told[0].message)
    assert told[0].filename == __file__
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
        loss = loss_of(model, problem(t))
        scheduler.observe(loss)
        loss.backward()
        optimizer.step()
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        scheduler.step()
    assert rates == expected


# -- rolling back ------------------------------------------------------------------------------------------------------


def ruin(model: nn.Module, how: Callable[[Tensor], Any]) -> None:
    with torch.no_grad():
        for p in model.parameters():
            how(p)


@pytest.mark.parametrize("gives_loss", [True, False])
@pytest.mark.parametrize("go_on", [7, 2])
def test_weights_that_are_no_numbers_are_put_back_at_a_third_of_the_rate(gives_loss: bool, go_on: int) -> None:
    model, optimizer, scheduler = built()
    tells = (lambda loss, t: loss) if gives_loss else (lambda loss, t: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, optimizer, scheduler, range(120), tells=tells)
    rate = scheduler._run.way.learned[0]
    ruin(model, lambda p: p.mul_(math.nan))
    with pytest.warns(SearchWarning, match=r"ruined at step 124: the weights of step 87 are put back") as caught:
        train(model, optimizer, scheduler, range(120, 200), tells=tells)
    assert [w.filename for w in caught if w.category is SearchWarning] == [__file__]
    assert scheduler._run.way.learned[0] == pytest.approx(rate / 3)
    assert math.isfinite(final_loss(model))
    assert go_on


def test_a_network_that_explodes_without_overflowing_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model, optimizer, scheduler = built(journal=path)
    train(model, optimizer, scheduler, range(126))
    alive = final_loss(model)
    ruin(model, lambda p: p.mul_(30.0))
    with pytest.warns(SearchWarning, match="training was ruined"):
        train(model, optimizer, scheduler, range(126, 299))
    assert final_loss(model) < 2 * alive
    events = [record["event"] for record in hdet.read_journal(path).rounds]
    assert sum((event or "").startswith("ruined: rolled back to step") for event in events) == 1


def test_buffers_go_back_with_the_model_alone() -> None:
    """BatchNorm's statistics became NaN: with model= they are put back, without they are not known."""
    for known in (True, False):
        model = network(batch_norm=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        scheduler = hdet.OneCycleLR(optimizer, max_lr="auto", total_steps=200, model=model if known else None)
        train(model, optimizer, scheduler, range(60))
        norm: Any = model[1]
        norm.running_mean.fill_(math.nan)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, optimizer, scheduler, range(60, 100))
        assert bool(norm.running_mean.isfinite().all()) is known


def test_without_snapshots_weights_that_are_no_numbers_are_an_error() -> None:
    model, optimizer, scheduler = built(go_back=False)
    train(model, optimizer, scheduler, range(60))
    search = search_of(scheduler)
    assert search.search(optimizer)["snapshots"] == []
    ruin(model, lambda p: p.mul_(math.nan))
    with pytest.raises(DivergedError, match=r"not finite at step 61.*leave go_back=False out"):
        train(model, optimizer, scheduler, range(60, 80))


def test_where_the_loss_leaps_whatever_the_weights_the_rate_is_as_before() -> None:
    model, optimizer, scheduler = built()
    train(model, optimizer, scheduler, range(126))
    rate = scheduler._run.way.learned[0]
    with pytest.warns(SearchWarning, match="training was ruined") as caught:
        train(model, optimizer, scheduler, range(126, 299), tells=lambda loss, t: loss + 1000)
    assert len([w for w in caught if w.category is SearchWarning]) == 1
    assert scheduler._run.way.learned[0] == pytest.approx(rate)


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
        loss = loss_of(model, problem(t))
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        scheduler.step()
        scheduler.step()
    steps = [record["step"] for record in hdet.read_journal(path).rounds]
    ends = [1]
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

    with pytest.warns(SearchWarning, match=r"no step has moved the weights, at step 104: .*Call optimizer.step\(\)"):
        stand()
    assert search_of(scheduler).found.phase is Phase.KEPT
    assert scheduler._run.way.learned == [1.0]


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
    assert [step for step, event in events.items() if event == "first step"] == [37]


def test_after_another_scheduler_its_training_stays() -> None:
    """SequentialLR builds both at once: what the first one trained is not this one's to undo."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    first = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    second = hdet.OneCycleLR(optimizer, max_lr="auto", total_steps=100)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[60])
    before = math.nan
    for t in range(70):
        optimizer.zero_grad()
        loss_of(model, problem(t)).backward()
        optimizer.step()
        both.step()
        if t == 59:
            before = final_loss(model)
    assert before < 0.95 * final_loss(network())
    assert final_loss(model) < 1.1 * before
    assert search_of(second)._made == 10


# -- checkpoints and copies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_search", [True, False])
@pytest.mark.parametrize("stop", [1, 10, 26, 70, 150])
def test_resume_goes_on_as_if_nothing_had_happened(stop: int, with_search: bool, tmp_path: Path) -> None:
    """With what the search holds in tensors; without it, a way and snapshots of its own are made."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer, hdet.OneCycleLR]:
        model = network()
        optimizer = torch.optim.Adam(two_groups(model), lr=1e-3)
        return model, optimizer, hdet.OneCycleLR(optimizer, max_lr="auto", total_steps=200)

    model, optimizer, scheduler = made()
    train(model, optimizer, scheduler, range(stop))
    before = scheduler._run.way.learned
    parts = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), scheduler.search_state_dict()]
    torch.save(parts, tmp_path / "saved.pt")
    json.dumps(scheduler.state_dict()["hdet"], default=str)
    rest = train(model, optimizer, scheduler, range(stop, 200))

    resumed, optimizer, scheduler = made()
    *states, search = torch.load(tmp_path / "saved.pt")
    for part, state in zip((resumed, optimizer, scheduler), states, strict=True):
        part.load_state_dict(state)  # type: ignore[attr-defined]
    if with_search:
        scheduler.check_search_state_dict(search, states[2])
        scheduler.load_search_state_dict(search)
    assert scheduler._run.way.learned == before
    again = train(resumed, optimizer, scheduler, range(stop, 200))
    if with_search:  # losses of the round that was interrupted are lost, and matter to the judge alone
        assert again == rest
        assert all(map(torch.equal, resumed.state_dict().values(), model.state_dict().values()))
    else:
        assert final_loss(resumed) < 0.7 * final_loss(network())


def test_an_earlier_checkpoint_is_searched_on_from() -> None:
    model, optimizer, scheduler = built(steps=100)
    train(model, optimizer, scheduler, range(7))
    early = copy.deepcopy([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
    search = search_of(scheduler)
    found = search.learned
    train(model, optimizer, scheduler, range(7, 80))
    assert not search._looks
    for part, state in zip((model, optimizer, scheduler), early, strict=True):
        part.load_state_dict(state)  # type: ignore[attr-defined]
    assert search._looks
    assert search.learned == found
    train(model, optimizer, scheduler, range(7, 11))
    assert search.learned != found


def damaged(state: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    return {**state, "hdet": {**state["hdet"], name: value}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", 5),
        ("way", "replicas"),
        ("way", "probed"),
        ("searches", 1),
        ("search", [["level", 0.0]]),
        ("search", None),
        ("made", -1),
        ("begun", "one"),
        ("ended", 0.5),
        ("highest", math.nan),
        ("falling", None),
        ("has_losses", 0),
        ("knobs", ["lr[0]", "lr[1]"]),
    ],
)
def test_a_damaged_state_is_refused_before_anything_changes(name: str, value: Any) -> None:
    model, optimizer, scheduler = built(steps=100)
    train(model, optimizer, scheduler, range(15))
    good = scheduler.state_dict()
    with pytest.raises(ArgumentError):
        scheduler.load_state_dict(damaged(good, name, value))
    assert repr(scheduler.state_dict()) == repr(good)


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.update(version=5),
        lambda s: s.update(step=3),
        lambda s: s.pop("measure"),
        lambda s: s["measure"].pop("rates"),
        lambda s: s["measure"].update(origin=[torch.ones(1)]),
        lambda s: s["measure"].update(places=[99]),
        lambda s: s.update(kept=[["a", "b"]]),
        lambda s: s["snapshots"][0][1].pop("states"),
        lambda s: s["snapshots"][0][1].update(weights=[]),
    ],
)
def test_a_damaged_search_is_refused_before_anything_changes(damage: Callable[[Any], None]) -> None:
    model, optimizer, scheduler = built(steps=100)
    train(model, optimizer, scheduler, range(15))
    held = scheduler.search_state_dict()
    bad = {**held, "measure": dict(held["measure"])}
    bad["snapshots"] = [[slot, dict(row)] for slot, row in held["snapshots"]]
    damage(bad)
    search = search_of(scheduler)
    before = (search._measure, search._snapshots, search.found)
    for refuse in (
        lambda: scheduler.check_search_state_dict(bad, scheduler.state_dict()),
        lambda: scheduler.load_search_state_dict(bad),
    ):
        with pytest.raises(ArgumentError, match="the state of a search does not fit"):
            refuse()
    assert (search._measure, search._snapshots, search.found) == before


def test_checkpoints_of_other_schedulers() -> None:
    model, optimizer, searching = built(0.01, 100)
    trained = hdet.OneCycleLR(optimizer, 0.01, total_steps=100)
    for one, other in ((trained, searching), (searching, trained)):
        with pytest.raises(ArgumentError, match='of a run of the kind "'):
            one.load_state_dict(other.state_dict())
    torchs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=100)
    for _ in range(50):
        torchs.step()
    searching.load_state_dict(torchs.state_dict())
    optimizer.step()
    searching.step()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(torchs.get_last_lr()[0], rel=0.1)
    assert model is not None


def test_a_copy_finds_the_rate_too() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    scheduler = hdet.OneCycleLR(optimizer, max_lr="auto", total_steps=200, model=model)
    copied = copy.deepcopy(scheduler)
    found = search_of(copied).model
    assert found is not None
    assert found is not model
    train(found, copied.optimizer, copied, range(200))
    assert final_loss(found) < 0.5 * final_loss(network())


def test_copies_of_a_scheduler_go_their_own_way() -> None:
    model, optimizer, scheduler = built(steps=100)
    train(model, optimizer, scheduler, range(10))
    for other in (copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler.state_dict()))):
        state = other if isinstance(other, dict) else other.state_dict()
        search = dict(state["hdet"]["search"])
        assert search["level"] == pytest.approx(math.log(scheduler._run.way.learned[0]))
        assert repr(search) == repr(dict(scheduler.state_dict()["hdet"]["search"]))


def test_nothing_is_left_on_the_optimizer() -> None:
    _, optimizer, scheduler = built(steps=100)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    scheduler.load_state_dict(scheduler.state_dict())
    del scheduler
    gc.collect()
    assert not optimizer._optimizer_step_pre_hooks


# -- ranks -------------------------------------------------------------------------------------------------------------


def rounds_of(rank: int, path: str) -> list[tuple[Any, ...]]:
    """Every rank trains the same, without DDP: weights are equal."""
    model = network()
    optimizer = torch.optim.Adam(two_groups(model), lr=1e-3)
    journal = f"{path}-{rank}"
    scheduler = hdet.OneCycleLR(optimizer, max_lr="auto", total_steps=60, journal=journal)
    train(model, optimizer, scheduler, range(60))
    if rank > 0:
        assert not Path(journal).exists()  # one rank writes
        return []
    told = ("reach", "learned", "event", "base")
    rows = hdet.read_journal(journal).rounds
    assert {len(record["replicas"]) for record in rows} == {1}  # the one model
    return [tuple(record[name] for name in told) for record in rows]


def test_what_is_found_is_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    alone = rounds_of(0, str(tmp_path / "alone"))
    assert len(alone) > 10
    assert run_ranks(rounds_of, 3, str(tmp_path / "shared"))[0] == alone


def apart(rank: int) -> Exception:
    model, optimizer, scheduler = built(steps=60)
    return error_of(lambda: train(model, optimizer, scheduler, range(60), 1000 * rank))


def test_ranks_that_train_apart_are_told() -> None:
    for error in run_ranks(apart, 2):
        assert isinstance(error, DisagreementError)
        assert "DistributedDataParallel" in str(error)


def guesses(rank: int) -> str:
    model, optimizer, scheduler = built(1e-3 * (1 + rank), 60)
    return repr(error_of(lambda: train(model, optimizer, scheduler, range(60))))


def test_guesses_that_differ_are_told_as_such() -> None:
    for message in run_ranks(guesses, 2):
        assert "DisagreementError" in message
        assert "rank 0: max_lr (the optimizer's lr) = [0.001]" in message
        assert "rank 1: max_lr (the optimizer's lr) = [0.002]" in message
        assert "DistributedDataParallel" not in message


LOSSES: dict[str, Callable[[Tensor, int, int], Any]] = {
    "all": lambda loss, t, rank: loss,
    "rank 0 only": lambda loss, t, rank: loss if rank == 0 else None,
    "NaN on one": lambda loss, t, rank: math.nan if rank == 1 else loss,
    "none": lambda loss, t, rank: None,
}


def ddp(rank: int, kind: str) -> tuple[list[list[float]], float, str]:
    model = network()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    scheduler = hdet.OneCycleLR(optimizer, max_lr="auto", total_steps=120)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rates = train(
            wrapped, optimizer, scheduler, range(120), 1000 * rank, tells=lambda loss, t: LOSSES[kind](loss, t, rank)
        )
    return rates, final_loss(model), repr(scheduler.state_dict())


@pytest.mark.parametrize("kind", LOSSES)
def test_ranks_decide_alike_whoever_has_a_loss(kind: str) -> None:
    first, *others = run_ranks(ddp, 3, kind)
    assert all(other == first for other in others)
    assert first[1] < 0.5 * final_loss(network())


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_lr": "automatic"}, '"auto"'),
        ({"max_lr": "auto", "auto_lr": hdet.Published()}, "auto_lr"),
        ({"max_lr": "auto", "auto_lr_start": 5}, "auto_lr_start"),
        ({"max_lr": "auto", "decay": "exponential"}, "decay"),
        ({"max_lr": "auto", "spread": 0.1}, "spread"),
        ({"max_lr": "auto", "sync_every": 5}, "sync_every"),
        ({"max_lr": "auto", "seed": 3}, "seed"),
        ({"max_lr": "auto", "go_back": 1}, "go_back"),
        ({"max_lr": 0.1, "go_back": False}, "go_back"),
        ({"max_lr": 0.1, "sync_every": "auto"}, "sync_every"),
    ],
)
def test_bad_arguments_are_refused_before_anything_changes(arguments: dict[str, Any], words: str) -> None:
    optimizer = torch.optim.Adam(network().parameters(), lr=0.5)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ArgumentError, match=words):
        hdet.OneCycleLR(optimizer, total_steps=100, **arguments)
    assert optimizer.state_dict() == before
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("rate", [0.0, 1e-20, 1e20])
def test_guesses_from_which_nothing_can_be_found_are_refused(rate: float) -> None:
    optimizer = torch.optim.Adam(network().parameters(), lr=rate)
    with pytest.raises(ArgumentError, match="a search begins from the optimizer's own lr"):
        hdet.OneCycleLR(optimizer, max_lr="auto", total_steps=100)
