"""A probe on the training's own batches: which of them it judges by, what it needs, and what it says."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from tests.ranks import run_ranks
from tests.setups.problems import (
    Batch,
    Records,
    batch_of,
    final_loss,
    loss_of,
    network,
    probe_of,
    quiet,
    recorded,
    weights_of,
)
from tests.setups.runs import plain_loss

STEPS = 200
FACES = ["OneCycleLR", "Ensemble", "auto"]


def scheduler_of(face: str, optimizer: torch.optim.Optimizer, probe: Any, **more: Any) -> Any:
    if face == "OneCycleLR":
        return hdet.OneCycleLR(optimizer, "auto", total_steps=STEPS, probe=probe, **more)
    if face == "auto":
        return hdet.auto(optimizer, total_steps=STEPS, probe=probe, **more)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    return hdet.Ensemble(optimizer, schedule, fanout="probed", total_steps=STEPS, probe=probe, **more)


def train(model: nn.Module, scheduler: Any, steps: range, first: int = 0) -> None:
    """``first``: of the stream of batches."""
    for t in steps:
        scheduler.optimizer.zero_grad()
        batch = batch_of(first + t)
        loss = loss_of(model, batch)
        loss.backward()
        scheduler.optimizer.step()
        scheduler.observe(loss, batch=batch)
        scheduler.step()


@pytest.mark.covers("setups", "`hdet.TrainProbe`, no data beside", "from a guess 100 times too low")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("face", FACES)
def test_two_lines_find_the_rate(face: str) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    train(model, scheduler_of(face, optimizer, hdet.TrainProbe(model, loss_of)), range(STEPS))
    assert final_loss(model) < 2 * plain_loss(torch.optim.Adam, 1e-6, STEPS, face)


def test_a_round_is_judged_by_the_first_batch_of_an_earlier_one() -> None:
    """Three rounds ago by default, as soon as there were so many; never one that only the newer weights were
    trained on, except in the first round, where nothing is compared."""
    model, judged, journal = network(), [], Records()

    def loss_fn(inner: nn.Module, batch: Batch) -> Tensor:
        judged.append(next(t for t in range(STEPS) if torch.equal(batch[0], batch_of(t)[0])))
        return loss_of(inner, batch)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    scheduler = scheduler_of("OneCycleLR", optimizer, hdet.TrainProbe(model, loss_fn), journal=journal)
    train(model, scheduler, range(STEPS))
    ends = [record["step"] for record in journal.rounds]
    begins = [0, *ends]
    expected = [begins[max(0, k - 3)] for k in range(len(ends))]
    assert judged == [0, *(t for t in expected[1:] for _ in range(2))]


def test_a_batch_is_copied_when_it_is_observed() -> None:
    """A loop that fills the same memory again and again, as one with captured graphs does, ends up the same."""
    found = []
    for reuses in (False, True):
        model = network()
        scheduler = scheduler_of("OneCycleLR", torch.optim.Adam(model.parameters(), lr=1e-6), _probe(model))
        memory = tuple(part.clone() for part in batch_of(0))
        for t in range(60):
            batch = batch_of(t)
            if reuses:
                for mine, part in zip(memory, batch, strict=True):
                    mine.copy_(part)
                batch = memory
            scheduler.optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            scheduler.optimizer.step()
            scheduler.observe(loss, batch={"x": batch[0], "y": [batch[1]]})  # any nesting
            scheduler.step()
        found.append((weights_of(model), float(scheduler._run.way.probe())))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def _probe(model: nn.Module) -> hdet.TrainProbe:
    return hdet.TrainProbe(model, lambda inner, batch: loss_of(inner, (batch["x"], batch["y"][0])))


def test_dropout_batchnorm_and_generators_are_left_alone() -> None:
    model = network(nn.BatchNorm1d(32), nn.Dropout(0.2))
    scheduler = scheduler_of(
        "OneCycleLR", torch.optim.Adam(model.parameters(), lr=1e-6), hdet.TrainProbe(model, loss_of)
    )
    for t in range(10):  # five rounds end here, and none goes back
        scheduler.optimizer.zero_grad()
        loss = loss_of(model, batch_of(t))
        loss.backward()
        scheduler.optimizer.step()
        before = torch.get_rng_state(), model[1].running_mean.clone(), weights_of(model)
        scheduler.observe(loss, batch=batch_of(t))
        scheduler.step()
        after = torch.get_rng_state(), model[1].running_mean, weights_of(model)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), t
    assert all(module.training for module in model.modules())


# -- two ranks -----------------------------------------------------------------------------------------------------


def _own_data(rank: int) -> tuple[list[float], list[Any], Tensor, list[float]]:
    model = network()
    ddp = DistributedDataParallel(model)
    seen: list[float] = []

    def loss_fn(inner: nn.Module, batch: Batch) -> Tensor:
        seen.append(float(batch[0].sum()))
        return loss_of(inner, batch)

    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-6)
    journal = Records()
    scheduler = scheduler_of("OneCycleLR", optimizer, hdet.TrainProbe(ddp, loss_fn), journal=journal)
    train(ddp, scheduler, range(STEPS), first=10_000 * rank)
    events = [(r["step"], r["event"]) for r in journal.rounds]
    return scheduler.get_last_lr(), events, weights_of(model), seen


@pytest.mark.covers("setups", "`hdet.TrainProbe`, no data beside", "on two ranks")
def test_two_ranks_with_their_own_data_decide_alike_by_rank_0s_batches() -> None:
    (rates, events, weights, seen), (others, _, other_weights, also_seen) = run_ranks(_own_data, 2)
    assert rates == others
    assert rates[0] > 0
    assert torch.equal(weights, other_weights)
    firsts = {float(batch_of(t)[0].sum()) for t in range(STEPS)}
    assert set(seen) | set(also_seen) <= firsts
    assert also_seen, "two losses a round: rank 1 evaluates one"
    assert events


# -- mistakes ------------------------------------------------------------------------------------------------------


def test_without_a_batch_the_first_step_says_what_to_call() -> None:
    model = network()
    scheduler = scheduler_of("OneCycleLR", torch.optim.Adam(model.parameters()), hdet.TrainProbe(model, loss_of))
    loss_of(model, batch_of(0)).backward()
    scheduler.optimizer.step()
    with pytest.raises(hdet.ArgumentError, match=r"observe\(loss, batch=batch\)"):
        scheduler.step()


def test_a_batch_that_nobody_wants_is_refused() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    probed = hdet.OneCycleLR(optimizer, "auto", total_steps=STEPS, probe=probe_of(model))
    trained = hdet.OneCycleLR(torch.optim.Adam(model.parameters()), 1e-3, total_steps=STEPS)
    for scheduler in (probed, trained, hdet.Ensemble(torch.optim.Adam(model.parameters()))):
        with pytest.raises(hdet.ArgumentError, match="TrainProbe"):
            scheduler.observe(1.0, batch=batch_of(0))
        assert scheduler._run.meter.count == 0


@pytest.mark.parametrize("keep", [1, 0, -3, 2.5, True, "4"])
def test_keep_is_checked(keep: Any) -> None:
    with pytest.raises(hdet.ArgumentError, match=r"keep must be .* at least 2"):
        hdet.TrainProbe(network(), loss_of, keep=keep)


def test_replicas_that_train_apart_need_other_batches() -> None:
    with pytest.raises(hdet.ArgumentError, match="ProbeBatch"):
        hdet.ProbeLoss(hdet.TrainProbe(network(), loss_of))


# -- state ---------------------------------------------------------------------------------------------------------


def _resumed(kind: str, at: int, steps: int = STEPS) -> list[str]:
    """What is said when a run goes on at a step."""
    said = []
    state: Any = None
    for first in (True, False):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
        probe = hdet.TrainProbe(model, loss_of) if kind == "train" else probe_of(model)
        scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=steps, probe=probe, auto_lr=kind != "kept")
        if first:
            with quiet():
                _any_steps(model, scheduler, range(at), kind)
            state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
            continue
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        scheduler.load_state_dict(state[2])
        with recorded() as caught:
            _any_steps(model, scheduler, range(at, steps), kind)
        said = [str(w.message) for w in caught if w.category is hdet.ResumeWarning]
        assert float(final_loss(model)) < float(final_loss(network())) or kind == "kept"
    return said


def _any_steps(model: nn.Module, scheduler: Any, steps: range, kind: str) -> None:
    for t in steps:
        scheduler.optimizer.zero_grad()
        loss = loss_of(model, batch_of(t))
        loss.backward()
        scheduler.optimizer.step()
        scheduler.observe(loss, batch=batch_of(t) if kind == "train" else None)
        scheduler.step()


@pytest.mark.parametrize(
    ("kind", "at", "lost"),
    [
        ("held-out", 30, ["weights to go back to", "way measured"]),
        ("held-out", 33, ["weights to go back to", "way measured"]),  # inside a round
        ("held-out", 150, ["weights to go back to"]),  # nothing is raised any more
        ("train", 33, ["weights to go back to", "way measured", "TrainProbe"]),
        ("train", 150, ["weights to go back to", "TrainProbe"]),
    ],
)
def test_a_resumed_search_says_what_it_has_lost(kind: str, at: int, lost: list[str]) -> None:
    (words,) = _resumed(kind, at)
    assert f"resumed at step {at}" in words
    assert "multiplier" not in words
    for part in ("weights to go back to", "way measured", "TrainProbe"):
        assert (part in words) == (part in lost), words


@pytest.mark.parametrize(("kind", "at"), [("held-out", 0), ("held-out", STEPS), ("train", STEPS), ("kept", 33)])
def test_where_nothing_is_lost_nothing_is_said(kind: str, at: int) -> None:
    assert _resumed(kind, at) == []


def test_a_copy_of_the_scheduler_has_batches_of_its_own() -> None:
    model = network()
    scheduler = scheduler_of("OneCycleLR", torch.optim.Adam(model.parameters()), hdet.TrainProbe(model, loss_of))
    train(model, scheduler, range(20))
    again = pickle.loads(pickle.dumps(scheduler._run.way.probe))
    assert float(again()) == pytest.approx(float(scheduler._run.way.probe()))
    twin = copy.deepcopy(scheduler)
    train(twin._run.way.probe.model, twin, range(20, 40))
