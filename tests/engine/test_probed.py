"""The probed run on real training: what it finds, what it leaves alone, and that ranks only share the work."""

from __future__ import annotations

import copy
import gc
import json
import math
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import hdet
from hdet.algorithm.auto.pilot import Phase
from hdet.engine.probed.slots import Slots
from hdet.engine.probed.way import ProbedWay
from hdet.errors import ArgumentError, DisagreementError
from tests.ranks import error_of, run_ranks

Batch = tuple[Tensor, Tensor]


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


def probe_of(model: nn.Module) -> hdet.ProbeBatch:
    return hdet.ProbeBatch(model, loss_of, lambda k: problem(100_000 + k, 32))


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    layers = list(model.children())
    return [{"params": layers[0].parameters()}, {"params": layers[-1].parameters()}]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: range, own: int = 0
) -> list[list[float]]:
    rates = []
    for t in steps:
        optimizer.zero_grad()
        loss = loss_of(model, problem(t + own))
        loss.backward()
        optimizer.step()
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        scheduler.step(loss)
    return rates


def final_loss(model: nn.Module) -> float:
    with torch.no_grad():
        return float(loss_of(model, problem(999_999, 2000)))


def run(
    guess: float, steps: int = 300, make: Any = torch.optim.Adam, **arguments: Any
) -> tuple[float, hdet.OneCycleLR]:
    model = network()
    optimizer = make(model.parameters(), lr=guess)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=steps, probe=probe_of(model), **arguments)
    train(model, optimizer, scheduler, range(steps))
    return final_loss(model), scheduler


def fixed(rate: float, steps: int = 300, make: Any = torch.optim.Adam) -> float:
    model = network()
    optimizer = make(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for t in range(steps - 1):
        optimizer.zero_grad()
        loss_of(model, problem(t)).backward()
        optimizer.step()
        scheduler.step()
    return final_loss(model)


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


@pytest.mark.parametrize("make", [torch.optim.Adam, momentum], ids=["adam", "sgd"])
def test_from_any_guess_it_goes_most_of_the_way_to_the_best_of_a_sweep(make: Any) -> None:
    best = min(fixed(rate, make=make) for rate in (3e-3, 1e-2, 3e-2, 1e-1, 3e-1))
    untrained = final_loss(network())
    for guess in (1e-6, 1e-3, 1.0, 100.0):
        found, _ = run(guess, make=make)
        assert found - best < 0.35 * (untrained - best)
    assert fixed(1e-6, make=make) > 0.9 * untrained  # what the first guess costs without


def test_the_guess_does_not_matter_after_the_first_step() -> None:
    rates = []
    for guess in (1e-5, 1e-3):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=guess)
        scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=200, probe=probe_of(model))
        rates.append(train(model, optimizer, scheduler, range(20)))
    assert rates[0][0] != rates[1][0]
    for low, high in zip(rates[0][1:], rates[1][1:], strict=True):
        assert low == pytest.approx(high, rel=0.1)


def test_without_a_controller_it_is_torchs_scheduler_bit_for_bit() -> None:
    """Rates with their warm-up, weights, BatchNorm and RNG: probes only look."""
    weights = []
    for probed in (True, False):
        model = network(batch_norm=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=60)
        if probed:
            scheduler = hdet.OneCycleLR(
                optimizer, 0.01, total_steps=60, fanout="probed", probe=probe_of(model), auto_lr=False
            )
        before = torch.random.get_rng_state()
        train(model, optimizer, _Quiet(scheduler), range(60))
        assert torch.equal(before, torch.random.get_rng_state())
        weights.append([v.clone() for v in model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def rounds_of(rank: int, path: str) -> list[tuple[Any, ...]]:
    """Every rank trains the same, without DDP: weights are equal, so the ranks only share the losses."""
    model = network()
    optimizer = torch.optim.Adam(two_groups(model), lr=1e-3)
    journal = f"{path}-{rank}"
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=60, probe=probe_of(model), journal=journal)
    train(model, optimizer, scheduler, range(60))
    if rank > 0:
        assert not Path(journal).exists()  # one rank writes
        return []
    told = ("loss_before", "reach", "learned", "event", "base")
    rows = hdet.read_journal(journal).rounds
    assert {len(record["replicas"]) for record in rows} == {1}  # the one model
    assert math.isnan(rows[0]["loss_before"])
    return [(record["replicas"][0]["signal"], *(record[name] for name in told)) for record in rows]


@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_are_the_same_bits_on_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    alone = rounds_of(0, str(tmp_path / "alone"))
    assert len(alone) > 10
    shared = run_ranks(rounds_of, ranks, str(tmp_path / "shared"))[0]
    assert repr(shared) == repr(alone)  # there is a NaN in it


def apart(rank: int) -> Exception:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=60, probe=probe_of(model))
    return error_of(lambda: train(model, optimizer, scheduler, range(60), 1000 * rank))


def test_ranks_that_train_apart_are_told() -> None:
    for error in run_ranks(apart, 2):
        assert isinstance(error, DisagreementError)
        assert "DistributedDataParallel" in str(error)


def guesses(rank: int) -> str:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 * (1 + rank))
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=60, probe=probe_of(model))
    return repr(error_of(lambda: train(model, optimizer, scheduler, range(60))))


def test_guesses_that_differ_are_told_as_such() -> None:
    for message in run_ranks(guesses, 2):
        assert "DisagreementError" in message
        assert "rank 0: max_lr (the optimizer's lr) = [0.001]" in message
        assert "rank 1: max_lr (the optimizer's lr) = [0.002]" in message
        assert "DistributedDataParallel" not in message


def ddp(rank: int) -> tuple[list[list[float]], float]:
    model = network()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=120, probe=probe_of(wrapped))
    rates = train(wrapped, optimizer, scheduler, range(120), 1000 * rank)
    return rates, final_loss(model)


def test_under_ddp_all_ranks_follow_one_rate_and_find_it() -> None:
    (rates, loss), (others, other_loss) = run_ranks(ddp, 2)
    assert rates == others
    assert loss == other_loss
    assert loss < 0.5 * final_loss(network())


@pytest.mark.parametrize("stop", [1, 10, 26, 70, 110, 150])
def test_resume_goes_on_as_if_nothing_had_happened(stop: int, tmp_path: Path) -> None:
    """At a round's end nothing is lost but the weights to go back to, and the way that only the search needs."""

    def built() -> tuple[nn.Module, torch.optim.Optimizer, hdet.OneCycleLR]:
        model = network()
        optimizer = torch.optim.Adam(two_groups(model), lr=1e-3)
        return model, optimizer, hdet.OneCycleLR(optimizer, "auto", total_steps=200, probe=probe_of(model))

    model, optimizer, scheduler = built()
    train(model, optimizer, scheduler, range(stop))
    ends = scheduler._run.way.rounds
    assert isinstance(scheduler._run.way, ProbedWay)
    at = ends.next_end(stop)
    train(model, optimizer, scheduler, range(stop, at))
    found = at > 100  # the schedule has fallen below 0.9: nothing is raised any more
    before = scheduler._run.way.learned[0]
    torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], tmp_path / "saved.pt")
    json.dumps(scheduler.state_dict()["hdet"], default=str)
    rest = train(model, optimizer, scheduler, range(at, 200))

    resumed, optimizer, scheduler = built()
    states = torch.load(tmp_path / "saved.pt")
    for part, state in zip((resumed, optimizer, scheduler), states, strict=True):
        part.load_state_dict(state)  # type: ignore[attr-defined]
    assert scheduler._run.way.learned[0] == before
    again = train(resumed, optimizer, scheduler, range(at, 200))
    if found:
        assert again == rest
    else:
        assert final_loss(resumed) < 0.7 * final_loss(network())


def test_the_journal_tells_what_happened_and_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=400, probe=probe_of(model), journal=path)
    rates = [row[0] for row in train(model, optimizer, scheduler, range(400))]
    data = hdet.read_journal(path)
    assert data.header["arguments"]["fanout"] == "probed"
    assert data.rounds[0]["event"] == "first step"
    for before, record in pairwise(data.rounds):
        assert record["base_before"] == [pytest.approx(rates[record["step"] - 1])]
        assert record["shape"][0] > 0
        assert record["replicas"][0]["values"] == record["base_before"]
        went_back = (record["event"] or "").startswith("too hot: went back to step")
        least, most = (1 / 3, 1 / 3) if went_back else (1 / 2, 1 / 2) if record["event"] else (1.0, 2.0)
        most = most if record["shape"][0] >= 0.9e-6 else least
        assert least * (1 - 1e-9) <= record["learned"][0] / before["learned"][0] <= most * (1 + 1e-9)
        assert math.isfinite(record["loss_before"])
        assert (record["went_back_to"] is not None, record["alarm"], "verdict" in record) == (went_back, None, False)

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
    with pytest.raises(ArgumentError, match="parameter groups"):
        _two_rates(path, tmp_path)


def _two_rates(path: Path, folder: Path) -> None:
    header, *rounds = path.read_text().splitlines()
    record = json.loads(header)
    record["knobs"] = ["lr[0]", "lr[1]", "lr[2]"]
    doubled = []
    for line in rounds:
        row = json.loads(line)
        row["base"], row["base_before"] = row["base"] * 3, row["base_before"] * 3
        doubled.append(json.dumps(row))
    other = folder / "three.jsonl"
    other.write_text("\n".join([json.dumps(record), *doubled]) + "\n")
    hdet.schedule_from(other, torch.optim.Adam(two_groups(network())))


def test_any_schedule_through_the_ensemble() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    ensemble = hdet.Ensemble(
        optimizer, CosineAnnealingLR(optimizer, 300), fanout="probed", probe=probe_of(model), total_steps=300
    )
    rates = [row[0] for row in train(model, optimizer, ensemble, range(300))]
    assert max(rates) > 1e-3
    assert rates[-1] < 1e-2 * max(rates)
    assert final_loss(model) < 0.5 * final_loss(network())


def test_only_some_groups_may_be_knobs() -> None:
    model = network()
    optimizer = torch.optim.Adam(two_groups(model), lr=1e-3)
    knobs = [hdet.knobs.lr(optimizer, groups=[1], spread=0.3)]
    ensemble = hdet.Ensemble(optimizer, knobs=knobs, fanout="probed", probe=probe_of(model), total_steps=100)
    rates = train(model, optimizer, ensemble, range(100))
    assert {row[0] for row in rates} == {1e-3}
    assert len({row[1] for row in rates}) > 10


def test_layers_may_be_frozen_and_thawed() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=120, probe=probe_of(model))
    first = next(iter(model.parameters()))
    for begin, end, trains in ((0, 47, True), (47, 90, False), (90, 120, True)):
        first.requires_grad_(trains)
        train(model, optimizer, scheduler, range(begin, end))
    assert final_loss(model) < final_loss(network())


def test_after_another_scheduler_its_training_stays() -> None:
    """SequentialLR builds both at once: what the first one trained is not this one's to undo."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    first = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    second = hdet.OneCycleLR(optimizer, 3e-3, total_steps=100, fanout="probed", probe=probe_of(model))
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[60])
    for t in range(70):
        optimizer.zero_grad()
        loss_of(model, problem(t)).backward()
        optimizer.step()
        both.step()
        if t == 59:
            before = final_loss(model)
    assert before < 0.95 * final_loss(network())
    assert final_loss(model) < 1.1 * before


def test_a_copy_finds_the_rate_too() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=200, probe=probe_of(model))
    copied = copy.deepcopy(scheduler)
    found = copied._run.way.probe.model  # type: ignore[attr-defined]
    assert found is not model
    train(found, copied.optimizer, copied, range(200))
    assert final_loss(found) < 0.5 * final_loss(network())


def test_a_blind_probe_and_steps_that_are_skipped_keep_to_the_guess() -> None:
    for blind in (True, False):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        probe: Any = (lambda: 1.0) if blind else probe_of(model)
        scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=300, probe=probe)
        for t in range(299):
            if blind:
                train(model, optimizer, scheduler, range(t, t + 1))
            else:
                optimizer.step()  # without gradients: nothing moves, as where GradScaler skips
                scheduler.step()
        assert float(optimizer.param_groups[0]["lr"]) <= 1.0
        if blind:
            assert scheduler._run.way.learned == [1.0]


def test_a_first_step_is_looked_at_however_late_it_comes(tmp_path: Path) -> None:
    """The schedule has fallen already when GradScaler, or the user, makes the first step."""
    model, path = network(), tmp_path / "run.jsonl"
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    cosine = CosineAnnealingLR(optimizer, 200)
    ensemble = hdet.Ensemble(optimizer, cosine, fanout="probed", probe=probe_of(model), total_steps=200, journal=path)
    for _ in range(46):
        ensemble.step()
    train(model, optimizer, ensemble, range(46, 61))
    events = {record["step"]: record["event"] for record in hdet.read_journal(path).rounds}
    assert [step for step, event in events.items() if event == "first step"] == [51]
    assert ensemble._run.way.pilot_state.phase is Phase.SEARCHING  # type: ignore[attr-defined]


def test_an_earlier_checkpoint_is_searched_on_from() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=100, probe=probe_of(model))
    train(model, optimizer, scheduler, range(15))
    early = copy.deepcopy([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
    way = scheduler._run.way
    found = way.learned
    train(model, optimizer, scheduler, range(15, 80))
    assert isinstance(way, ProbedWay)
    assert not way._looks
    for part, state in zip((model, optimizer, scheduler), early, strict=True):
        part.load_state_dict(state)  # type: ignore[attr-defined]
    assert way._looks
    assert way.learned == found
    train(model, optimizer, scheduler, range(15, 31))
    assert way.learned != found


def test_checkpoints_of_other_schedulers(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trained = hdet.OneCycleLR(optimizer, 0.01, total_steps=100)
    probed = hdet.OneCycleLR(optimizer, 0.01, total_steps=100, fanout="probed", probe=probe_of(model))
    for one, other in ((trained, probed), (probed, trained)):
        with pytest.raises(ArgumentError, match="fanout"):
            one.load_state_dict(other.state_dict())
    torchs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=100)
    for _ in range(50):
        torchs.step()
    probed.load_state_dict(torchs.state_dict())
    optimizer.step()
    probed.step()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(torchs.get_last_lr()[0], rel=0.1)


def test_an_explosion_is_undone_at_a_third_of_the_rate() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=300, probe=probe_of(model))
    train(model, optimizer, scheduler, range(120))
    rate = scheduler._run.way.learned[0]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(math.nan)
    train(model, optimizer, scheduler, range(120, 200))
    assert scheduler._run.way.learned[0] == pytest.approx(rate / 3)
    assert math.isfinite(final_loss(model))


def test_a_network_that_dies_without_exploding_comes_back(tmp_path: Path) -> None:
    """All weights 0: the loss is the first one again, and no gradient would ever change it."""
    path = tmp_path / "run.jsonl"
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=300, probe=probe_of(model), journal=path)
    train(model, optimizer, scheduler, range(205))
    alive = final_loss(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
            optimizer.state[p]["exp_avg"].zero_()
    train(model, optimizer, scheduler, range(205, 299))
    assert final_loss(model) < 2 * alive < 0.5 * final_loss(network())
    events = [record["event"] for record in hdet.read_journal(path).rounds]
    assert any(event and event.startswith("too hot: went back to step") for event in events)


def test_an_error_in_the_probe_reaches_the_caller_and_the_weights_are_as_before() -> None:
    model = network()

    def broken() -> float:
        raise ValueError("no such file")

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=100, probe=broken)
    with pytest.raises(ValueError, match="no such file"):
        train(model, optimizer, scheduler, range(1))
    assert math.isfinite(final_loss(model))


def test_nothing_is_left_on_the_optimizer() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=100, probe=probe_of(model))
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    scheduler.load_state_dict(scheduler.state_dict())
    del scheduler
    gc.collect()
    assert not optimizer._optimizer_step_pre_hooks


def test_copies_of_a_scheduler_go_their_own_way() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=100, probe=probe_of(model))
    train(model, optimizer, scheduler, range(10))
    for other in (copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler.state_dict()))):
        state = other if isinstance(other, dict) else other.state_dict()
        search = dict(state["hdet"]["search"])
        assert search["level"] == pytest.approx(math.log(scheduler._run.way.learned[0]))
        assert search == dict(scheduler.state_dict()["hdet"]["search"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_lr": "auto"}, "probe="),
        ({"max_lr": "automatic"}, '"auto"'),
        ({"max_lr": 0.1, "fanout": "probed"}, "probe="),
        ({"max_lr": 0.1, "fanout": "both"}, "fanout"),
        ({"max_lr": 0.1, "probe": lambda: 1.0}, "fanout"),
        ({"max_lr": "auto", "probe": lambda: 1.0, "auto_lr": hdet.Published()}, "auto_lr"),
        ({"max_lr": "auto", "probe": lambda: 1.0, "auto_lr_start": 5}, "auto_lr_start"),
        ({"max_lr": "auto", "probe": lambda: 1.0, "decay": "exponential"}, "decay"),
        ({"max_lr": "auto", "probe": lambda: 1.0, "fanout": "trained"}, "fanout"),
        ({"max_lr": "auto", "probe": lambda: 1.0, "spread": 0.1}, "spread"),
        ({"max_lr": 0.0, "fanout": "probed", "probe": lambda: 1.0}, "above 0"),
        ({"max_lr": -1.0, "fanout": "probed", "probe": lambda: 1.0}, "above 0"),
        ({"max_lr": "auto", "probe": lambda: 1.0, "sync_every": 5}, "sync_every"),
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


def test_the_ensemble_refuses_what_a_search_of_the_rate_cannot_judge() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.1)
    arguments: dict[str, Any] = {"fanout": "probed", "probe": probe_of(model)}
    with pytest.raises(ArgumentError, match="weight_decay"):
        hdet.Ensemble(optimizer, knobs=[hdet.knobs.optimizer(optimizer, "weight_decay", spread=0.3)], **arguments)
    with pytest.raises(ArgumentError, match="outer"):
        hdet.Ensemble(optimizer, outer=hdet.experimental.Outer(), **arguments)
    with pytest.raises(ArgumentError, match="controller"):
        hdet.Ensemble(optimizer, controller=hdet.Normalised(), **arguments)
    with pytest.raises(ArgumentError, match="probed"):
        hdet.Ensemble(optimizer, probe=probe_of(model))


def test_slots_put_back_weights_buffers_and_optimizer_state() -> None:
    model = network(batch_norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = CosineAnnealingLR(optimizer, 100)
    slots = Slots()
    train(model, optimizer, _Quiet(scheduler), range(3))
    slots.keep(7, optimizer, model)
    was = copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])
    train(model, optimizer, _Quiet(scheduler), range(3, 9))
    slots.restore_(7, optimizer, model)
    assert all(torch.equal(a, b) for a, b in zip(was[0].values(), model.state_dict().values(), strict=True))
    for saved, now in zip(was[1].values(), optimizer.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(saved[name], now[name]) for name in saved)


def test_slots_of_other_parameters_are_not_present() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    slots = Slots()
    for slot in range(3):
        slots.keep(slot, optimizer, None)
    slots.keep_only(frozenset({0, 2}))
    assert slots.present(optimizer) == {0, 2}
    next(iter(model.parameters())).requires_grad_(False)
    assert slots.present(optimizer) == frozenset()


def test_earlier_weights_are_shown_for_a_moment_only() -> None:
    model = network(batch_norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    slots = Slots()
    slots.keep(0, optimizer, model)
    was = copy.deepcopy(model.state_dict())
    train(model, optimizer, _Quiet(CosineAnnealingLR(optimizer, 100)), range(3))
    now = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyboardInterrupt), slots.shown(0, optimizer, model):
        assert all(torch.equal(value, was[name]) for name, value in model.state_dict().items())
        raise KeyboardInterrupt
    assert all(torch.equal(value, now[name]) for name, value in model.state_dict().items())


class _Quiet:
    """A torch scheduler that takes a loss and ignores it."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def step(self, loss: Tensor) -> None:
        self._scheduler.step()
