"""The zoo: every problem trains with every optimizer, and its cells are what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import zoo
from zoo_problems import OPTIMIZERS, PROBLEMS


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
