"""The set-ups people train in, each with ``hdet.auto`` from a guess that is 100 times too low.

Every one ends where the plain loop ends. Where a set-up changes nothing in exact arithmetic, its decisions are those of
the plain loop; where it changes no bit, its weights are too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import hdet
from tests.problems import Batch, Records, batch_of, final_loss, is_finite, loss_of, network, quiet, train
from tests.setup_runs import fixed_loss

STEPS = 200
GUESS = 1e-4
RATES = (1e-2, 3e-2, 1e-1)
"""One of them does well with Adam, whatever the model."""


class Found(NamedTuple):
    """What came of a run."""

    model: nn.Module
    decisions: list[tuple[int, str | None]]
    """Step and event of every round."""
    rates: list[float]
    """After every round."""


class Setup:
    """The plain loop; subclasses change the parts that differ."""

    def model(self) -> nn.Module:
        return network()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return Adam((p for p in model.parameters() if p.requires_grad), lr=GUESS)

    def wrapped(self, model: nn.Module) -> nn.Module:
        """What is called for training, made before the optimizer and the scheduler."""
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return loss_of(model, batch)

    def step(self, model: nn.Module, optimizer: Optimizer, t: int) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch_of(t))
        loss.backward()
        optimizer.step()
        return loss.detach()

    def run(self, steps: int = STEPS, told: bool = True) -> Found:
        """``told``: whether the scheduler is told the loss."""
        model, journal = self.model(), Records()
        wrapped = self.wrapped(model)
        optimizer = self.optimizer(model)
        scheduler = hdet.auto(optimizer, total_steps=steps, journal=journal)
        for t in range(steps):
            with self.around():
                loss = self.step(self.called(wrapped), optimizer, t)
                scheduler.step(*([loss] if told else []))
        rounds = journal.rounds
        return Found(model, [(r["step"], r["event"]) for r in rounds], [r["learned"][0] for r in rounds])

    def called(self, wrapped: nn.Module) -> nn.Module:
        """What is called for training, made when the scheduler is there."""
        return wrapped

    def around(self) -> AbstractContextManager[Any]:
        """What a turn of the loop is inside of."""
        return nullcontext()


# -- the same in exact arithmetic ----------------------------------------------------------------------------------


class Foreach(Setup):
    def optimizer(self, model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), lr=GUESS, foreach=True)


class Fused(Setup):
    def optimizer(self, model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), lr=GUESS, fused=True)


class TensorRate(Setup):
    def optimizer(self, model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), lr=torch.tensor(GUESS, dtype=torch.float64))


class Accumulated(Setup):
    """Two halves of a batch, one optimizer step."""

    def step(self, model: nn.Module, optimizer: Optimizer, t: int) -> Tensor:
        optimizer.zero_grad()
        x, y = batch_of(t)
        losses = [self.loss(model, (x[part], y[part])) / 2 for part in (slice(0, 32), slice(32, 64))]
        for loss in losses:
            loss.backward()
        optimizer.step()
        return torch.stack(losses).sum().detach()


class Scaled(Setup):
    """A GradScaler that never has to skip."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(self, model: nn.Module, optimizer: Optimizer, t: int) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch_of(t))
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(optimizer)
        self.scaler.step(optimizer)
        self.scaler.update()
        return loss.detach()


class Averaged(Setup):
    """An exponential average of the weights is kept beside."""

    def wrapped(self, model: nn.Module) -> nn.Module:
        self.ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        return model

    def step(self, model: nn.Module, optimizer: Optimizer, t: int) -> Tensor:
        loss = super().step(model, optimizer, t)
        self.ema.update_parameters(model)
        return loss


class TimmAveraged(Averaged):
    def wrapped(self, model: nn.Module) -> nn.Module:
        utils = pytest.importorskip("timm.utils")
        self.ema = utils.ModelEmaV3(model, decay=0.9)
        return model

    def step(self, model: nn.Module, optimizer: Optimizer, t: int) -> Tensor:
        loss = Setup.step(self, model, optimizer, t)
        self.ema.update(model, step=t)
        return loss


class Checkpointed(Setup):
    """Activations are computed again in the backward pass."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        out = checkpoint(model, batch[0], use_reentrant=False)
        return nn.functional.mse_loss(out, batch[1])


class Compiled(Setup):
    """By inductor, before the optimizer and the scheduler are built."""

    def wrapped(self, model: nn.Module) -> nn.Module:
        torch._dynamo.reset()
        return torch.compile(model)  # type: ignore[return-value]

    def around(self) -> AbstractContextManager[Any]:
        """In this process alone: a test must not leave others behind."""
        return torch._inductor.config.patch(compile_threads=1)  # type: ignore[no-any-return]


class CompiledLater(Compiled):
    """By inductor, when the scheduler holds the plain model already."""

    def wrapped(self, model: nn.Module) -> nn.Module:
        self.compiled = super().wrapped(model)
        return model

    def called(self, wrapped: nn.Module) -> nn.Module:
        return self.compiled


class Synchronised(Setup):
    """SyncBatchNorm of one process beside a plain one: see test_batchnorm for two."""

    def model(self) -> nn.Module:
        return nn.SyncBatchNorm.convert_sync_batchnorm(network(nn.BatchNorm1d(32)))


class Normalised(Setup):
    """What the one above is compared with."""

    def model(self) -> nn.Module:
        return network(nn.BatchNorm1d(32))


def deep() -> nn.Sequential:
    """Two layers more than the plain one."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return network(nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))


# -- others --------------------------------------------------------------------------------------------------------


class CastForward(Setup):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, batch)


class CastLoop(Setup):
    """Every turn of the loop, the scheduler's step too. One cast around all of them would do harm without hdet too:
    torch keeps the low-precision weights of the first step until it is left."""

    def around(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16)


class Skipping(Scaled):
    """A scale that is too high at first, and now and then again: those steps are not made."""

    def step(self, model: nn.Module, optimizer: Optimizer, t: int) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch_of(t))
        self.scaler.scale(loss if t >= 3 and t % 20 else loss * float("inf")).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
        return loss.detach()


class ClippedByNorm(Setup):
    def clip(self, model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)

    def step(self, model: nn.Module, optimizer: Optimizer, t: int) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch_of(t))
        loss.backward()
        self.clip(model)
        optimizer.step()
        return loss.detach()


class ClippedByValue(ClippedByNorm):
    def clip(self, model: nn.Module) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 0.02)


class Tied(Setup):
    """One matrix in two places."""

    def model(self) -> nn.Module:
        model = deep()
        model[2].weight = model[4].weight
        return model


class ChannelsLast(Setup):
    """A small convolution whose weights and inputs lie so."""

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = [nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 32, 3, padding=1), nn.Tanh(), nn.Flatten()]
            return nn.Sequential(*layers, nn.Linear(32, 1)).to(memory_format=torch.channels_last)


class LowRank(nn.Module):
    """A frozen linear layer, and a trained correction of rank 4 that begins at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.linspace(-1, 1, 4 * base.in_features).reshape(4, -1))
        self.up = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Lora(Setup):
    def model(self) -> nn.Module:
        model = network()
        return nn.Sequential(LowRank(model[0]), model[1], LowRank(model[2]))


class Frozen(Setup):
    def model(self) -> nn.Module:
        model = deep()
        model[0].requires_grad_(False)
        return model


EQUAL: dict[str, tuple[Callable[[], Setup], Callable[[], Setup], float]] = {
    "activation checkpointing": (Checkpointed, Setup, 0.0),
    "EMA, `AveragedModel`": (Averaged, Setup, 0.0),
    "EMA, timm's `ModelEmaV3`": (TimmAveraged, Setup, 0.0),
    "`GradScaler`": (Scaled, Setup, 0.0),
    "`foreach=True`": (Foreach, Setup, 1e-4),
    "`fused=True`": (Fused, Setup, 1e-4),
    "`lr` in a tensor": (TensorRate, Setup, 1e-4),
    "gradient accumulation": (Accumulated, Setup, 1e-4),
    "`torch.compile` before the scheduler is built": (Compiled, Setup, 1e-3),
    "`torch.compile` after the scheduler is built": (CompiledLater, Setup, 1e-3),
    "SyncBatchNorm": (Synchronised, Normalised, 0.0),
}
"""Set-ups that change nothing but rounding: what they must equal, and how far rates may be off, relatively."""

OTHER: dict[str, Callable[[], Setup]] = {
    "autocast around the forward pass": CastForward,
    "autocast around the loop": CastLoop,
    "`GradScaler` that skips steps": Skipping,
    "clipping by norm": ClippedByNorm,
    "clipping by value": ClippedByValue,
    "tied weights": Tied,
    "channels_last": ChannelsLast,
    "LoRA, frozen base": Lora,
    "frozen layers": Frozen,
}


def row(name: str, column: str) -> Any:
    return pytest.param(name, marks=pytest.mark.covers("setups", name, column))


def test_the_guess_itself_leads_nowhere() -> None:
    """So that the tests below say something."""
    model = network()
    optimizer = Setup().optimizer(model)
    train(model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, GUESS, total_steps=STEPS + 1), range(STEPS))
    assert final_loss(model) > 0.8 * final_loss(network())


@pytest.mark.slow
@pytest.mark.parametrize("name", [row(name, "from a guess 100 times too low") for name in (*EQUAL, *OTHER)])
def test_it_learns_from_a_guess_that_is_far_too_low(name: str) -> None:
    make = EQUAL[name][0] if name in EQUAL else OTHER[name]
    found, untrained = make().run(), make().model()
    assert is_finite(found.model)
    if name in EQUAL:
        assert final_loss(found.model) == pytest.approx(final_loss(_run_of(EQUAL[name][1], STEPS).model), rel=0.1)
    else:
        assert final_loss(found.model) < 2.5 * min(fixed_loss(Adam, rate, STEPS, _trainable(make)) for rate in RATES)
    for p, q in zip(found.model.parameters(), untrained.parameters(), strict=True):
        assert p.requires_grad or torch.equal(p, q), "what is frozen stays as it was"


WITHOUT = (
    "gradient accumulation",
    "`GradScaler` that skips steps",
    "autocast around the loop",
    "clipping by norm",
    "LoRA, frozen base",
    "frozen layers",
)


@pytest.mark.parametrize("name", [row(name, "without the loss") for name in WITHOUT])
def test_it_learns_without_being_told_the_loss(name: str) -> None:
    make = EQUAL[name][0] if name in EQUAL else OTHER[name]
    with quiet():
        found = make().run(told=False)
    assert final_loss(found.model) < 2.5 * min(fixed_loss(Adam, rate, STEPS, _trainable(make)) for rate in RATES)


@cache
def _run_of(twin: Callable[[], Setup], steps: int) -> Found:
    return twin().run(steps)


@cache
def _trainable(make: Callable[[], Setup]) -> Callable[[], nn.Module]:
    """Builds the model that is compared with, in torch's own loop."""
    return lambda: make().model()


@pytest.mark.parametrize("name", [row(name, "decides as the plain loop") for name in EQUAL])
def test_it_decides_as_the_plain_loop_does(name: str) -> None:
    make, twin, tolerance = EQUAL[name]
    found, plain = make().run(60), _run_of(twin, 60)
    assert found.decisions == plain.decisions
    assert found.rates == pytest.approx(plain.rates, rel=tolerance or 1e-15)
    if not tolerance:
        pairs = zip(found.model.parameters(), plain.model.parameters(), strict=True)
        assert all(torch.equal(p, q) for p, q in pairs)
