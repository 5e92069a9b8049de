"""The zoo: every problem trains with every optimizer, and its cells are what they say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import zoo
from stacked import Stack, Supply, TrainStep
from tests.examples.launch import ROOT, output_of
from tests.problems import Records
from tests.setup_runs import searching
from torch import nn, optim
from zoo_problems import OPTIMIZERS, PROBLEMS, model_of
from zoo_stack import UPDATES, ZooTask

import hdet
from lab.tests.experiments.small_tasks import CPU


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_is_a_function_of_its_seed_and_can_be_learned(name: str) -> None:
    losses = [zoo.fixed(name, "adam", 30, 1, rate) for rate in (1e-2, 1e-2, 1e-9)]
    assert losses[0] == losses[1] < losses[2]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_lowers_the_loss(name: str) -> None:
    best = min(zoo.fixed("softmax", name, 30, 1, rate) for rate in (1e-2, 1e-1))
    assert best < zoo.fixed("softmax", name, 30, 1, 1e-9)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    zoo.fixed("layers", "sgd", 2, 1, 1e-2)
    assert torch.equal(before, torch.get_rng_state())


def test_rates_that_break_training_count_as_broken_and_end_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "RATES", (*[0.01] * 5, *[1e6] * 20))
    losses = zoo.grid(("line", "sgd", 40, 0))
    assert losses[0] < losses[5] == zoo.BROKEN
    assert losses[8:] == [zoo.BROKEN] * 17


def test_a_whole_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one cell, with a grid that is known already."""
    monkeypatch.setattr(zoo, "PROBLEMS", {"softmax": PROBLEMS["softmax"]})
    monkeypatch.setattr(zoo, "OPTIMIZERS", {"sgd": OPTIMIZERS["sgd"]})
    path = tmp_path / "zoo.json"
    path.write_text(json.dumps({"rates": zoo.RATES, "grid": {"softmax/sgd/60": [2.0] * 16 + [1.0] + [2.0] * 3}}))
    known = zoo.tables([60], 1, path, processes=1)
    entry = known["scores"]["softmax/sgd/60"]
    assert entry["best_rate"] == zoo.RATES[16]
    assert entry["seeds"][0]["ratio"] == pytest.approx(entry["seeds"][0]["auto"] / entry["seeds"][0]["fixed"])
    assert json.loads(path.read_text())["scores"] == known["scores"]
    shown = zoo.show(known, 60)
    assert shown["worst"] == pytest.approx(entry["seeds"][0]["ratio"], abs=1e-3)
    monkeypatch.setattr(zoo, "TARGETS", {60: 0.01})
    assert [shown["target"], zoo.show(known, 60)["target"]] == ["none", "MISS"]
    assert "softmax" in capsys.readouterr().out


# -- no false alarms --------------------------------------------------------------------------------------------------


def schedule_free(params: Any, lr: float) -> Any:
    made = pytest.importorskip("schedulefree").AdamWScheduleFree(params, lr=lr)
    made.train()
    return made


ORDINARY: dict[str, Any] = {
    **OPTIMIZERS,
    "adadelta": optim.Adadelta,
    "adafactor": optim.Adafactor,
    "adagrad": optim.Adagrad,
    "adamax": optim.Adamax,
    "asgd": optim.ASGD,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "momentum and decay": lambda p, lr: optim.SGD(p, lr=lr, momentum=0.9, weight_decay=0.01, nesterov=True),
    "slow rmsprop": lambda p, lr: optim.RMSprop(p, lr=lr, alpha=0.999),
    "centred rmsprop": lambda p, lr: optim.RMSprop(p, lr=lr, centered=True, momentum=0.9),
    "clipped sgd": optim.SGD,
    "muon and adamw": None,
    "schedule-free": schedule_free,
}
"""Those of torch, and others that people use."""


def optimizers_of(name: str, model: nn.Module, guess: float) -> list[Any]:
    if name != "muon and adamw":
        return [ORDINARY[name](model.parameters(), lr=guess)]
    matrices, others = ([p for p in model.parameters() if (p.ndim == 2) == wanted] for wanted in (True, False))
    parts = [optim.Muon(matrices, lr=guess)] if matrices else []
    return [*parts, optim.AdamW(others, lr=guess)] if others else parts


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_optimizer_is_not_told_that_its_steps_do_not_follow_the_rate(name: str) -> None:
    """In the first steps of a run of 400, in which that is asked, from far below and from far above in turn."""
    for number, (kind, problem) in enumerate(PROBLEMS.items()):
        model, journal = zoo.model_of(problem, 0), Records()
        parts = optimizers_of(name, model, (1e-3, 10.0)[number % 2])
        scheduler = searching(model, parts, 400, journal=journal)
        stream = torch.Generator().manual_seed(0)
        for _ in range(75):
            loss = problem.loss(model, problem.batch(stream, 64))
            model.zero_grad()
            loss.backward()
            if name.startswith("clipped"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for part in parts:
                part.step()
            scheduler.step(loss.detach())
        assert [r["why"] for r in journal.rounds if r["event"] == "stopped"] == [], kind


@pytest.mark.parametrize("guess", [1e-3, 1e6])
def test_a_journal_becomes_a_picture(tmp_path: Path, guess: float) -> None:
    """docs/make_flight.py draws what a journal says."""
    problem = PROBLEMS["line"]
    model = model_of(problem, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=guess)
    journal = tmp_path / "run.jsonl"
    scheduler = hdet.auto(optimizer, 80, journal=journal)
    zoo.train(problem, optimizer, model, scheduler, 0)
    output_of(sys.executable, ROOT / "docs" / "make_flight.py", journal, tmp_path / "flight.svg")
    picture = (tmp_path / "flight.svg").read_text()
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert "estimated rate" in picture
    assert ("restarted" in picture) == (guess > 1)


# As rows of a stack -------------------------------------------------------------------------------------------------

STEPS, RATE = 5, 1e-2


def check_row(problem: str, optimizer: str) -> None:
    task = ZooTask(problem)
    stack = Stack(task, [0, 3], 2, CPU)
    rates = torch.full((STEPS, 2, 2, 1), RATE)
    step = TrainStep(stack, UPDATES[optimizer](stack.theta), Supply(task, [0, 3], STEPS, CPU).batches, rates)
    for _ in range(STEPS):
        step()
    model = model_of(PROBLEMS[problem], 3)
    plain = OPTIMIZERS[optimizer](model.parameters(), lr=RATE)
    for t in range(STEPS):
        loss = PROBLEMS[problem].loss(model, task.batch(3, t))
        plain.zero_grad()
        loss.backward()
        plain.step()
    torch.testing.assert_close(step.losses[1, 0], loss.detach(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_row_trains_with_the_zoos_optimizer(optimizer: str) -> None:
    check_row("softmax", optimizer)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_row_trains_the_zoos_problem(problem: str) -> None:
    check_row(problem, "momentum")


def test_the_written_out_gru_is_torchs() -> None:
    model = model_of(PROBLEMS["recurrent"], 0)
    gru = torch.nn.GRU(24, 32, batch_first=True)
    parts = (model.gru.inputs, model.gru.memory)
    weights = [value for name in ("weight", "bias") for part in parts for value in (getattr(part, name),)]
    gru.load_state_dict(dict(zip(gru.state_dict(), weights, strict=True)))
    inputs = model.table(torch.randint(128, (5, 16)))
    torch.testing.assert_close(model.gru(inputs), gru(inputs)[0])
