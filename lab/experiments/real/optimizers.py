"""The optimizers of the workloads, each for all runs of a stack at once.

As those of ``stacked.py``: state tensors begin at zero and have (seed, configuration) in front, every run counts its
own steps, so one may begin anew; nothing waits for the device, so a step can be captured. Each is torch's with its
defaults where torch has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from stacked import Adam, Momentum, Optimizer, Piece, Stack
from torch import Tensor

CUSTOMARY = {
    "adamw": 1e-3,
    "adam": 1e-3,
    "nadam": 2e-3,
    "rmsprop": 1e-3,
    "nesterov": 0.1,
    "momentum": 0.1,
    "sgd": 0.1,
    "lion": 1e-4,
    "muon": 0.02,
    "adagrad": 1e-2,
    "adafactor": 1e-2,
}
"""The peak rate that one writes without a search."""
DECAY = {**dict.fromkeys(CUSTOMARY, 0.0), "adamw": 0.01, "nesterov": 5e-4, "lion": 0.1, "muon": 0.1}
"""Weight decay. Lion's authors advise three to ten times AdamW's, as its rates are as much lower."""
SGD = ("nesterov", "momentum", "sgd")
"""The optimizers whose steps are as long as the gradients."""
ADAM_SHARE = 0.15
"""Muon's rate times this is Adam's: 0.003 where Muon has 0.02."""


class AdamW(Adam):
    """torch's AdamW."""

    def __init__(self, theta: Tensor, decay: float = DECAY["adamw"]) -> None:
        super().__init__(theta)
        self.decay = decay

    def step_(self, theta: Tensor, gradient: Tensor, rate: Tensor) -> None:
        theta.mul_(1 - rate * self.decay)
        super().step_(theta, gradient, rate)


class Nesterov(Momentum):
    """torch's SGD with Nesterov's momentum 0.9; its weight decay is a part of the gradient."""

    def __init__(self, theta: Tensor, decay: float = DECAY["nesterov"]) -> None:
        super().__init__(theta)
        self.decay = decay

    def direction(self, gradient: Tensor) -> Tensor:
        return torch.add(gradient, super().direction(gradient), alpha=self.momentum)

    def step_(self, theta: Tensor, gradient: Tensor, rate: Tensor) -> None:
        super().step_(theta, gradient.add(theta, alpha=self.decay), rate)


class Lion:
    """Chen et al. 2023: the sign of a mean (0.9) of the gradient and the momentum (0.99)."""

    def __init__(self, theta: Tensor, decay: float = DECAY["lion"]) -> None:
        self.momentum, self.decay = torch.zeros_like(theta), decay

    @property
    def state(self) -> list[Tensor]:
        return [self.momentum]

    def direction(self, gradient: Tensor) -> Tensor:
        mixed = torch.lerp(self.momentum, gradient, 0.1)
        self.momentum.lerp_(gradient, 0.01)
        return mixed.sign_()

    def step_(self, theta: Tensor, gradient: Tensor, rate: Tensor) -> None:
        theta.mul_(1 - rate * self.decay)
        theta.sub_(self.direction(gradient).mul_(rate))


class NAdam(Adam):
    """torch's NAdam: Adam with Nesterov's momentum, which grows from 0.45 to 0.9 in the course of the run."""

    def __init__(self, theta: Tensor) -> None:
        super().__init__(theta)
        self.used = torch.zeros_like(self.count)
        """1 minus the product of all momenta so far."""

    @property
    def state(self) -> list[Tensor]:
        return [*super().state, self.used]

    def direction(self, gradient: Tensor) -> Tensor:
        self.count += 1
        now, ahead = self._momentum(self.count), self._momentum(self.count + 1)
        left = (1 - self.used) * now
        self.used.copy_(1 - left)
        self.first.lerp_(gradient, 0.1)
        self.second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        denominator = (self.second / (1 - 0.999**self.count)).sqrt_().add_(1e-8)
        mixed = gradient * ((1 - now) / self.used) + self.first * (ahead / (1 - left * ahead))
        return mixed.div_(denominator)

    @staticmethod
    def _momentum(step: Tensor) -> Tensor:
        return 0.9 * (1 - 0.5 * 0.96 ** (0.004 * step))


class RMSprop:
    """torch's RMSprop."""

    def __init__(self, theta: Tensor) -> None:
        self.square = torch.zeros_like(theta)

    @property
    def state(self) -> list[Tensor]:
        return [self.square]

    def direction(self, gradient: Tensor) -> Tensor:
        self.square.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        return gradient / self.square.sqrt().add_(1e-8)

    def step_(self, theta: Tensor, gradient: Tensor, rate: Tensor) -> None:
        theta.sub_(self.direction(gradient).mul_(rate))


class Adagrad:
    """torch's Adagrad."""

    def __init__(self, theta: Tensor) -> None:
        self.sum = torch.zeros_like(theta)

    @property
    def state(self) -> list[Tensor]:
        return [self.sum]

    def direction(self, gradient: Tensor) -> Tensor:
        self.sum.addcmul_(gradient, gradient)
        return gradient / self.sum.sqrt().add_(1e-10)

    def step_(self, theta: Tensor, gradient: Tensor, rate: Tensor) -> None:
        theta.sub_(self.direction(gradient).mul_(rate))


class Adafactor:
    """torch's Adafactor: second moments of a matrix by its rows and columns, steps relative to the weights' size.

    The step of a parameter is min(rate, 1/sqrt(t)) times the root mean square of its weights times the direction.

    Args:
        theta: the runs' weights.
        layout: where each parameter lies in a row of it.
    """

    SMALLEST = 1e-3
    """Weights are taken to be at least so large."""

    def __init__(self, theta: Tensor, layout: Sequence[Piece]) -> None:
        self.layout = list(layout)
        sizes = [_factors(piece.shape) for piece in layout]
        runs = theta.shape[:2]
        self.count = torch.zeros(*runs, 1, device=theta.device, dtype=theta.dtype)
        self.factors = torch.zeros(*runs, sum(map(sum, sizes)), device=theta.device, dtype=theta.dtype)
        parts = torch.split(self.factors, [size for pair in sizes for size in pair], -1)
        self._views = list(zip(parts[::2], parts[1::2], strict=True))

    @property
    def state(self) -> list[Tensor]:
        return [self.count, self.factors]

    def direction(self, gradient: Tensor) -> Tensor:
        self.count += 1
        new = self.count**-0.8
        out = torch.empty_like(gradient)
        for piece, (rows, columns) in zip(self.layout, self._views, strict=True):
            own = piece.of(gradient)
            update = self._variance(own, rows, columns, new).clamp_(min=torch.finfo(own.dtype).eps ** 2).rsqrt_()
            update = update.mul_(own).flatten(2)
            size = update.norm(dim=-1, keepdim=True) / math.sqrt(piece.size)
            out[..., piece.start : piece.start + piece.size] = update / size.clamp(min=1)
        return out

    def step_(self, theta: Tensor, gradient: Tensor, rate: Tensor) -> None:
        step = self.direction(gradient)
        relative = torch.minimum(rate, self.count**-0.5)
        for piece in self.layout:
            place = slice(piece.start, piece.start + piece.size)
            own = theta[..., place]
            size = (own.norm(dim=-1, keepdim=True) / math.sqrt(piece.size)).clamp(min=self.SMALLEST)
            own.sub_(step[..., place] * (relative[..., place] * size))

    def _variance(self, gradient: Tensor, rows: Tensor, columns: Tensor, new: Tensor) -> Tensor:
        """The estimate of the squared gradient, as a tensor of its own."""
        square = gradient.square()
        if gradient.ndim < 4:  # a vector
            rows.lerp_(square.flatten(2), new)
            return rows.view(gradient.shape).clone()
        rows.lerp_(square.mean(-1).flatten(2), new)
        columns.lerp_(square.mean(-2).flatten(2), new)
        row = rows.view(gradient.shape[:-1])
        column = columns.view(*gradient.shape[:-2], gradient.shape[-1])
        mean = row.mean(-1)[..., None, None].clamp(min=torch.finfo(gradient.dtype).eps)
        return row[..., :, None] * column[..., None, :] / mean


def _factors(shape: torch.Size) -> tuple[int, int]:
    """How many numbers stand for the rows and for the columns of a parameter; a vector has all of its own."""
    if len(shape) < 2:
        return shape.numel(), 0
    return shape[:-1].numel(), shape[:-2].numel() * shape[-1]


class Muon:
    """torch's Muon for hidden matrices, AdamW for the rest at a fixed part of its rate.

    Newton-Schulz runs on all runs and all matrices of one shape together; in bfloat16 as torch's, but for a CPU, where
    that takes far longer.

    Args:
        theta: the runs' weights.
        layout: where each parameter lies in a row of it.
        hidden: whether a parameter is a hidden matrix.
    """

    MOMENTUM, SMALLEST, ITERATIONS = 0.95, 1e-7, 5
    QUINTIC = (3.4445, -4.7750, 2.0315)

    def __init__(self, theta: Tensor, layout: Sequence[Piece], hidden: Callable[[Piece], bool] | None = None) -> None:
        chosen = [piece for piece in layout if (hidden or is_hidden)(piece)]
        self.shapes = [list(same) for _, same in groupby(sorted(chosen, key=_shape), key=_shape)]
        self.precision = torch.float32 if theta.device.type == "cpu" else torch.bfloat16
        self._adam = AdamW(theta)
        """Of every column; its first moment is Muon's momentum where Muon steps."""
        self._is_hidden = torch.zeros(theta.shape[-1], dtype=torch.bool, device=theta.device)
        self._scale = torch.full_like(theta[0, 0], ADAM_SHARE)
        """Of the rate, by column."""
        for piece in chosen:
            place = slice(piece.start, piece.start + piece.size)
            self._is_hidden[place] = True
            self._scale[place] = math.sqrt(max(1.0, piece.shape[0] / piece.shape[1]))
        self._decay = torch.where(self._is_hidden, DECAY["muon"], ADAM_SHARE * DECAY["adamw"]).to(theta)

    @property
    def state(self) -> list[Tensor]:
        return self._adam.state

    def direction(self, gradient: Tensor) -> Tensor:
        momentum = self._adam.first.clone()
        out = self._adam.direction(gradient)
        momentum.lerp_(gradient, 1 - self.MOMENTUM)
        self._adam.first.copy_(torch.where(self._is_hidden, momentum, self._adam.first))
        ahead = torch.lerp(gradient, momentum, self.MOMENTUM)
        for same in self.shapes:
            matrices = torch.stack([piece.of(ahead) for piece in same], 2)
            even = self._orthogonal(matrices.flatten(0, 2)).view(matrices.shape)
            for number, piece in enumerate(same):
                piece.of(out).copy_(even[:, :, number])
        return out.mul_(self._scale)

    def step_(self, theta: Tensor, gradient: Tensor, rate: Tensor) -> None:
        direction = self.direction(gradient)
        theta.mul_(1 - rate * self._decay)
        theta.sub_(direction.mul_(rate))

    def _orthogonal(self, matrices: Tensor) -> Tensor:
        """Near the orthogonal matrix nearest to each, by a quintic iteration."""
        a, b, c = self.QUINTIC
        x = matrices.to(self.precision)
        tall = x.shape[-2] > x.shape[-1]
        x = x.mT if tall else x
        x = x / x.flatten(1).norm(dim=-1).clamp(min=self.SMALLEST)[:, None, None]
        for _ in range(self.ITERATIONS):
            gram = torch.bmm(x, x.mT)
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.mT if tall else x


def is_hidden(piece: Piece) -> bool:
    """Whether Muon steps on it: matrices that are neither tables nor heads, as the task's groups tell."""
    return len(piece.shape) == 2 and piece.group in ("hidden", "transformer")


def _shape(piece: Piece) -> tuple[int, ...]:
    return tuple(piece.shape)


BUILDERS: dict[str, Callable[[Tensor, Sequence[Piece]], Optimizer]] = {
    "adamw": lambda theta, layout: AdamW(theta),
    "adam": lambda theta, layout: Adam(theta),
    "nadam": lambda theta, layout: NAdam(theta),
    "rmsprop": lambda theta, layout: RMSprop(theta),
    "nesterov": lambda theta, layout: Nesterov(theta),
    "momentum": lambda theta, layout: Momentum(theta),
    "sgd": lambda theta, layout: Momentum(theta, 0.0),
    "lion": lambda theta, layout: Lion(theta),
    "adagrad": lambda theta, layout: Adagrad(theta),
    "adafactor": Adafactor,
    "muon": Muon,
}


def update_of(name: str, stack: Stack, theta: Tensor | None = None) -> Optimizer:
    """A new optimizer of that name for all runs of a stack, or for those in ``theta``."""
    return BUILDERS[name](stack.theta if theta is None else theta, stack.layout)
