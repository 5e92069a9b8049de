"""The outer rate that is found: by hand, on three ranks alike, and from a checkpoint."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import hdet
from hdet.ensemble.outer_rate import BOUNDS, LARGEST
from tests.models import batch, two_layer
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lr": "fast"}, 'above 0 or "auto", but got lr=.fast.'),
        ({"lr": "auto", "momentum": 0.9}, "without momentum, but got momentum=0.9"),
        ({"lr": True}, "but got lr=True"),
    ],
)
def test_bad_outer_rates_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(hdet.ArgumentError, match=words):
        hdet.experimental.Outer(**arguments)


def test_the_rate_by_hand() -> None:
    """Two replicas go by -1 and -3 in each round, mean -2; then by 1 and 3; then losses rise.

    The first round has no step to look back at. In the second <d, s> is the mean of 2 and 6, |d|^2 that of 1 and 9.
    """
    first, second = run_ranks(_by_hand, 2)
    assert first == second
    rates, weights = first
    up, down = math.exp(LARGEST), math.exp(-LARGEST)  # a cosine of 4 / sqrt(5 * 4) is far enough for both
    assert rates == pytest.approx([1.0, up, 1.0, down])
    assert weights == pytest.approx([-2.0, -2 - 2 * up, -2 * up, -2 * up + 2 * down])


def _by_hand(rank: int) -> tuple[list[float], list[float]]:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    outer = hdet.experimental.Outer("auto")
    ensemble = hdet.Ensemble(torch.optim.SGD([weight], lr=0.1), sync_every=1, outer=outer, group=hdet.arms(2))
    rates, weights = [], []
    for way, loss in ((-1, 1.0), (-1, 1.0), (1, 1.0), (1, 2.0)):
        with torch.no_grad():
            weight.add_(way * (1.0 + 2 * rank))
        ensemble.step(loss)
        rates.append(outer.rate)
        weights.append(weight.item())
    return rates, weights


def test_three_ranks_find_one_rate_and_a_resumed_run_is_bit_equal() -> None:
    answers = run_ranks(_found, 3)
    for whole, resumed in answers:
        assert whole == answers[0][0]
        assert resumed == whole
    rates = answers[0][0]["rates"]
    assert len(set(rates)) >= 3
    assert all(BOUNDS[0] <= rate <= BOUNDS[1] for rate in rates)


def _found(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    def built() -> tuple[nn.Module, hdet.Ensemble, Any]:
        model, outer = two_layer(), hdet.experimental.Outer("auto")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
        more: dict[str, Any] = {"sync_every": 5, "group": arms, "controller": False}
        knobs = [hdet.knobs.lr(optimizer, spread=0.0)]
        return model, hdet.Ensemble(optimizer, knobs=knobs, outer=outer, **more), outer

    def train(model: nn.Module, ensemble: hdet.Ensemble, outer: Any, steps: range) -> list[float]:
        rates = []
        for t in steps:
            x, y = batch(t, rank)
            loss = mse_loss(model(x), y)
            ensemble.optimizer.zero_grad()
            loss.backward()
            ensemble.optimizer.step()
            ensemble.step(loss)
            rates.append(outer.rate)
        return rates

    arms = hdet.arms(3)
    model, ensemble, outer = built()
    rates = train(model, ensemble, outer, range(20))
    saved = [copy.deepcopy((model.state_dict(), ensemble.optimizer.state_dict(), ensemble.state_dict()))]
    rates += train(model, ensemble, outer, range(20, 40))
    whole = {"rates": rates, "weights": [p.tolist() for p in model.parameters()]}

    dist.broadcast_object_list(saved, src=0)  # everybody loads rank 0's file
    again, resumed, found = built()
    for part, state in zip((again, resumed.optimizer, resumed), saved[0], strict=True):
        part.load_state_dict(state)
    rates = rates[:20] + train(again, resumed, found, range(20, 40))
    return whole, {"rates": rates, "weights": [p.tolist() for p in again.parameters()]}


def test_a_state_of_a_found_rate_needs_one_to_be_found() -> None:
    def ensemble(outer: Any) -> hdet.Ensemble:
        return hdet.Ensemble(torch.optim.SGD(two_layer().parameters(), lr=0.1), outer=outer)

    saved = ensemble(hdet.experimental.Outer("auto")).state_dict()
    with pytest.raises(hdet.ArgumentError, match="outer state does not fit"):
        ensemble(hdet.experimental.Outer(1.0)).load_state_dict(saved)
