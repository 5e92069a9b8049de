"""lab/experiments/real/optimizers.py: each run of a stack steps as torch's own optimizer would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from real.optimizers import BUILDERS, DECAY, is_hidden, update_of
from stacked import Optimizer, Stack, Supply, TrainStep
from torch import Tensor, nn

from lab.tests.experiments.small_tasks import CPU, small

STEPS, RATES = 20, (1e-3, 1e-2, 0.3)
TOLERANCE = {"muon": 1e-2, "nadam": 1e-6}
"""Newton-Schulz is in bfloat16, and sums have another order; torch's NAdam has a product of momenta in float32."""


class PlainLion(torch.optim.Optimizer):
    """As in the paper's listing."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            m = self.state[p].setdefault("m", torch.zeros_like(p))
            c = 0.9 * m + 0.1 * p.grad
            p -= self.param_groups[0]["lr"] * (c.sign() + DECAY["lion"] * p)
            self.state[p]["m"] = 0.99 * m + 0.01 * p.grad


class Both:
    """Muon for some parameters, AdamW for the rest."""

    def __init__(self, matrices: list[nn.Parameter], rest: list[nn.Parameter]) -> None:
        self.optimizers = [torch.optim.Muon(matrices, lr=1.0), torch.optim.AdamW(rest, lr=1.0)]

    def set(self, rate: float) -> None:
        for optimizer, share in zip(self.optimizers, (1.0, 0.15), strict=True):
            optimizer.param_groups[0]["lr"] = rate * share

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


PLAIN: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "adamw": lambda p: torch.optim.AdamW(p, weight_decay=DECAY["adamw"]),
    "nesterov": lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True, weight_decay=DECAY["nesterov"]),
    "lion": PlainLion,
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
    "adam": torch.optim.Adam,
    "nadam": torch.optim.NAdam,
    "rmsprop": torch.optim.RMSprop,
    "momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
    "sgd": torch.optim.SGD,
}


def gradients(stack: Stack, generator: torch.Generator) -> Tensor:
    """As real ones: of very different sizes over the parameters, some of them zero."""
    sizes = 10 ** torch.empty(stack.theta.shape[-1], dtype=torch.float64).uniform_(-6, 1, generator=generator)
    noise = torch.randn(stack.theta.shape, generator=generator, dtype=torch.float64)
    return noise * sizes * (torch.rand(stack.theta.shape, generator=generator) > 0.1)


def plain_of(name: str, stack: Stack, parameters: list[nn.Parameter]) -> Any:
    if name != "muon":
        return PLAIN[name](parameters)
    pairs = list(zip(stack.layout, parameters, strict=True))
    return Both([p for piece, p in pairs if is_hidden(piece)], [p for piece, p in pairs if not is_hidden(piece)])


def set_rate(optimizer: Any, rate: float) -> None:
    if isinstance(optimizer, Both):
        optimizer.set(rate)
    else:
        optimizer.param_groups[0]["lr"] = rate


def step(stack: Stack, optimizer: Optimizer, gradient: Tensor, t: int) -> None:
    rate = torch.tensor(RATES, dtype=torch.float64)[None, :, None] / (1 + t)
    optimizer.step_(stack.theta, gradient, rate.expand_as(stack.theta))


@pytest.mark.parametrize("task", ["text", "digits"])
@pytest.mark.parametrize("name", BUILDERS)
def test_every_run_is_torch(name: str, task: str) -> None:
    if name == "muon" and (task == "digits" or not hasattr(torch.optim, "Muon")):
        pytest.skip("no hidden matrix, or a torch without Muon")
    stack = Stack(small(task), [0, 1], len(RATES), CPU)
    optimizer = update_of(name, stack)
    if name == "muon":
        optimizer.precision = torch.bfloat16  # type: ignore[attr-defined]
    assert all(not tensor.any() and tensor.shape[:2] == (2, len(RATES)) for tensor in optimizer.state)
    alone = {}
    for place in ((u, k) for u in range(2) for k in range(len(RATES))):
        parameters = [nn.Parameter(piece.of(stack.theta[place]).clone()) for piece in stack.layout]
        alone[place] = parameters, plain_of(name, stack, parameters)
    generator = torch.Generator().manual_seed(3)
    for t in range(STEPS):
        gradient = gradients(stack, generator)
        step(stack, optimizer, gradient, t)
        for place, (parameters, plain) in alone.items():
            for piece, p in zip(stack.layout, parameters, strict=True):
                p.grad = piece.of(gradient[place]).clone()
            set_rate(plain, RATES[place[1]] / (1 + t))
            plain.step()
    tolerance = TOLERANCE.get(name, 1e-9)
    for place, (parameters, _) in alone.items():
        flat = torch.cat([p.detach().flatten() for p in parameters])
        torch.testing.assert_close(stack.theta[place], flat, rtol=tolerance, atol=tolerance * RATES[place[1]])


@pytest.mark.parametrize("name", BUILDERS)
def test_a_run_may_begin_anew(name: str) -> None:
    """With its rows of the state zeroed it is as a new run, and its neighbours do not notice."""
    stack = Stack(small("text"), [0, 1], len(RATES), CPU)
    first, optimizer = stack.theta.clone(), update_of(name, stack)
    generator = torch.Generator().manual_seed(5)
    early, late = gradients(stack, generator), gradients(stack, generator)
    step(stack, optimizer, early, 0)
    for tensor in optimizer.state:
        tensor[1, 2] = 0
    stack.theta[1, 2] = first[1, 2]
    step(stack, optimizer, late, 0)
    after = stack.theta.clone()

    stack.theta.copy_(first)
    resets_path = update_of(name, stack)
    step(stack, resets_path, late, 0)
    torch.testing.assert_close(after[1, 2], stack.theta[1, 2], rtol=1e-9, atol=1e-12)

    stack.theta.copy_(first)
    never = update_of(name, stack)
    step(stack, never, early, 0)
    step(stack, never, late, 0)
    torch.testing.assert_close(after[0, 0], stack.theta[0, 0], rtol=1e-9, atol=1e-12)
    assert not torch.equal(after[1, 2], stack.theta[1, 2])


def test_gradients_are_clipped_run_by_run() -> None:
    """As torch's clip_grad_norm_ before the step; whoever looks at the gradients sees them clipped."""
    task = small("digits")
    task.clip = 0.5
    stack = Stack(task, [0, 1], 2, CPU)
    stack.theta[:, 1] *= 3
    rates = torch.full((3, 2, 2, len(stack.sizes)), 0.1, dtype=torch.float64)
    data = Supply(task, (0, 1), 3, CPU).batches
    seen: list[Tensor] = []
    step = TrainStep(
        stack,
        update_of("momentum", stack),
        data,
        rates,
        before=lambda gradient, rate: seen.append(gradient),
        graph=False,
    )
    model = task.model(1)
    with torch.no_grad():
        for p in model.parameters():
            p *= 3
    optimizer = torch.optim.SGD([p for group in task.groups(model) for p in group["params"]], 0.1, momentum=0.9)
    norms = []
    for t in range(3):
        step()
        optimizer.zero_grad()
        task.loss(model, task.batch(1, t)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    assert max(norms) > 0.5
    flat = torch.cat([p.detach().flatten() for group in task.groups(model) for p in group["params"]])
    torch.testing.assert_close(stack.theta[1, 1], flat)
    assert all(gradient.norm(dim=-1).max() < 0.5 + 1e-6 for gradient in seen)


def test_hidden_matrices() -> None:
    stack = Stack(small("text"), [0], 1, CPU)
    hidden = {piece.name for piece in stack.layout if is_hidden(piece)}
    assert hidden == {piece.name for piece in stack.layout if piece.name.startswith("blocks") and len(piece.shape) == 2}
