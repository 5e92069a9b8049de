"""Ranks that search together decide alike."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

import hdet
from hdet.errors import DisagreementError
from tests.problems import network
from tests.processes import error_of, run_ranks
from tests.search.runs import built, final_loss, search_of, train, two_groups


def rounds_of(rank: int, path: str) -> list[tuple[Any, ...]]:
    """Every rank trains the same, without DDP: weights are equal."""
    model = network()
    optimizer = torch.optim.Adam(two_groups(model), lr=1e-3)
    journal = f"{path}-{rank}"
    scheduler = hdet.auto(optimizer, total_steps=60, journal=journal)
    train(model, optimizer, scheduler, range(60))
    if rank > 0:
        assert not Path(journal).exists()  # one rank writes
        return []
    told = ("estimated_rate", "learned", "event", "base")
    rows = hdet.read_journal(journal).rounds
    assert {len(record["replicas"]) for record in rows} == {1}  # the one model
    return [tuple(record[name] for name in told) for record in rows]


@pytest.mark.slow
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
        assert "rank 0: guess = [0.001]" in message
        assert "rank 1: guess = [0.002]" in message
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
    scheduler = hdet.auto(optimizer, total_steps=120)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rates = train(
            wrapped, optimizer, scheduler, range(120), 1000 * rank, tells=lambda loss, t: LOSSES[kind](loss, t, rank)
        )
    return rates, final_loss(model), repr(scheduler.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOSSES)
def test_ranks_decide_alike_whoever_has_a_loss(kind: str) -> None:
    first, *others = run_ranks(ddp, 3, kind)
    assert all(other == first for other in others)
    assert first[1] < 0.5 * final_loss(network())


def resumed(rank: int) -> str:
    model, optimizer, scheduler = built(1e-3, 60)
    state = copy.deepcopy(scheduler.state_dict())
    state["hdet"]["rolled_back"] = rank
    scheduler.load_state_dict(state)
    return str(error_of(lambda: train(model, optimizer, scheduler, range(60))))


def test_ranks_that_go_on_from_different_checkpoints_are_told() -> None:
    for words in run_ranks(resumed, 2):
        assert "replicas disagree on rolled_back, which must be equal on all of them" in words
        assert "rank 1: rolled_back = 1" in words


ARGUMENTS: dict[str, tuple[Any, Any]] = {"rollback": (True, False), "highest": (0.1, 0.2), "steps": (60, 70)}


def different(rank: int, name: str) -> str:
    model, optimizer, scheduler = built(1e-3, **{"steps": 60, name: ARGUMENTS[name][rank]})
    return str(error_of(lambda: train(model, optimizer, scheduler, range(60))))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_differs_is_named(name: str) -> None:
    first, second = ARGUMENTS[name]
    argument = "total_steps" if name == "steps" else name
    for words in run_ranks(different, 2, name):
        assert re.search(f"replicas disagree on .*{argument}, which must be equal on all of them", words)
        assert re.search(f"rank 0: .*{argument} = {first}", words)
        assert re.search(f"rank 1: .*{argument} = {second}", words)


SHAPES: dict[str, Any] = {
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 60),
    "StepLR": lambda o: StepLR(o, 20),
    "trapezoid": None,
}


def other_schedules(rank: int, names: tuple[str, str]) -> str:
    model, optimizer, scheduler = built(1e-3, 60, schedule=SHAPES[names[rank]])
    return str(error_of(lambda: train(model, optimizer, scheduler, range(60))))


@pytest.mark.parametrize("names", [("CosineAnnealingLR", "StepLR"), ("CosineAnnealingLR", "trapezoid")])
def test_schedules_that_differ_are_told_as_such(names: tuple[str, str]) -> None:
    for words in run_ranks(other_schedules, 2, names):
        assert re.search(r"replicas disagree on .*\bschedule\b.*, which must be equal on all of them", words)
        for rank, name in enumerate(names):
            assert re.search(f"rank {rank}: .*schedule = '?{name}", words)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["weights", "buffers", "neither"])
def test_weights_must_be_finite_and_buffers_not_nan(name: str, value: float) -> None:
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    search = search_of(hdet.auto(optimizer, total_steps=60, model=model))
    with torch.no_grad():
        {"weights": model.weight, "buffers": model.running_mean, "neither": torch.ones(1)}[name].fill_(value)  # type: ignore[union-attr]
    is_fine = name == "neither" or (name == "buffers" and value == math.inf)
    assert search.ranks.gather(optimizer, (3, 4), search.steps, search.losses, is_alone=True)[0].is_finite is is_fine
