"""Probes that say nothing: a warning and an alarm in the journal, and training goes on at about the guess."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet
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
    train,
)

STEPS = 200
GUESS = 0.02


def of_another_model() -> hdet.ProbeBatch:
    """A copy, as after moving or wrapping the model: its weights never change."""
    return probe_of(network())


def constant() -> float:
    return 1.0


def never_finite() -> float:
    return math.nan


def infinite() -> float:
    return math.inf


def of_nothing(model: nn.Module, batch: Batch) -> Tensor:
    return loss_of(model, batch) * math.nan


BLIND: dict[str, Callable[[], Any]] = {
    "another-model": of_another_model,
    "constant": lambda: constant,
    "never-finite": lambda: never_finite,
    "infinite": lambda: infinite,
    "never-finite-batch": lambda: probe_of(network(), of_nothing),
}


def run(probe: Any, guess: float = GUESS, steps: int = STEPS) -> tuple[nn.Module, list[float], Records]:
    model, journal = network(), Records()
    optimizer = torch.optim.Adam(model.parameters(), lr=guess)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=steps, probe=probe, journal=journal)
    return model, train(model, optimizer, scheduler, range(steps)), journal


@pytest.mark.parametrize("kind", BLIND)
def test_it_warns_and_leaves_an_alarm(kind: str) -> None:
    with recorded() as caught:
        _, _, journal = run(BLIND[kind]())
    ours = [w for w in caught if w.category.__name__ == "ProbeWarning"]
    assert ours, f"no ProbeWarning among {[str(w.message) for w in caught]}"
    assert all(issubclass(w.category, hdet.ProbeWarning) and issubclass(w.category, UserWarning) for w in ours)
    assert len(ours) <= 2  # at the event, not at every round
    assert "probe" in str(ours[0].message)
    assert any(record.get("alarm") is not None for record in journal.rounds)


@pytest.mark.parametrize("kind", BLIND)
def test_training_goes_on_at_about_the_guess(kind: str) -> None:
    with quiet():
        model, rates, _ = run(BLIND[kind]())
    assert max(rates) <= 10 * GUESS
    assert max(rates[int(0.35 * STEPS) :]) >= GUESS / 10
    assert final_loss(model) < 0.5 * final_loss(network())


def test_the_ensemble_warns_too() -> None:
    model, journal = network(), Records()
    optimizer = torch.optim.Adam(model.parameters(), lr=GUESS)
    with recorded() as caught:
        ensemble = hdet.Ensemble(optimizer, fanout="probed", probe=never_finite, total_steps=STEPS, journal=journal)
        train(model, optimizer, ensemble, range(STEPS))
    assert [w for w in caught if w.category.__name__ == "ProbeWarning"]
    assert any(record.get("alarm") is not None for record in journal.rounds)
    assert GUESS / 10 <= float(optimizer.param_groups[0]["lr"]) <= 10 * GUESS


def test_a_good_probe_neither_warns_nor_alarms() -> None:
    model, journal = network(), Records()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    with recorded() as caught:
        scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=STEPS, probe=probe_of(model), journal=journal)
        train(model, optimizer, scheduler, range(STEPS))
    assert not caught
    assert all("alarm" in record and record["alarm"] is None for record in journal.rounds)


@pytest.mark.parametrize(("every", "bad"), [(2, math.nan), (3, math.inf), (4, math.nan)])
def test_batches_that_are_not_finite_later_do_not_sink_the_rate(every: int, bad: float) -> None:
    """Some batches are bad in themselves: that says nothing of the rate, and earlier weights would do no better."""

    def sometimes(model: nn.Module, batch: Batch) -> Tensor:
        return loss_of(model, batch) + (bad if batch[0].shape[0] == 31 else 0.0)

    def loader(k: int) -> Batch:
        """The batch of 31 is the bad one; the first ones are good."""
        return batch_of(100_000 + k, 31 if k >= 15 and k % every == 0 else 32)

    best, model, journal, plain = network(), network(), Records(), Records()
    for one, fn, records in ((best, loss_of, plain), (model, sometimes, journal)):
        optimizer = torch.optim.Adam(one.parameters(), lr=GUESS)
        probe = hdet.ProbeBatch(one, fn, loader)
        scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=300, probe=probe, journal=records)
        with quiet():
            train(one, optimizer, scheduler, range(300))
    bad_rounds = [r for r in journal.rounds if not all(math.isfinite(p["signal"] or math.nan) for p in r["replicas"])]
    assert bad_rounds
    assert journal.rounds[-1]["learned"][0] > plain.rounds[-1]["learned"][0] / 4
    assert final_loss(model) < 2 * final_loss(best) + 0.01
