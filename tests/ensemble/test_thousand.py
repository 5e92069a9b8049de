"""1024 replicas, simulated in one process: designs, controllers and the mean keep their properties at scale."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from hashlib import sha256
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hdet
from hdet.ensemble import design
from hdet.ensemble.bases import Settings
from hdet.ensemble.controller import Controller, Corrected
from hdet.ensemble.converge import refuse_diverged
from hdet.ensemble.design import Balanced, Design, Permuted, Rounds, levels
from hdet.ensemble.knob import KnobSpec
from hdet.ensemble.normalised import Normalised
from hdet.ensemble.steering import Ending, Steering
from hdet.ranks.agreement import Agreement, check_equal
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
    assert sha256(repr(ranks).encode()).hexdigest()[:16] == "685aa3ac73f69965"


@pytest.mark.parametrize("n", [8, 32, 64, 300, N])
@pytest.mark.parametrize("knobs", [1, 2, 4, 8])
def test_a_design_costs_a_bounded_number_of_hashes(monkeypatch: pytest.MonkeyPatch, n: int, knobs: int) -> None:
    """A hash takes 2 microseconds: one permutation for each knob and 2048 for all that is tried, or one for all."""
    hashes = 0

    def counting(text: bytes) -> object:
        nonlocal hashes
        hashes += 1
        return sha256(text)

    monkeypatch.setattr(design, "sha256", counting)
    Balanced().places(n, knobs, 0, 3)
    assert hashes == n if n >= 100 else n * knobs <= hashes <= n * knobs + 2048


def steering_of(controller: Controller) -> Steering:
    """Two knobs without a schedule: a rate on the log scale, and a number on the linear one."""
    specs = [KnobSpec("rate", "log", 0.1), KnobSpec("shift", "linear", 0.2)]
    return Steering(Settings(Rounds(1, None), start=0), specs, Balanced(), [0, 1], controller, [1.0, 0.0])


def roll_of(losses: list[float], infinite: tuple[int, ...] = ()) -> Agreement:
    """What replicas know of each other that all have a loss; the weights of some are not finite."""
    n = len(losses)
    return Agreement(losses, losses, True, [r not in infinite for r in range(n)], False, True, None, [0.0] * n)


def a_round(steering: Steering, k: int, losses: list[float], place: int = 0) -> None:
    """What a replica does at the end of round ``k``."""
    roll = roll_of(losses)
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


def in_noise_alone(controller: Controller) -> tuple[float, float]:
    """The share of knobs and rounds that move, and the farthest that one comes, in spreads. Eight seeds."""
    moved, farthest = [], 0.0
    for seed in range(8):
        path = [[1.0, 0.0], *simulated(steering_of(controller), lambda rate, shift: 2.0, 1.0, rounds=25, seed=seed)]
        moved += [a != b for before, after in pairwise(path) for a, b in zip(before, after, strict=True)]
        farthest = max(farthest, *(max(abs(math.log(rate)) / 0.1, abs(shift) / 0.2) for rate, shift in path))
    return sum(moved) / len(moved), farthest


def test_noise_alone_hardly_moves_anything() -> None:
    share, farthest = in_noise_alone(Normalised())
    assert share < 0.05
    assert farthest < 3
    assert in_noise_alone(Normalised(caution=1.0))[0] > 0.1, "the caution makes the difference"


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


@pytest.mark.parametrize("n", [4, N])
def test_rank_0_alone_logs_the_replicas_that_are_left_out(n: int, caplog: pytest.LogCaptureFixture) -> None:
    roll = roll_of([math.inf if r == 1 else 0.5 for r in range(n)], infinite=(n - 1,))
    with caplog.at_level(logging.WARNING, "hdet"):
        for rank in reversed(range(n)):
            refuse_diverged(roll, "round 3", rank)
    (told,) = caplog.messages
    assert told.splitlines()[1:] == [
        "  replica 1: loss inf, weights finite",
        f"  replica {n - 1}: loss 0.5, weights not finite",
    ]


def test_a_message_lists_16_replicas_at_most(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hdet"):
        refuse_diverged(roll_of([math.nan if r % 2 else 0.5 for r in range(N)]), "round 3", 0)
    assert caplog.messages[0].splitlines()[-2:] == ["  replica 31: loss nan, weights finite", "  and 496 more"]
    with pytest.raises(hdet.DivergedError, match="and 1008 more") as caught:
        refuse_diverged(roll_of([math.nan] * N), "round 3", N - 1)
    assert len(str(caught.value).splitlines()) <= 20


@pytest.mark.parametrize("n", [4, N])
def test_a_disagreement_shows_the_odd_ranks_and_one_of_the_others(n: int) -> None:
    rows = [{"lr": "0.2" if rank == 2 else "0.1"} for rank in range(n)]
    with pytest.raises(hdet.DisagreementError) as caught:
        check_equal(rows, "Give every rank the same arguments.")
    assert str(caught.value).splitlines() == [
        "replicas disagree on lr, which must be equal on all of them (look at rank 2):",
        f"  rank 0: lr = 0.1 ({n - 1} ranks alike)",
        "  rank 2: lr = 0.2",
        "Give every rank the same arguments.",
    ]


@pytest.mark.parametrize("different", [400, N])
def test_a_disagreement_of_many_is_short(different: int) -> None:
    rows = [{"lr": str(rank if rank < different else -1)} for rank in range(N)]
    with pytest.raises(hdet.DisagreementError, match=rf"\n  and {different - 15 - (different == N)} more\n") as caught:
        check_equal(rows, "Give every rank the same arguments.")
    assert len(str(caught.value).splitlines()) <= 20
    assert len(str(caught.value)) < 1000


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
