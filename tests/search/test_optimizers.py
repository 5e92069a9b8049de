"""Every optimizer of torch, and schedule-free ones, from guesses that are wrong by orders of magnitude."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from tests.problems import (
    Records,
    final_loss,
    is_finite,
    network,
    quiet,
    train,
)
from tests.setup_runs import FACES, fixed_loss, searching

STEPS = 200
optim = torch.optim
Make = Callable[[Any, float], Optimizer]

GOOD: dict[str, tuple[Make, float]] = {
    "Adadelta": (lambda p, lr: optim.Adadelta(p, lr=lr), 3.0),
    "Adafactor": (lambda p, lr: optim.Adafactor(p, lr=lr), 0.1),
    "Adagrad": (lambda p, lr: optim.Adagrad(p, lr=lr), 0.1),
    "Adam": (lambda p, lr: optim.Adam(p, lr=lr), 0.03),
    "AdamW": (lambda p, lr: optim.AdamW(p, lr=lr), 0.03),
    "Adamax": (lambda p, lr: optim.Adamax(p, lr=lr), 0.03),
    "ASGD": (lambda p, lr: optim.ASGD(p, lr=lr), 0.3),
    "NAdam": (lambda p, lr: optim.NAdam(p, lr=lr), 0.03),
    "RAdam": (lambda p, lr: optim.RAdam(p, lr=lr), 0.03),
    "RMSprop": (lambda p, lr: optim.RMSprop(p, lr=lr), 0.01),
    "SGD": (lambda p, lr: optim.SGD(p, lr=lr), 0.3),
    "SGD-momentum": (lambda p, lr: optim.SGD(p, lr=lr, momentum=0.9), 0.1),
}
"""With a good rate of each on this problem."""
OFF = [1e-6, 1e3]
WORSE = {"ASGD": 3, "SGD": 3}
"""What a found rate may cost here, over a good one, if not 2: where training has gone back, the rate is a third."""


def cycles(optimizer: Optimizer) -> bool:
    """torch's OneCycleLR refuses to cycle a momentum that is not there."""
    return any(name in optimizer.defaults and optimizer.defaults[name] != 0 for name in ("momentum", "betas"))


def auto(optimizer: Optimizer) -> hdet.AutoScheduler:
    return hdet.auto(optimizer, total_steps=STEPS)


@pytest.mark.covers("frameworks", "plain loop, search", "one process", "fp32")
@pytest.mark.parametrize("off", OFF)
@pytest.mark.parametrize("name", GOOD)
def test_it_learns_from_a_guess_that_is_far_off(name: str, off: float) -> None:
    make, good = GOOD[name]
    model = network()
    optimizer = make(model.parameters(), good * off)
    train(model, optimizer, auto(optimizer), range(STEPS))
    assert is_finite(model)
    assert final_loss(model) < WORSE.get(name, 2) * fixed_loss(make, good, STEPS)


class StateAtOnce(Optimizer):
    """Adagrad as torch had it for years: state is made at construction, and ``step`` relies on it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.full_like(p, 0.01)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                total = self.state[p]["sum"]
                total.addcmul_(p.grad, p.grad)
                p.addcdiv_(p.grad, total.sqrt(), value=-float(group["lr"]))


class CountInGroup(StateAtOnce):
    """As those of pytorch-optimizer: where a group has no count of steps yet, its state is made."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.state.clear()

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if "step" not in group:
                group["step"] = 0
                for p in group["params"]:
                    self.state[p]["sum"] = torch.full_like(p, 0.01)
            group["step"] += 1
        super().step(closure)


RESTARTS: dict[str, tuple[Callable[[Any], Optimizer], str]] = {
    "Adagrad": (lambda p: optim.Adagrad(p, lr=1e5), "Adagrad"),
    "state-at-once": (lambda p: StateAtOnce(p, 1e5), "Adagrad"),
    "count-in-group": (lambda p: CountInGroup(p, 1e5), "Adagrad"),
    "Adagrad-with-a-first-sum": (lambda p: optim.Adagrad(p, lr=1e5, initial_accumulator_value=0.1), "Adagrad"),
    "Adam": (lambda p: optim.Adam(p, lr=1e4), "Adam"),
    "SGD-momentum": (lambda p: optim.SGD(p, lr=1e5, momentum=0.9), "SGD-momentum"),
}
"""Their first step, at a thousandth of this, is much too long. And which of the above they are, or nearly."""


@pytest.mark.parametrize("name", RESTARTS)
def test_a_first_step_that_was_too_long_is_taken_back(name: str) -> None:
    """State too: some optimizers make it when they are built, and look for it at every step."""
    model, journal = network(), Records()
    make, like = RESTARTS[name]
    optimizer = make(model.parameters())
    scheduler = hdet.auto(optimizer, total_steps=STEPS, journal=journal)
    train(model, optimizer, scheduler, range(STEPS))
    assert any(record["event"] == "restarted" for record in journal.rounds)
    assert is_finite(model)
    assert final_loss(model) < WORSE.get(like, 2) * fixed_loss(*GOOD[like], STEPS)


def test_every_optimizer_of_torch_is_in_this_file() -> None:
    """One that torch adds must be tried, or refused."""
    theirs = {
        name
        for name, kind in vars(optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    assert theirs - {"LBFGS", "Rprop", "SparseAdam", "Muon"} <= {name.split("-")[0] for name in GOOD}


def unbiased() -> nn.Module:
    return network(nn.ReLU(), bias=False)


@pytest.mark.parametrize("off", OFF)
def test_muon(off: float) -> None:
    """It takes matrices only, so the network has no biases."""
    muon = getattr(optim, "Muon", None)
    if muon is None:
        pytest.skip("this torch has no Muon")
    model = unbiased()
    optimizer = muon(model.parameters(), lr=0.05 * off)
    train(model, optimizer, auto(optimizer), range(STEPS))
    assert is_finite(model)
    assert final_loss(model) < 4 * fixed_loss(muon, 0.05, STEPS, unbiased)  # so small a network is trained too fast


class Table(nn.Module):
    """Numbers to be learned by heart, with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(64, 4, sparse=True)
        with torch.no_grad():
            self.rows.weight.copy_(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x)


def rows_of(k: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(64, (32,), generator=torch.Generator().manual_seed(k))
    return x, torch.stack([(x * f / 10).sin() for f in range(1, 5)], 1)


def table_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


@pytest.mark.parametrize("off", OFF)
@pytest.mark.parametrize("kind", ["SparseAdam", "SGD"])
def test_sparse_gradients(kind: str, off: float) -> None:
    make, good = (optim.SparseAdam, 0.1) if kind == "SparseAdam" else (optim.SGD, 10.0)
    losses = []
    for rate in (good, good * off):
        model = Table()
        optimizer: Any = make(model.parameters(), lr=rate)
        scheduler: Any
        if rate == good:
            scheduler = OneCycleLR(optimizer, rate, total_steps=STEPS + 1, cycle_momentum=False)
        else:
            scheduler = auto(optimizer)
        for t in range(STEPS):
            optimizer.zero_grad()
            loss = table_loss(model, rows_of(t))
            loss.backward()
            optimizer.step()
            scheduler.step(*([] if rate == good else [loss.detach()]))
        assert is_finite(model)
        losses.append(float(table_loss(model, rows_of(-1)).detach()))
    assert losses[1] < 2 * losses[0] + 0.01


@pytest.mark.parametrize("name", ["LBFGS", "Rprop"])
@pytest.mark.parametrize("face", FACES)
def test_an_optimizer_whose_rate_is_no_factor_is_refused_with_the_cure(name: str, face: str) -> None:
    """LBFGS searches along a line by itself, Rprop adapts each weight's step: the rate is no factor on a round."""
    model = network()
    optimizer = getattr(optim, name)(model.parameters())
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(hdet.ArgumentError, match=rf"{name} .*Use another optimizer"):
        searching(model, optimizer, STEPS, face)
    assert [dict(group) for group in optimizer.param_groups] == before


@pytest.mark.parametrize("off", OFF)
@pytest.mark.parametrize("kind", ["AdamWScheduleFree", "SGDScheduleFree"])
def test_schedule_free(kind: str, off: float) -> None:
    """Its parameters are two things: y to train with, x to evaluate. It trains, and goes back, at y."""
    schedulefree = pytest.importorskip("schedulefree")
    model = network()
    good = 0.03 if kind.startswith("Adam") else 0.3
    optimizer = getattr(schedulefree, kind)(model.parameters(), lr=good * off)
    optimizer.train()
    with quiet():
        train(model, optimizer, searching(model, optimizer, STEPS), range(STEPS))
    assert optimizer.param_groups[0]["train_mode"]
    optimizer.eval()
    assert final_loss(model) < 3 * fixed_loss(*GOOD["AdamW" if kind.startswith("Adam") else "SGD"], STEPS)


@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.Adafactor, torch.optim.Adadelta])
def test_one_without_momentum_has_none_cycled(make: Any) -> None:
    """A search takes it; with a number torch refuses it, and so does hdet."""
    model = network()
    optimizer = make(model.parameters(), lr=1e-4)
    scheduler = hdet.auto(optimizer, total_steps=100)
    train(model, optimizer, scheduler, range(100))
    assert final_loss(model) < final_loss(network())
    with pytest.raises(ValueError, match="must support momentum or beta1"):
        hdet.OneCycleLR(make(model.parameters(), lr=1e-4), 0.1, total_steps=100)


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.Adam])
def test_a_search_leaves_momentum_alone_however_it_is_made(make: Any) -> None:
    """Of one optimizer as of several; a number as max_lr cycles it as torch does."""
    for build in (
        lambda opt: hdet.auto(opt, total_steps=100),
        lambda opt: hdet.auto([opt], total_steps=100),
    ):
        optimizer = make(network().parameters())
        before = {name: optimizer.param_groups[0].get(name) for name in ("momentum", "betas")}
        scheduler = build(optimizer)
        for _ in range(5):
            optimizer.step()
            scheduler.step()
        assert {name: optimizer.param_groups[0].get(name) for name in ("momentum", "betas")} == before
    assert hdet.OneCycleLR(make(network().parameters()), 0.1, total_steps=100).cycle_momentum
