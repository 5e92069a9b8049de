"""Four real DDP processes agree with the slow reference, step by step, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import hdet
from tests.ensemble import twin as reference
from tests.models import batch, groups_of, make_optimizer, two_layer
from tests.processes import run_ranks

N, S, T = 4, 100, 12  # ends at 12, 24, ... 96, 99, 100
MAX_LR = {"adam": [0.02, 0.01, 0.03], "sgd": [0.05, 0.03, 0.08]}
ALPHA = 0.3
PRINTED = ("mended", "as printed")


def rates_of(kind: str, decay: str) -> list[float]:
    """As printed the rate grows 400 times after the warm-up."""
    return [rate / (400 if decay == "as printed" else 1) for rate in MAX_LR[kind]]


CASES = [
    pytest.param(kind, auto_lr, decay, id=f"{kind}-{'auto' if auto_lr else 'plain'}-{decay}", marks=marks)
    for kind, marks in (("adam", ()), ("sgd", pytest.mark.slow))
    for auto_lr, decay in (
        (False, "schedule"),
        (True, "schedule"),
        (True, "exponential"),
        (True, "mended"),
        (True, "as printed"),
    )
]


def train(rank: int, kind: str, auto_lr: bool, decay: str) -> dict[str, Any]:
    model = two_layer()
    optimizer = make_optimizer(kind, groups_of(model))
    ddp = DistributedDataParallel(model)
    rule: dict[str, Any] = {"auto_lr": auto_lr, "decay": decay}
    if decay in PRINTED:
        rule = {"auto_lr": hdet.AsPrinted(mend_gamma=decay == "mended")}
    scheduler = hdet.OneCycleLR(
        optimizer, rates_of(kind, decay), total_steps=S, spread=ALPHA, sync_every=T, seed=5, **rule
    )
    out: dict[str, Any] = {"eta": [], "mu": [], "loss": [], "theta": []}
    for t in range(S):
        x, y = batch(t, rank)
        loss = mse_loss(ddp(x), y)
        out["eta"].append([group["lr"] for group in optimizer.param_groups])
        out["mu"].append(
            [group["betas"][0] if kind == "adam" else group["momentum"] for group in optimizer.param_groups]
        )
        out["loss"].append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        out["theta"].append([p.detach().clone() for p in model.parameters()])
    out["state"] = scheduler.state_dict()["hdet"]
    return out


def simulate(kind: str, auto_lr: bool, decay: str) -> reference.History:
    schedules = [reference.OneCycle(max_lr, S) for max_lr in rates_of(kind, decay)]
    settings = reference.Settings(
        N=N,
        S=S,
        T=T,
        alpha=ALPHA,
        schedules=schedules,
        S_warm=36 if auto_lr else None,  # the warm-up ends at 0.3 * 100 - 1 = 29, the round at 36
        exponential=decay == "exponential",
        printed=decay if decay in PRINTED else None,
        seed=5,
    )
    model = two_layer()
    groups = groups_of(model)

    def loss_and_grad(theta: reference.Theta, t: int, r: int) -> tuple[float, reference.Theta]:
        with torch.no_grad():
            for xs, ys in zip(groups, theta, strict=True):
                for x, y in zip(xs, ys, strict=True):
                    x.copy_(y)
        x, y = batch(t, r)
        loss = mse_loss(model(x), y)
        flat = [p for group in groups for p in group]
        grads = iter(torch.autograd.grad(loss, flat))
        return loss.item(), [[next(grads) for _ in group] for group in groups]

    rule = reference.Adam if kind == "adam" else reference.Momentum
    theta0 = [[p.detach().clone() for p in group] for group in groups]
    return reference.simulate(settings, theta0, loss_and_grad, rule)


@pytest.mark.parametrize(("kind", "auto_lr", "decay"), CASES)
def test_four_processes_agree_with_the_reference(kind: str, auto_lr: bool, decay: str) -> None:
    replicas = run_ranks(train, N, kind, auto_lr, decay)
    expected = simulate(kind, auto_lr, decay)
    for r, replica in enumerate(replicas):
        for t in range(S):
            assert replica["eta"][t] == pytest.approx(expected.eta[t][r], rel=1e-9), (t, r)
            assert replica["mu"][t] == pytest.approx(expected.mu[t], rel=1e-9), (t, r)
            assert replica["loss"][t] == pytest.approx(expected.loss[t][r], rel=1e-9), (t, r)
            flat = [x for group in expected.theta[t][r] for x in group]
            for ours, theirs in zip(replica["theta"][t], flat, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        if auto_lr:
            assert replica["state"]["controller_state"][0][1] == pytest.approx(expected.v[-1], rel=1e-7)
            assert any(abs(v) > 1e-6 for v in expected.v[-1])  # there was a signal
        if decay == "schedule":
            assert replica["state"]["learned"] == pytest.approx(expected.m[-1], rel=1e-9)
