"""On a GPU: where copies live, and that an ordinary step waits for nothing and launches little. Skips without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hdet
from hdet.engine.probed.slots import Slots
from hdet.engine.probed.way import ProbedWay
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


@pytest.mark.parametrize(("limit", "place"), [(None, "cuda"), (0, "cpu"), (1 << 40, "cuda")])
def test_going_back_is_exact_wherever_copies_live(limit: int | None, place: str) -> None:
    model = deep_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stepped(model, optimizer, 3)
    slots = Slots(limit)
    for slot in (0, 1, 0):
        with no_synchronising():
            slots.keep(slot, optimizer, model)
        was = everything(model, optimizer)
        copy = slots._copies[slot]
        assert {t.device.type for t in copy.weights} == {place}
        assert place == "cuda" or all(t.is_pinned() for t in copy.weights)
        slots.wait()
        stepped(model, optimizer, 4)
    now = everything(model, optimizer)
    with slots.shown(0, optimizer, model):
        pass
    assert all(map(torch.equal, everything(model, optimizer), now))
    slots.restore_(0, optimizer, model)
    assert all(map(torch.equal, everything(model, optimizer), was))


def test_a_copy_that_is_kept_again_takes_no_new_memory() -> None:
    model = deep_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stepped(model, optimizer, 1)
    slots = Slots()
    for slot in (0, 1):
        slots.keep(slot, optimizer, model)
    held = torch.cuda.memory_allocated()
    for slot in (0, 1, 0, 1):
        slots.keep(slot, optimizer, model)
    assert torch.cuda.memory_allocated() == held


def test_copies_beside_training_are_awaited_before_the_next_step() -> None:
    """Large moments: the copy is still under way when the next step is about to change them."""
    p = nn.Parameter(torch.ones(1 << 26, device="cuda"))
    optimizer = torch.optim.SGD([p], lr=1e-3, momentum=0.9)
    p.grad = torch.ones_like(p)
    optimizer.step()
    slots = Slots(0)
    for _ in range(3):
        before = optimizer.state[p]["momentum_buffer"][::4096].clone()
        slots.keep(0, optimizer, None)
        slots.wait()
        optimizer.step()
        torch.cuda.synchronize()
        kept = slots._copies[0].memory.states[0]["momentum_buffer"]
        assert torch.equal(kept[::4096], before.cpu())


def launches(work: object) -> int:
    """Kernels and copies that a call puts on the device."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        work()  # type: ignore[operator]
        torch.cuda.synchronize()
    return sum(event.count for event in seen.key_averages() if "Synchronize" not in event.key)


def test_a_step_launches_little_while_it_is_listened_to_and_nothing_later() -> None:
    model = deep_model()
    probe = hdet.ProbeBatch(model, lambda m, x: m(x).square().mean(), lambda k: torch.ones(8, 64, device="cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=2000, probe=probe)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-4)
    stepped(model, plain, 3)
    alone = launches(plain.step)
    counts: dict[str, list[int]] = {"heard": [], "not heard": [], "later": []}
    way = scheduler._run.way
    assert isinstance(way, ProbedWay)
    for t in range(1300):
        seen = t in (150, 151, 152, 153, 154, 155) or t > 1294
        if seen:
            heard = way._looks and way._witness._listens
            counts["heard" if heard else "not heard" if way._looks else "later"].append(
                launches(optimizer.step) - alone
            )
        elif t < 160 or t > 1290:
            stepped(model, optimizer, 1)
        scheduler.step()
    assert counts["heard"], counts
    assert max(counts["heard"]) <= 25, counts  # 82 parameters
    assert counts["later"], counts
    assert max(counts["not heard"] + counts["later"]) <= 1, counts  # the profiler's own


def test_an_ordinary_step_synchronises_nothing() -> None:
    model = deep_model(4)
    probe = hdet.ProbeBatch(model, lambda m, x: m(x).square().mean(), lambda k: torch.ones(8, 64, device="cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = hdet.OneCycleLR(optimizer, "auto", total_steps=200, probe=probe)
    for t in range(200):
        stepped_backward(model, t)
        with no_synchronising():
            optimizer.step()
            if not scheduler._run.way.rounds.ends_at(t + 1):
                scheduler.step()
                continue
        scheduler.step()


def stepped_backward(model: nn.Module, seed: int) -> None:
    x = torch.randn(32, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
    model.zero_grad()
    model(x).square().mean().backward()


def test_two_copies_of_the_weights_while_it_searches_and_three_at_the_end_of_a_round() -> None:
    """In fp32, beside some scratch; kept copies are on the host here."""
    million, weights = 1 << 20, 4 * (1 << 24)
    model = nn.Linear(4096, 4096, bias=False).cuda()
    batch = torch.randn(16, 4096, device="cuda")
    probe = hdet.ProbeBatch(model, lambda m, x: m(x).square().mean(), lambda k: batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scheduler = hdet.OneCycleLR(
        optimizer, "auto", total_steps=1000, cycle_momentum=False, probe=probe, copies_on_device=0
    )
    model(batch).square().mean().backward()
    torch.cuda.synchronize()
    alone = torch.cuda.memory_allocated()
    for t in range(12):
        optimizer.step()
        torch.cuda.reset_peak_memory_stats()
        scheduler.step()
        if t > 4:
            assert torch.cuda.memory_allocated() - alone <= 2 * weights + 40 * million
            assert torch.cuda.max_memory_allocated() - alone <= 3 * weights + 44 * million
