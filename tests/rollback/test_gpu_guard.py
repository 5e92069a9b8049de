"""On a GPU: a guard waits for nothing, leaves faults out or undoes them soon, refuses CUDA graphs. Skips without one."""

from __future__ import annotations

import warnings
from itertools import pairwise
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


KINDS: dict[str, dict[str, Any]] = {
    "foreach": {},
    "fused": {"fused": True},
    "tensor": {"lr": 3e-3, "capturable": True},
}


def made(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, hdet.Guard]:
    more = KINDS[kind]
    return built(**{**more, "lr": torch.tensor(more["lr"], device="cuda")} if "lr" in more else more)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_synchronises_until_there_is_a_fault(kind: str) -> None:
    """Numbers are read some steps later, when they are there already: waiting for an event is no synchronisation."""
    model, optimizer, guard = made(kind)
    batches = [torch.randn(128, 64, device="cuda") for _ in range(EVERY)]
    for t in range(10 * EVERY):
        if t < 5 * EVERY:  # memory is taken
            guard.step(trained(model, optimizer, batches[t % EVERY]))
        else:
            with no_synchronising():
                guard.step(trained(model, optimizer, batches[t % EVERY]))
    assert guard.rollbacks == 0


@pytest.mark.parametrize("at", [84, 87])
@pytest.mark.parametrize("fault", ["weight", "gradient", "loss"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::hdet.RollbackWarning")
def test_a_fault_is_left_out_or_undone_soon(kind: str, fault: str, at: int) -> None:
    """The rate pays nothing. A bad gradient does no harm at all to a fused optimizer, and one bad loss is no fault."""
    model, optimizer, guard = made(kind)
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
    assert guard.factor == 1.0
    assert all(p.isfinite().all() for p in model.parameters())
    assert loss < 30
    if fault == "loss":
        assert guard.rollbacks == 0
    elif fault == "weight" or kind != "fused":  # buffers have seen the batch, and are rolled back at the next snapshot
        assert guard.rollbacks == 1
        assert undone is not None
        assert undone - at <= 10


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("times", [torch.nan, torch.inf, 1e4])
def test_a_step_that_the_device_leaves_out_changes_nothing(name: str, times: float) -> None:
    """Weights, moments and step counts are those of a run without that call, bit by bit; nothing waits."""
    more = {"momentum": 0.9} if name == "SGD" else {}
    found = []
    for guarded in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True, **more)
        guard = hdet.Guard(optimizer, model, check_every=EVERY) if guarded else None
        generator = torch.Generator("cuda").manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hdet.RollbackWarning)
            for t in range(60):
                x = torch.randn(128, 64, device="cuda", generator=generator)
                optimizer.zero_grad()
                loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
                (loss * (times if t == 41 else 1.0)).backward()
                if guard is not None or t != 41:
                    optimizer.step()
                if guard is not None:
                    guard.step(loss.detach())
        assert guard is None or (guard.rollbacks, guard.held) == (0, 1)
        state = [v for row in optimizer.state.values() for v in row.values() if isinstance(v, torch.Tensor)]
        found.append([*model.parameters(), *state])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_a_scalers_own_skips_are_no_faults(fused: bool) -> None:
    """``torch.amp`` in fp16: gradients overflow until the scale is low enough, and now and then after that."""
    model, optimizer, guard = built(fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30, growth_interval=4)
    generator = torch.Generator("cuda").manual_seed(0)
    scales = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", hdet.RollbackWarning)
        for _ in range(400):
            x = torch.randn(128, 64, device="cuda", generator=generator)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            guard.step(loss.detach())
    assert sum(after < before for before, after in pairwise(scales)) > 20
    assert (guard.rollbacks, guard.held) == (0, 0)
    assert float(loss) < 30


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
