"""On a GPU: where snapshots lie, and that making one waits for nothing. Skips without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hdet.rollback.snapshots import START, Snapshots
from tests.gpu import no_synchronising

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def deep_model(layers: int = 40) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)), nn.BatchNorm1d(64)).cuda()


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, times: int) -> None:
    for seed in range(times):
        optimizer.zero_grad()
        x = torch.randn(32, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        model(x).square().mean().backward()
        optimizer.step()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers(), *states)]


@pytest.mark.parametrize(("slot", "place"), [(START, "cuda"), (0, "cuda"), (1, "cpu")])
def test_going_back_is_exact_wherever_a_snapshot_lies(slot: int, place: str) -> None:
    model = deep_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stepped(model, optimizer, 3)
    snapshots, was = Snapshots(), list[Tensor]()
    for _ in range(2):
        with no_synchronising():
            snapshots.keep(slot, optimizer, model)
        was = everything(model, optimizer)
        weights = snapshots._copies[slot].weights
        assert {t.device.type for t in weights} == {place}
        assert place == "cuda" or all(t.is_pinned() for t in weights)
        snapshots.wait()
        stepped(model, optimizer, 4)
    snapshots.roll_back_(slot, optimizer, model)
    assert all(map(torch.equal, everything(model, optimizer), was))


def test_where_a_device_has_no_room_a_snapshot_lies_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hdet.rollback.snapshots.has_room", lambda needed: False)
    model = deep_model(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    snapshots = Snapshots()
    snapshots.keep(0, optimizer, model)
    assert {t.device.type for t in snapshots._copies[0].weights} == {"cpu"}


def test_a_snapshot_that_is_made_again_takes_no_new_memory() -> None:
    model = deep_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stepped(model, optimizer, 1)
    snapshots = Snapshots()
    for slot in (0, 1):
        snapshots.keep(slot, optimizer, model)
    held = torch.cuda.memory_allocated()
    for slot in (0, 1, 0, 1):
        snapshots.keep(slot, optimizer, model)
    assert torch.cuda.memory_allocated() == held


def test_copies_beside_training_are_awaited_before_the_next_step() -> None:
    """Large moments: the copy is still under way when the next step is about to change them."""
    p = nn.Parameter(torch.ones(1 << 26, device="cuda"))
    optimizer = torch.optim.SGD([p], lr=1e-3, momentum=0.9)
    p.grad = torch.ones_like(p)
    optimizer.step()
    snapshots = Snapshots()
    for _ in range(3):
        before = optimizer.state[p]["momentum_buffer"][::4096].clone()
        snapshots.keep(1, optimizer, None)
        snapshots.wait()
        optimizer.step()
        torch.cuda.synchronize()
        kept = snapshots._copies[1].states[0]["momentum_buffer"]
        assert kept.is_cpu
        assert torch.equal(kept[::4096], before.cpu())
