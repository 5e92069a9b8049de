"""The rows of experiments/misset_lr.py: each does what its name says."""

from __future__ import annotations

import math
from types import SimpleNamespace

import misset_ensembles as ensembles
import misset_rows as rows
import pytest
import torch
from misset_rows import ROWS, Hypergradient, auto, fixed
from misset_shapes import cosine, onecycle
from stacked import Momentum
from torch import nn

from tests.experiments.small_tasks import bench


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_trained_without_spread_is_plain_training(monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    monkeypatch.setattr(ensembles, "ALPHA", 0.0)
    here = bench("feed", optimizer)
    plain = fixed(here, [1e-2, 1e-1], onecycle(here.steps))
    found = ensembles.trained(here, [1e-2, 1e-1])
    for row, other in zip(found.losses, plain.losses, strict=True):
        assert row == pytest.approx(other, rel=1e-5)
    assert found.run_steps == plain.run_steps


def test_trained_moves_its_rate() -> None:
    here = bench("feed")
    found = ensembles.trained(here, [1e-2])
    assert all(math.isfinite(loss) for loss in found.losses[0])
    assert all(rate != pytest.approx(1e-2, rel=1e-9) and 0.005 < rate < 0.02 for rate in found.found[0])


def test_hypergradient_by_hand() -> None:
    theta = torch.tensor([[[1.0, -2.0]]], dtype=torch.float64)
    optimizer = Hypergradient(Momentum(theta, 0.0), theta, beta=0.02)
    optimizer.step_(theta, torch.tensor([[[1.0, 0.0]]], dtype=torch.float64), torch.full_like(theta, 0.1))
    assert theta[0, 0].tolist() == pytest.approx([0.9, -2.0])  # nothing to compare with yet
    optimizer.step_(theta, torch.tensor([[[3.0, 4.0]]], dtype=torch.float64), torch.full_like(theta, 0.1))
    rate = 0.1 * (1 + 0.02 * 0.6)  # the cosine of (3, 4) and (1, 0)
    assert theta[0, 0].tolist() == pytest.approx([0.9 - 3 * rate, -2.0 - 4 * rate])


def test_placebo_is_shuffled_and_the_same_every_time() -> None:
    here = bench("feed", steps=60)
    real, placebo, again = (auto(here, [1e-3], shuffled=shuffled) for shuffled in (False, True, True))
    assert placebo.losses == again.losses
    assert placebo.found != real.found


def test_auto_does_not_care_where_it_starts() -> None:
    here = bench("feed", steps=60)
    near, far = auto(here, [1e-6, 10.0]).found
    for low, high in zip(near, far, strict=True):
        assert abs(math.log(low / high)) < math.log(100)  # the guesses are 1e7 apart, and the run is tiny


def test_population_spends_as_much_as_one_run() -> None:
    here = bench("feed", steps=40)
    found = ensembles.population(here, [1e-5, 1.0])
    assert found.run_steps == 40 * len(here.seeds)
    assert len(found.losses) == 1
    assert all(1e-6 < rate < 2 for rate in found.found[0])


def test_peers_step_on_their_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package whose Prodigy is plain SGD: with its cosine decay, that is a fixed rate without warm-up."""
    package = SimpleNamespace(Prodigy=lambda p, lr: torch.optim.SGD(p, lr=0.1 * lr, momentum=0.9))
    monkeypatch.setattr(rows.peers, "import_module", lambda name: package)
    here = bench("feed", "sgd", steps=20)
    shape = cosine(20, warm_up=0.0)
    shape[:20] = [(1 + math.cos(math.pi * t / 20)) / 2 for t in range(20)]
    plain = fixed(here, [0.1], shape)
    assert ROWS["prodigy"].run(here, []).losses[0] == pytest.approx(plain.losses[0], rel=1e-9)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.package is not None])
def test_packages(name: str) -> None:
    pytest.importorskip(str(ROWS[name].package))
    here = bench("feed", steps=6, seeds=(0,))
    here.choosing = bench("feed", steps=6, seeds=(7,))
    assert all(math.isfinite(loss) for row in ROWS[name].run(here, [1e-3, 1e-2]).losses for loss in row)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "find_spec", lambda name: None)
    assert ROWS["dog"].missing("adam") == "dog is not installed"
    assert ROWS["prodigy"].missing("sgd") == "not for sgd"
    assert ROWS["auto"].missing("sgd") is None


def test_averaged_dog_gives_its_average(monkeypatch: pytest.MonkeyPatch) -> None:
    class Averager:
        def __init__(self, module: nn.Module) -> None:
            self.averaged_model = nn.ParameterList([torch.zeros_like(next(module.parameters()))])

        def step(self) -> None:
            pass

    package = SimpleNamespace(DoG=lambda p: torch.optim.SGD(p, lr=0.1), PolynomialDecayAverager=Averager)
    monkeypatch.setattr(rows.peers, "import_module", lambda name: package)
    here = bench("feed", steps=2, seeds=(0,))
    stack = here.stack(1)
    zero = stack.validation(torch.zeros_like(stack.theta))
    assert ROWS["dog"].run(here, []).losses[0][0] == pytest.approx(float(zero))
