"""On a GPU: a guard waits for nothing, undoes faults soon, and refuses steps in CUDA graphs. Skips without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hdet
from tests.gpu import no_synchronising

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
EVERY = 16


def built(**more: Any) -> tuple[nn.Module, torch.optim.Optimizer, hdet.Guard]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), **{"lr": 3e-3, **more})
    return model, optimizer, hdet.Guard(optimizer, model, check_every=EVERY, recover=3)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


RATES = [3e-3, torch.tensor(3e-3, device="cuda") if torch.cuda.is_available() else 0.0]


@pytest.mark.parametrize("rate", RATES)
def test_nothing_synchronises_until_there_is_a_fault(rate: Any) -> None:
    """Numbers are read some steps later, when they are there already: waiting for an event is no synchronisation."""
    tensor = isinstance(rate, torch.Tensor)
    model, optimizer, guard = built(lr=rate.clone() if tensor else rate, capturable=tensor)
    batches = [torch.randn(128, 64, device="cuda") for _ in range(EVERY)]
    for t in range(10 * EVERY):
        if t < 3 * EVERY:  # memory is taken
            guard.step(trained(model, optimizer, batches[t % EVERY]))
        else:
            with no_synchronising():
                guard.step(trained(model, optimizer, batches[t % EVERY]))
    assert guard.rollbacks == 0


@pytest.mark.parametrize("at", [84, 87])
@pytest.mark.parametrize("fault", ["weight", "gradient", "loss"])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.filterwarnings("ignore::hdet.RollbackWarning")
def test_a_fault_is_undone_within_four_steps(rate: Any, fault: str, at: int) -> None:
    """The rate pays nothing."""
    tensor = isinstance(rate, torch.Tensor)
    model, optimizer, guard = built(lr=rate.clone() if tensor else rate, capturable=tensor)
    generator = torch.Generator("cuda").manual_seed(0)
    undone = None
    for t in range(10 * EVERY):
        x = torch.randn(128, 64, device="cuda", generator=generator)
        if fault == "gradient" and t == at:
            x = x * torch.inf
        loss = trained(model, optimizer, x)
        if fault == "weight" and t == at:
            model[0].weight.data[0, 0] = torch.nan  # type: ignore[index,union-attr]
        guard.step(loss * torch.nan if fault == "loss" and t == at else loss)
        if guard.rollbacks and undone is None:
            undone = t
    assert (guard.rollbacks, guard.factor) == (1, 1.0)
    assert undone is not None
    assert undone - at <= 4
    assert all(p.isfinite().all() for p in model.parameters())
    assert loss < 30


def test_a_step_that_is_captured_is_refused() -> None:
    model, optimizer, guard = built(capturable=True)
    x = torch.randn(128, 64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            guard.step(trained(model, optimizer, x))
    torch.cuda.current_stream().wait_stream(side)
    with (
        pytest.raises(hdet.ArgumentError, match="was captured under a"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
