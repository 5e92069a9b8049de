"""1024 replicas, simulated in one process: designs, controllers and the mean keep their properties at scale."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hdet.ensemble import design
from hdet.ensemble.bases import Settings
from hdet.ensemble.controller import Controller, Corrected
from hdet.ensemble.design import Balanced, Design, Permuted, Rounds, levels
from hdet.ensemble.knob import KnobSpec
from hdet.ensemble.normalised import Normalised
from hdet.ensemble.steering import Ending, Steering
from hdet.ranks.agreement import Agreement
from hdet.ranks.group import ReplicaIndex
from tests.ensemble import design_twin

N = 1024
OPTIMIZER: Any = SimpleNamespace(param_groups=[{"params": [None], "lr": 1.0}])
"""All that a controller asks of one is whether it minimises."""
DESIGNS: list[Design] = [Permuted(), Balanced()]


@pytest.fixture(scope="module", params=DESIGNS, ids=["permuted", "balanced"])
def places(request: pytest.FixtureRequest) -> torch.Tensor:
    """[round, replica, knob]: 40 rounds of three knobs. Round 0 of the paper's design is in rank order: left out."""
    return torch.tensor([request.param.places(N, 3, 0, k) for k in range(1, 41)], dtype=torch.float64)


def test_each_level_is_taken_once_for_each_knob_in_each_round(places: torch.Tensor) -> None:
    expected = torch.tensor(levels(N), dtype=torch.float64)[:, None].expand(N, 3)
    for of_round in places:
        assert of_round.sort(dim=0).values.equal(expected)


def test_each_replica_takes_low_and_high_levels_equally_often(places: torch.Tensor) -> None:
    """The mean place of a replica over rounds has a deviation of 1 / sqrt(3 * 40), and none is an outlier of 3072."""
    mean = places.mean(0) * math.sqrt(3 * len(places))
    assert mean.abs().max() < 5
    assert mean.std() == pytest.approx(1, abs=0.05)
    quarter = ((places + 1) * 2).long().clamp(max=3)  # which quarter of the levels
    taken = torch.stack([(quarter == q).sum(0) for q in range(4)]).double()
    assert taken.mean(-1).mean(-1) == pytest.approx([10] * 4)
    assert ((taken - 10) ** 2 / 10).sum(0).mean() == pytest.approx(
        3, abs=0.2
    )  # chi-squared of three degrees of freedom


def test_knobs_are_balanced_within_a_round_and_over_rounds(places: torch.Tensor) -> None:
    unit = places / places.square().sum(1, keepdim=True).sqrt()
    within = unit.transpose(1, 2) @ unit - torch.eye(3)
    assert within.abs().max() < 4.5 / math.sqrt(N - 1)
    assert within.mean(0).abs().max() < 4.5 / math.sqrt((N - 1) * len(places))
    flat = unit.transpose(1, 2).flatten(0, 1)  # columns of different rounds are independent too
    between = flat @ flat.T - torch.eye(len(flat))
    assert between.abs().max() < 5.5 / math.sqrt(N - 1)


def test_the_design_is_its_slow_twin_and_never_changes() -> None:
    found = Balanced().places(N, 2, seed=5, k=7)
    assert found == [[float(x) for x in row] for row in design_twin.balanced(N, 2, seed=5, k=7)]
    ranks = [round((x + 1) / 2 * (N - 1)) for row in found for x in row]
    assert sha256(repr(ranks).encode()).hexdigest()[:16] == "1f731fe609efa51a"


@pytest.mark.parametrize("n", [8, 32, 64, 300, N])
@pytest.mark.parametrize("knobs", [1, 2, 4, 8])
def test_a_design_costs_a_bounded_number_of_hashes(monkeypatch: pytest.MonkeyPatch, n: int, knobs: int) -> None:
    """Time is made of hashes, 2 microseconds each: one permutation for each knob, and 2048 for all that is tried."""
    hashes = 0

    def counting(text: bytes) -> object:
        nonlocal hashes
        hashes += 1
        return sha256(text)

    monkeypatch.setattr(design, "sha256", counting)
    Balanced().places(n, knobs, 0, 3)
    assert n * knobs <= hashes <= n * knobs + 2048


def steering_of(controller: Controller) -> Steering:
    """Two knobs without a schedule: a rate on the log scale, and a number on the linear one."""
    specs = [KnobSpec("rate", "log", 0.1), KnobSpec("shift", "linear", 0.2)]
    return Steering(Settings(Rounds(1, None), start=0), specs, Balanced(), [0, 1], controller, [1.0, 0.0])


def a_round(steering: Steering, k: int, losses: list[float], place: int = 0) -> None:
    """What a replica does at the end of round ``k``."""
    roll = Agreement(losses, losses, True, [True] * N, False, True, None, [0.0] * N)
    end = Ending(OPTIMIZER, (k, k + 1), lambda t: [1.0, 1.0])
    steering.bases, _ = steering.decide(end, roll, ReplicaIndex(place, N))


def simulated(
    steering: Steering, loss: Callable[[float, float], float], noise: float, rounds: int, seed: int = 0
) -> list[list[float]]:
    """The base values after each round, if replica r reports its loss at its own values, and noise."""
    rng, path = random.Random(seed), []
    for k in range(rounds):
        here = zip(*(steering.standing(k, ReplicaIndex(0, N)).places), strict=True)
        columns = [
            [spec.value(base, x) for x in column]
            for spec, base, column in zip(steering.specs, steering.bases.learned, here, strict=True)
        ]
        a_round(steering, k, [loss(*values) + noise * rng.gauss(0, 1) for values in zip(*columns, strict=True)])
        path.append(list(steering.bases.learned))
    return path


def bowl(rate: float, shift: float) -> float:
    """Lowest, 2, at a rate of 3 and a shift of -1."""
    return 2 + math.log(rate / 3) ** 2 + (shift + 1) ** 2


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_a_controller_finds_the_best_values_of_both_knobs(noise: float) -> None:
    """Slopes of 0.2 and 0.4 per spread: in a noise of 1, eight replicas need many rounds to see them, and 1024 one."""
    path = simulated(steering_of(Normalised()), bowl, noise, rounds=25)
    for rate, shift in path[-5:]:
        assert rate == pytest.approx(3, rel=0.25)
        assert shift == pytest.approx(-1, abs=0.25)


def test_noise_alone_moves_nothing_far() -> None:
    path = simulated(steering_of(Normalised()), lambda rate, shift: 2.0, 1.0, rounds=25)
    assert max(abs(math.log(rate)) for rate, _ in path) < 0.3  # three spreads
    assert max(abs(shift) for _, shift in path) < 0.6


def test_the_published_controller_follows_its_formula() -> None:
    """The softmax of a line of slope c over levels between -1 and 1 has the mean coth(c) - 1/c, up to 1/N."""
    rule = Corrected(sigma=0.1, meta_momentum=0.0, meta_lr=1.0)
    for c in (0.5, 2.0, 10.0):
        update = rule.update(rule.init(1), [-0.1 * c * x for x in levels(N)], [[0.1 * x] for x in levels(N)])
        assert update.moves[0] == pytest.approx(0.1 * (1 / math.tanh(c) - 1 / c), rel=0.01)


@pytest.mark.parametrize("controller", [Corrected(), Normalised()], ids=["corrected", "normalised"])
def test_all_replicas_decide_the_same_to_the_last_bit(controller: Controller) -> None:
    rng = random.Random(1)
    found = [steering_of(controller) for _ in range(3)]
    for k in range(5):
        x = Balanced().places(N, 2, 0, k)
        losses = [rng.gauss(a - b, 1) if r % 10 else math.nan for r, (a, b) in enumerate(x)]  # a tenth has diverged
        for place, steering in zip((0, 511, N - 1), found, strict=True):
            a_round(steering, k, losses, place)
    assert found[0].bases == found[1].bases == found[2].bases
    rate, shift = found[0].bases.learned
    assert rate < 1
    assert shift > 0


def test_replicas_that_have_diverged_are_left_out() -> None:
    rule = Normalised()
    x = Balanced().places(N, 2, 0, 0)
    losses = [bowl(1 + 0.1 * a, 0.2 * b) for a, b in x]
    steering = steering_of(rule)
    a_round(steering, 0, [math.nan if r % 3 == 0 else loss for r, loss in enumerate(losses)])
    rest = [r for r in range(N) if r % 3]
    alone = rule.update(rule.init(2), [losses[r] for r in rest], [[0.1 * x[r][0], 0.2 * x[r][1]] for r in rest])
    assert steering.bases.controller == alone.state


def test_the_mean_of_replicas_with_shared_gradients_is_the_base_run() -> None:
    """The proposition of docs/the-paper.md, for SGD with momentum on a thousand rows, to rounding."""
    generator = torch.Generator().manual_seed(0)
    rho = 1 + torch.tensor([row[0] for row in Permuted().places(N, 1, 0, 4)], dtype=torch.float64) / 9
    start = torch.randn(16, dtype=torch.float64, generator=generator)
    theta, base, momentum = start.repeat(N, 1), start.clone(), torch.zeros(16, dtype=torch.float64)
    for _ in range(20):
        targets = torch.randn(N, 16, dtype=torch.float64, generator=generator)
        momentum = 0.9 * momentum + (theta - targets).mean(0)  # each at its own weights, on its own batch
        theta = theta - 0.05 * rho[:, None] * momentum
        base = base - 0.05 * momentum
    torch.testing.assert_close(theta.mean(0), base, rtol=1e-12, atol=1e-12)
    assert (theta - base).norm(dim=1).min() < 1e-3 * (theta - base).norm(dim=1).max()  # they differ, along one line
    torch.testing.assert_close(theta - start, rho[:, None] * (base - start), rtol=1e-9, atol=1e-12)
