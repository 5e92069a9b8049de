"""How well scores predict yes-or-no labels."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

__all__ = ["auc", "normalised_entropy"]


def auc(scores: Tensor, labels: Tensor) -> float:
    """Chance that a positive scores above a negative, ties counting half; NaN without both kinds or with a NaN.

    With ranks (equal scores share their mean rank), P positives and Q negatives:
    (sum of the positives' ranks - P (P + 1) / 2) / (P Q).

    >>> import torch
    >>> auc(torch.tensor([0.1, 0.4, 0.4, 0.9]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    0.875
    """
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    ranks = (ends - (counts - 1) / 2)[place]
    positive = labels > 0.5
    p, q = int(positive.sum()), int((~positive).sum())
    if p == 0 or q == 0 or bool(scores.isnan().any()):
        return math.nan
    return (float(ranks[positive].sum()) - p * (p + 1) / 2) / (p * q)


def normalised_entropy(logits: Tensor, labels: Tensor) -> float:
    """Log loss over the entropy of the labels' own mean: 1 says "knows only the base rate", less is better."""
    rate = float(labels.double().mean())
    if rate in (0.0, 1.0):
        return math.nan
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    return float(binary_cross_entropy_with_logits(logits.double(), labels.double())) / entropy
