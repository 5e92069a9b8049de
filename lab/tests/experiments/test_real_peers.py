"""lab/experiments/real/stacked_peers.py: each seed steps as the package does, or as the equations say."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib import import_module

import pytest
import torch
from real.bench import Bench
from real.optimizers import AdamW
from real.peers import missing
from real.stacked_peers import ProdigyPlus, Rule, ScheduleFree, ScheduleFreePlus
from real.together import run_together
from shapes import onecycle
from stacked import Piece, Supply
from torch import Tensor, nn

from lab.tests.experiments.small_tasks import small

STEPS, SEEDS, WARM_UP = 120, 2, 7
SHAPES = [(40, 8), (8, 40), (40, 40), (33, 4, 3, 3), (4, 33, 3, 3), (64, 3, 32), (20, 7), (50,), (12, 1)]
"""Factored with the long axis first, last, and as long as the other; in four and three axes; not factored."""


def layout() -> list[Piece]:
    pieces, start = [], 0
    for number, shape in enumerate(SHAPES):
        pieces.append(Piece(str(number), torch.Size(shape), start, math.prod(shape), "all"))
        start += pieces[-1].size
    return pieces


def losses_of(theta: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """A steep valley with noise, for each row: losses and gradients."""
    steep = torch.logspace(-2, 1, theta.shape[-1], dtype=theta.dtype)
    return (steep * theta**2).sum(-1) / 2, steep * (theta + 0.03 * noise)


def first_weights(size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(SEEDS, size, generator=torch.Generator().manual_seed(1), dtype=dtype)


def noises(size: int, dtype: torch.dtype = torch.float64) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        yield torch.randn(SEEDS, size, generator=generator, dtype=dtype)


def trained(build: Callable[[Tensor, Tensor, Tensor], Rule], theta: Tensor) -> Rule:
    """A rule after all steps; it is given weights, gradients and losses."""
    gradients, losses = torch.zeros_like(theta), theta.new_zeros(SEEDS)
    rule = build(theta, gradients, losses)
    for noise in noises(theta.shape[-1], theta.dtype):
        values, slopes = losses_of(theta, noise)
        losses.copy_(values)
        gradients.copy_(slopes)
        rule.step()
    return rule


def test_prodigy_plus_is_the_package() -> None:
    if (why := missing("prodigyplus")) is not None:
        pytest.skip(why)
    kind = import_module("prodigyplus.prodigy_plus_schedulefree").ProdigyPlusScheduleFree
    pieces = layout()
    size = sum(piece.size for piece in pieces)
    first = first_weights(size, torch.float32)
    first[:, 300:] = first[:, 300:].bfloat16()  # where it begins is stored so: else d begins to grow much later
    first[:, -12:] = 0  # a parameter whose beginning is not stored
    theta = first.clone()
    rule = trained(lambda *tensors: ProdigyPlus(*tensors[:2], pieces, 0.01), theta)
    assert isinstance(rule, ProdigyPlus)
    for u in range(SEEDS):
        parameters = [nn.Parameter(piece.of(first[u]).clone()) for piece in pieces]
        optimizer = kind(parameters, weight_decay=0.01)
        for noise in noises(size, torch.float32):
            flat = torch.cat([p.detach().flatten() for p in parameters])
            _, slopes = losses_of(flat, noise[u])
            for p, piece in zip(parameters, pieces, strict=True):
                p.grad = piece.of(slopes)
            optimizer.step()
        group = optimizer.param_groups[0]
        assert 0.1 < group["d"] < 1  # from 1e-6: it has grown, and has ceased to grow as fast as it may
        assert rule.d[u].item() == pytest.approx(group["d"], rel=1e-4)
        assert rule.numerator[u].item() == pytest.approx(group["d_numerator"], rel=1e-3)
        assert rule.path[u].float().abs().sum().item() == pytest.approx(group["d_denom"], rel=5e-3)  # rounded sums
        flat = torch.cat([p.detach().flatten() for p in parameters])
        torch.testing.assert_close(theta[u], flat, rtol=1e-3, atol=1e-4)
        optimizer.eval()
        flat = torch.cat([p.detach().flatten() for p in parameters])
        torch.testing.assert_close(rule.weights()[u], flat, rtol=1e-3, atol=1e-4)


def test_schedule_free_plus_is_its_equations() -> None:
    theta = first_weights(30)
    first = theta.clone()
    rule = trained(lambda *tensors: ScheduleFreePlus(*tensors, STEPS, WARM_UP), theta)
    for u in range(SEEDS):
        x = y = z = first[u]
        m = v = torch.zeros_like(x)
        longest = W = 0.0
        for t, noise in enumerate(noises(30), 1):
            b = 1 - math.exp(math.log(0.1) + (t - 1) / STEPS * math.log(0.035 / 0.1))
            f, g = losses_of(y, noise[u])
            a = max(0.0, float(f + b * g @ (z - x))) / float(math.sqrt(math.pi / 2) * g.abs().sum())
            a *= min(1.0, t / WARM_UP)
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
            z = z - a * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
            longest, c = max(longest, a, 1e-8), 1.0
            if t > WARM_UP:
                W += longest**2
                c = longest**2 / W
            x = (1 - c) * x + c * z
            y = b * x + (1 - b) * z
        torch.testing.assert_close(rule.weights()[u], x)
        torch.testing.assert_close(theta[u], y)


def test_schedule_free_steps_any_optimizer() -> None:
    theta = first_weights(30)
    first = theta.clone()
    rule = trained(lambda *tensors: ScheduleFree(*tensors[:2], AdamW, 0.1, WARM_UP), theta)
    for u in range(SEEDS):
        z, W = nn.Parameter(first[u].clone()), 0.0
        x = y = first[u]
        base = torch.optim.AdamW([z], weight_decay=0.01)
        for t, noise in enumerate(noises(30), 1):
            rate = base.param_groups[0]["lr"] = 0.1 * min(1.0, t / WARM_UP)
            _, z.grad = losses_of(y, noise[u])
            base.step()
            W += rate**2
            x = x + rate**2 / W * (z.detach() - x)
            y = 0.9 * x + 0.1 * z.detach()
        torch.testing.assert_close(rule.weights()[u], x)
        torch.testing.assert_close(theta[u], y)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_captured_steps_are_the_same() -> None:
    task, device, names = small("text"), torch.device("cuda"), ["prodigyplus", "schedulefree-own", "schedulefreeplus"]
    supply = Supply(task, (0, 1), 20, device)
    found = []
    for graph in (True, False):
        here = Bench(task, "adamw", 1e-2, 20, (0, 1), supply, device, graph, evaluations=2)
        found.append(run_together(here, [], onecycle(20), names).others)
    for name in names:
        for captured, eager in zip(found[0][name][0], found[1][name][0], strict=True):
            assert captured == pytest.approx(eager, rel=1e-6)
