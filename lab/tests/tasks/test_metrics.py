"""AUC by ranks against counting pairs; normalised entropy against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lab.tasks.metrics import auc, normalised_entropy


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


def test_auc_of_a_model_that_broke() -> None:
    labels = torch.tensor([0.0, 1.0, 1.0])
    assert math.isnan(auc(torch.tensor([0.0, math.nan, 1.0]), labels))
    assert auc(torch.tensor([-math.inf, math.inf, 1.0]), labels) == 1


def test_normalised_entropy_is_one_at_the_base_rate() -> None:
    labels = (torch.arange(1000) % 50 == 0).float()
    base = torch.full((1000,), 0.02, dtype=torch.float64).logit()
    assert normalised_entropy(base, labels) == pytest.approx(1)
    assert normalised_entropy(base + 1, labels) > 1
    assert normalised_entropy(base + labels, labels) < 1
    assert math.isnan(normalised_entropy(base, torch.zeros(1000)))
