"""What the file has and the call does not give: named in an error, unless it is meant."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from tests.checkpoint.files import names, weights
from tests.checkpoint.searching import Searching
from tests.checkpoint.test_nothing_by_half import refused, snapshot
from tests.processes import error_of, run_ranks


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Searching().go(0, 10).save(tmp_path / "run.pt", ema=weights(3), epoch=2)
    return tmp_path / "run.pt"


def parts_of(run: Searching, *names: str) -> dict[str, Any]:
    return {name: {**run.parts, "ema": weights(1)}[name] for name in names}


@pytest.mark.parametrize(
    "given", [("model", "optimizer", "ema"), ("optimizer",), ("scheduler",), ("model", "scheduler")]
)
def test_a_part_that_is_missing_is_named_before_anything_changes(path: Path, given: tuple[str, ...]) -> None:
    missing = sorted({"model", "optimizer", "scheduler", "ema"} - set(given))
    words = (
        rf"has a state of {', '.join(map(repr, missing))}, which the call does not give: .* or ignore=\('{missing[0]}'"
    )
    refused(path, words, **parts_of(Searching(seed=1), *given))


def test_it_can_be_meant(path: Path) -> None:
    run = Searching(seed=1)
    values = hdet.load(path, ignore=("scheduler", "ema"), model=run.model, optimizer=run.optimizer)
    assert values["epoch"] == 2
    assert run.scheduler.last_epoch == 0
    whole = Searching(seed=1)
    hdet.load(path, **whole.parts, ignore=["ema"])
    assert snapshot(model=whole.model, optimizer=whole.optimizer) == snapshot(model=run.model, optimizer=run.optimizer)


def test_modules_alone_are_for_evaluation(path: Path) -> None:
    run = Searching(seed=1)
    assert hdet.load(path, model=run.model)["epoch"] == 2
    assert hdet.load(path, ema=weights(1), model=run.model)["epoch"] == 2
    assert hdet.load(path)["epoch"] == 2  # values alone
    assert hdet.load(path, model=run.model, scheduler=None) == hdet.load(path) | {"scheduler": None}
    with pytest.raises(hdet.ArgumentError, match="has a state of 'scheduler', which the call does not give"):
        hdet.load(path, **parts_of(run, "model", "optimizer", "ema"), scheduler=None)


@pytest.mark.parametrize("ignore", [("schedule",), ("epoch",), ("model",), "scheduler", 3, (3,), None, ([],)])
def test_what_cannot_be_ignored(path: Path, ignore: Any) -> None:
    """A name that the file does not have, a value, a part that is given; and what is no tuple of names."""
    run = Searching(seed=1)
    before = snapshot(**run.parts)
    with pytest.raises(hdet.ArgumentError, match=r"ignore must be a tuple of names out of \['ema'\], .*; leave it out"):
        hdet.load(path, **run.parts, ignore=ignore)
    assert snapshot(**run.parts) == before


def test_a_part_cannot_be_called_ignore(tmp_path: Path) -> None:
    with pytest.raises(
        hdet.ArgumentError, match=r"ignore must be no part's name, since hdet.load has .* but got ignore=3; give"
    ):
        hdet.save(tmp_path / "run.pt", ignore=3)
    assert names(tmp_path) == []


# -- ranks ------------------------------------------------------------------------------------------------------------


def _save_apart(rank: int, folder: str) -> str:
    model = nn.Linear(3, 3)
    error = error_of(lambda: hdet.save(os.path.join(folder, f"run-{rank}.pt"), model=model))
    hdet.save(os.path.join(folder, "run.pt"), model=model)
    return f"{type(error).__name__}: {error}"


def test_one_path_for_all_ranks(tmp_path: Path) -> None:
    for said in run_ranks(_save_apart, 3, str(tmp_path)):
        assert said.startswith("DisagreementError: replicas disagree on path")
        assert all(f"rank {rank}: path = {tmp_path}/run-{rank}.pt" in said for rank in range(3))
        assert "give every rank the same path" in said
    assert names(tmp_path) == ["run.pt"]
    assert torch.load(tmp_path / "run.pt", weights_only=True)["states"].keys() == {"model"}
