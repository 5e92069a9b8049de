"""The feed task: its stream, its speed, that it can be learned, and that the model reads the history."""

from __future__ import annotations

import math
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hdet.errors import ArgumentError
from lab.tasks import FeedTask, batches
from lab.tasks.metrics import auc, normalised_entropy
from lab.tasks.world import TASKS

SMALL = {"users": 100, "items": 96, "history": 8, "width": 16, "depth": 1, "batch_size": 128}


@pytest.fixture(scope="module")
def task() -> FeedTask:
    return FeedTask()


def test_size_and_groups_at_the_defaults(task: FeedTask) -> None:
    model = task.model(0)
    assert 0.3e6 < sum(parameter.numel() for parameter in model.parameters()) < 0.6e6
    names = [group["name"] for group in task.groups(model)]
    assert names == ["embedding", "no_decay", "non_embedding", "transformer"]


def test_replicas_take_parts_of_one_stream(task: FeedTask) -> None:
    for step in (0, 5):
        parts = [task.batch(3, step, replica, 4) for replica in range(4)]
        alone = [task.batch(3, 4 * step + turn) for turn in range(4)]
        for part, batch in zip(parts, alone, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(part, batch, strict=True))
    rows = torch.cat([torch.cat([part[1], part[0][:, None]], 1) for part in parts])
    assert len(rows.unique(dim=0)) == 4 * 256


def test_the_first_predictions_are_the_base_rates(task: FeedTask) -> None:
    result = task.evaluate(task.model(0))
    for name in TASKS:
        assert result[f"ne_{name}"] == pytest.approx(1, abs=0.02)
        assert result[f"auc_{name}"] == pytest.approx(0.5, abs=0.1)
    assert set(result) == {"loss", *(f"{metric}_{name}" for metric in ("auc", "ne") for name in TASKS)}


def test_it_can_be_learned_and_the_model_reads_the_history() -> None:
    task = FeedTask(**SMALL)
    model = task.model(0)
    optimizer = torch.optim.Adam(task.groups(model), lr=5e-3)
    for batch in islice(batches(task, 0), 200):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    result = task.evaluate(model)
    for name in TASKS:
        assert result[f"ne_{name}"] < 0.9
        assert result[f"auc_{name}"] > 0.7
    user, history, item, labels = task.validation()[0]
    strangers = history[torch.randperm(len(user), generator=torch.Generator().manual_seed(0))]
    with torch.no_grad():
        assert task.loss(model, (user, strangers, item, labels)) > 1.02 * task.loss(
            model, (user, history, item, labels)
        )


@pytest.mark.parametrize(("options", "message"), [
    ({"items": 100}, "items must be a multiple of 16 and width of 2, but got items=100 .*; use items=112 and width=32"),
    ({"width": 31}, "but got items=4000 and width=31; use items=4000 and width=32"),
    ({"horizon": 0}, "horizon must be an integer, at least 1, but got horizon=0"),
])  # fmt: skip
def test_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        FeedTask(**options)


# Metrics: AUC by ranks against counting pairs; normalised entropy against its definition ------------------------------


def counted(scores: Tensor, labels: Tensor) -> float:
    """Every pair of a positive and a negative, one by one."""
    pairs = [(p, n) for p in scores[labels == 1].tolist() for n in scores[labels == 0].tolist()]
    return sum(1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs) / len(pairs)


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40))
def test_auc_counts_pairs_with_ties_as_halves(rows: list[tuple[int, bool]]) -> None:
    scores = torch.tensor([row[0] for row in rows]).float()
    labels = torch.tensor([row[1] for row in rows]).float()
    if labels.min() == labels.max():
        assert math.isnan(auc(scores, labels))
    else:
        assert auc(scores, labels) == pytest.approx(counted(scores, labels), abs=1e-12)


def test_normalised_entropy_is_one_at_the_base_rate() -> None:
    labels = (torch.arange(1000) % 50 == 0).float()
    base = torch.full((1000,), 0.02, dtype=torch.float64).logit()
    assert normalised_entropy(base, labels) == pytest.approx(1)
    assert normalised_entropy(base + 1, labels) > 1
    assert normalised_entropy(base + labels, labels) < 1
    assert math.isnan(normalised_entropy(base, torch.zeros(1000)))
