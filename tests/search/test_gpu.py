"""On a GPU: an ordinary step of a search waits for nothing and launches little. Skips without one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hdet
from hdet.search.search import Search
from hdet.search.steps import Sampling
from tests.gpu import no_synchronising

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def deep_model(layers: int = 40) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)), nn.BatchNorm1d(64)).cuda()


def backward(model: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(32, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
    model.zero_grad()
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()
    return loss.detach()


def launches(work: Callable[[], object]) -> int:
    """Kernels and copies that a call puts on the device."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    return sum(event.count for event in seen.key_averages() if "Synchronize" not in event.key)


def search_of(scheduler: hdet.AutoScheduler) -> Search:
    search = scheduler.search
    assert isinstance(search, Search)
    return search


def _kind(search: Search) -> str:
    """Of the step to come."""
    if search.steps.sampling is Sampling.NONE:
        return "later"
    return "sampled" if search.steps._is_due else "not sampled"


def test_a_step_launches_little_while_it_is_sampled_and_nothing_else() -> None:
    model = deep_model()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for seed in range(3):
        backward(model, seed)
        plain.step()
    alone = launches(plain.step)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = hdet.auto(optimizer, total_steps=400)
    search = search_of(scheduler)
    counts: dict[str, list[int]] = {"sampled": [], "not sampled": [], "later": []}
    for t in range(390):
        loss = backward(model, t)
        if 150 <= t < 160 or t > 380:
            kind = _kind(search)
            counts[kind].append(launches(optimizer.step) - alone)
        else:
            optimizer.step()
        scheduler.step(loss)
    assert all(counts.values()), counts
    assert max(counts["sampled"]) <= 27, counts  # 82 parameters
    assert max(counts["not sampled"] + counts["later"]) <= 1, counts  # the profiler's own


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("gives_loss", [False, True])
@pytest.mark.filterwarnings("ignore::hdet.errors.SearchWarning")
def test_an_ordinary_step_synchronises_nothing(gives_loss: bool, as_tensor: bool) -> None:
    """Nor does one at which a snapshot was just made; a round's end does, once."""
    model = deep_model(4)
    rate = torch.tensor(1e-4, device="cuda") if as_tensor else 1e-4
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=as_tensor)
    scheduler = hdet.auto(optimizer, total_steps=200)
    search, quiet = search_of(scheduler), 0
    for t in range(200):
        loss = backward(model, t)
        given = [loss] if gives_loss else []
        with no_synchronising():
            optimizer.step()
        if search._round_ends(t + 1):
            scheduler.step(*given)
            continue
        quiet += 1
        if t < 2:  # torch's own scheduler warms up
            scheduler.step(*given)
            continue
        with no_synchronising():
            scheduler.step(*given)
    assert quiet > 150


def allocated(**arguments: bool) -> list[float]:
    """Memory over that of plain training after each step of AdamW, in units of the weights' bytes."""
    weights = 4 * 4096 * 4096
    model = nn.Linear(4096, 4096, bias=False).cuda()
    batch = torch.randn(16, 4096, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    scheduler = hdet.auto(optimizer, total_steps=100, **arguments)
    torch.cuda.synchronize()
    alone, found = torch.cuda.memory_allocated(), []
    for _ in range(100):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
        del loss
        found.append((torch.cuda.memory_allocated() - alone) / weights - 3)  # two moments, one gradient
    return found


def test_copies_of_the_weights_on_the_device() -> None:
    """A snapshot of 3, the origin and the sum of gradients; then the snapshot alone. Beside some scratch."""
    scratch = 40 / 64
    held = allocated()
    assert max(held[5:]) <= 5 + scratch
    assert held[-2] <= 3 + scratch
    free = allocated(rollback=False)
    assert max(free[5:]) <= 2 + scratch
    assert free[-2] <= scratch
