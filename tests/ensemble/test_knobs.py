from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hdet
from hdet import knobs
from hdet.ensemble.controller import comparable
from hdet.ensemble.design import Balanced, Permuted
from hdet.ensemble.knob import SCALES, KnobSpec, away
from hdet.schedulers.replica_scheduler import PUBLISHED_SPREAD

pytestmark = pytest.mark.quick

scales = st.sampled_from(SCALES)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1), nn.Linear(3, 3), nn.Dropout(0.1))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    first, second, *rest = model.parameters()
    return torch.optim.AdamW(
        [{"params": [first, *rest], "weight_decay": 0.1, "name": "decay"}, {"params": [second], "weight_decay": 0.0}],
        lr=0.01,
    )


@given(scales, st.floats(0.01, 0.99), st.floats(-0.5, 0.5))
def test_scales_go_there_and_back(name: str, base: float, d: float) -> None:
    back = -d / (1 + d) if name == "relative" else -d
    assert away(name, away(name, base, d), back) == pytest.approx(base, abs=1e-9)
    assert away(name, base, 0.0) == pytest.approx(base)


@given(scales, st.floats(0.05, 0.95), st.floats(0.0, 0.4), st.lists(st.floats(-3, 3), max_size=20))
def test_no_replica_ever_leaves_the_bounds(name: str, base: float, spread: float, moves: list[float]) -> None:
    bounds = (0.01, 0.99)
    try:
        spec = KnobSpec("k", name, spread, bounds)
    except hdet.ArgumentError:
        return
    learned = spec.start(base)
    for move in [0.0, *moves]:
        learned = spec.moved(learned, move)
        ends = [spec.value(learned, x) for x in (-1.0, 0.0, 1.0)]
        assert all(bounds[0] - 1e-9 <= value <= bounds[1] + 1e-9 for value in ends)


@pytest.mark.parametrize(
    ("scale", "base"), [("relative", 0.0), ("log", 0.0), ("log", -1.0), ("logit", 0.0), ("logit", 1.0)]
)
def test_a_base_that_the_scale_cannot_hold_is_refused_with_a_cure(scale: Any, base: float) -> None:
    with pytest.raises(hdet.ArgumentError, match="linear"):
        knobs.scalar("k", base, spread=0.1, scale=scale)


@pytest.mark.parametrize("knob_count", [6, 50])
def test_no_two_knobs_stay_correlated_over_rounds(knob_count: int) -> None:
    rounds, n = 150, 8
    total = torch.zeros(knob_count, knob_count, dtype=torch.float64)
    for k in range(rounds):
        x = torch.tensor(Balanced().places(n, knob_count, seed=1, k=k), dtype=torch.float64)
        assert x.mean(0).abs().max() < 1e-12
        assert torch.equal(x.sort(0).values[:, 0], torch.tensor(sorted(x[:, 0].tolist()), dtype=torch.float64))
        total += x.T @ x / x.square().sum(0)[0] / rounds
    off = total - torch.eye(knob_count, dtype=torch.float64)
    assert off.abs().max() < 4.5 / math.sqrt(7 * rounds)


def test_a_relative_value_never_changes_its_sign() -> None:
    assert KnobSpec("h", "relative", 0.5).moved(1.0, -1.4) > 0


def test_balanced_is_nearer_to_orthogonal_within_a_round_than_permutations() -> None:
    def worst(design: Any) -> float:
        total = 0.0
        for k in range(1, 40):
            x = torch.tensor(design.places(8, 6, 1, k), dtype=torch.float64)
            gram = x.T @ x / x.square().sum(0)[0]
            total += (gram - torch.eye(6, dtype=torch.float64)).square().sum().item()
        return total

    assert worst(Balanced()) < 0.5 * worst(Permuted())


def test_with_three_replicas_two_knobs_never_coincide_or_mirror() -> None:
    for k in range(60):
        x = torch.tensor(Balanced().places(3, 2, 0, k))
        assert abs(float(x[:, 0] @ x[:, 1])) < 1.5


def test_optimizer_fields() -> None:
    model = net()
    optimizer = adam(model)
    decay = knobs.optimizer(optimizer, "weight_decay", spread=0.3, groups=["decay"])
    assert decay.spec.name == "weight_decay[decay]"
    assert decay.acts == "update"
    decay.write(0.2)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.2, 0.0]
    beta = knobs.optimizer(optimizer, "betas", index=1, spread=0.5, scale="logit", bounds=(0.5, 0.9999))
    beta.write(0.99)
    assert [g["betas"] for g in optimizer.param_groups] == [(0.9, 0.99)] * 2
    assert beta.read() == 0.99
    assert [k.spec.name for k in knobs.lr(optimizer)] == ["lr[decay]", "lr[1]"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda o, m: knobs.optimizer(o, "weight_decay", spread=0.3), "one base value"),
        (
            lambda o, m: knobs.optimizer(o, "weight_decay", spread=0.3, groups=[1]),
            "must be above 0.0 and below inf on scale='log', but got 0.0",
        ),
        (lambda o, m: knobs.optimizer(o, "momentum", spread=0.3), "field must be one of"),
        (lambda o, m: knobs.optimizer(o, "lr", spread=0.3), "hdet.knobs.lr"),
        (lambda o, m: knobs.lr(o, groups=["nobody"]), 'groups must be indices or the "name"'),
        (lambda o, m: knobs.lr(o, spread=None), "spread"),
        (lambda o, m: knobs.optimizer(o, "betas", spread=0.1), "index="),
        (lambda o, m: knobs.optimizer(o, "betas", spread=0.1, index=-1), "index="),
        (lambda o, m: knobs.optimizer(o, "eps", spread=0.1, index=0), "index="),
        (lambda o, m: knobs.optimizer(o, "foreach", spread=0.1), "field must name a number to explore"),
        (lambda o, m: knobs.scalar("s", None, spread=0.1), "a number, but got value="),
        (lambda o, m: knobs.scalar("s", 1.0, spread=0.1, bounds=None), "two numbers"),
        (lambda o, m: knobs.lr(o, groups=[]), "at least one"),
        (lambda o, m: knobs.lr(o, scale="linear"), "relative"),
        (lambda o, m: knobs.lr(o, spread=1.5), "at most 1"),
        (lambda o, m: knobs.module(m, nn.Conv2d, "p", spread=0.1), "no module"),
        (lambda o, m: knobs.module(m, nn.Linear, "weight", spread=0.1), "attribute must name a number"),
        (lambda o, m: knobs.module(m, nn.Dropout, "p", spread=0.5, bounds=(0.0, 0.6)), "room for the spread"),
        (lambda o, m: knobs.scalar("s", math.nan, spread=0.1), "base value of knob 's'"),
        (lambda o, m: knobs.scalar("s", 1.0, spread=-0.1), "spread"),
        (lambda o, m: knobs.scalar("s", 1.0, spread=0.1, scale="cubic"), "scale must be"),
        (lambda o, m: knobs.scalar("s", 1.0, spread=0.1, acts="never"), "acts must be"),
    ],
)
def test_bad_knobs_are_refused(make: Any, words: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=words):
        make(adam(model), model)


def test_module_attributes_by_type_pattern_and_list() -> None:
    model = net()
    for which in (nn.Dropout, "[13]", [model[1], model[3]]):
        knob = knobs.module(model, which, "p", spread=0.05, bounds=(0.0, 0.6))
        assert knob.regularises
        knob.write(0.3)
        assert model[1].p == model[3].p == knob.read() == 0.3
        knob.write(0.1)
    model.temperature = 2.0  # type: ignore[assignment]
    warm = knobs.module(model, [model], "temperature", spread=0.3, scale="log")
    assert not warm.regularises
    assert warm.acts == "loss"


def test_scalars_and_custom_knobs() -> None:
    assert knobs.scalar("label_smoothing", 0.1, spread=0.05).regularises
    assert not knobs.scalar("loss_weight", 0.1, spread=0.05).regularises
    cell = {"v": 1.0}
    knob = knobs.custom("v", lambda: cell["v"], lambda new: cell.update(v=new), spread=0.2, scale="log", acts="update")
    knob.write(3.0)
    assert knob.read() == cell["v"] == 3.0


def test_signals_that_are_not_finite_are_worse_than_the_worst() -> None:
    assert comparable([1.0, math.inf, 2.0]) == [1.0, 3.0, 2.0]
    assert comparable([math.nan, math.nan, 2.0]) is None


def test_rates_are_spread_as_published_unless_told_otherwise() -> None:
    assert {knob.spec.spread for knob in knobs.lr(adam(net()))} == {PUBLISHED_SPREAD}
