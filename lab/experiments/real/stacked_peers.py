"""Peers that are written here, all seeds of a column at once.

Nothing waits for the device, so that a step can be captured as a CUDA graph: then a step of all runs takes as long as
its arithmetic, and not some thousand launches. A rule steps the weights in place, and its state is tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from stacked import Optimizer, Piece
from torch import Tensor


class Rule(Protocol):
    """A method for some runs: weights and gradients [seed, parameter]."""

    @property
    def state(self) -> list[Tensor]:
        """All that a step writes beside the weights."""
        ...

    def step(self) -> None:
        """One step, the gradients being there."""
        ...

    def weights(self) -> Tensor:
        """What is evaluated."""
        ...


class ProdigyPlus:
    """Prodigy with Schedule-Free as the package prodigy-plus-schedule-free 2.0.1 has it, with its defaults.

    The step of a run is d times Adam's without a first moment, d being Prodigy's estimate from every eleventh weight of
    each parameter; second moments of large matrices are factored as Adafactor's, and a parameter's step is damped where
    its root mean square is above 1 (StableAdamW). The package loops over parameters and seeds and asks the device for
    two numbers per run and step: about thirty launches for each parameter of each run.

    Args:
        theta: the runs' weights y [seed, parameter], stepped in place.
        gradients: of the last step, at y.
        layout: where each parameter lies in a row.
        decay: weight decay, at y.
    """

    BETA, SECOND, FIRST_D, SMALLEST = 0.9, 0.99, 1e-6, 1e-8
    THIRD = SECOND**0.5
    EVERY, LARGE = 11, 32
    """Of so many weights one counts for d; a matrix with an axis of this length is factored."""
    GROWTH = 2**0.25
    """The most by which d grows in a step."""

    def __init__(self, theta: Tensor, gradients: Tensor, layout: Sequence[Piece], decay: float) -> None:
        self._y, self._gradients, self._decay = theta, gradients, decay
        self._sizes = [piece.size for piece in layout]
        numbers = torch.arange(len(layout), dtype=torch.int32)
        self._numbers = torch.repeat_interleave(numbers, torch.tensor(self._sizes)).to(theta.device)
        """The parameter that each weight is of."""
        ranges = [(piece.start, piece.start + piece.size, self.EVERY) for piece in layout]
        sampled = [torch.arange(*one, dtype=torch.int32) for one in ranges]
        self._sample, self._counts = torch.cat(sampled).to(theta.device), [len(part) for part in sampled]
        self._roots = torch.tensor(self._sizes).to(theta).sqrt()
        self.z = theta.clone()
        low = torch.bfloat16 if theta.dtype == torch.float32 else theta.dtype
        self._origin = theta.index_select(1, self._sample).to(low)
        self.path = torch.zeros_like(self._origin)
        """The sum of gradients, each times d squared, with a slow decay."""
        self.second = torch.zeros_like(theta)
        self._factored = [_Factors(piece, theta) for piece in layout if self._is_factored(piece)]
        start = torch.zeros(len(theta), 1, dtype=torch.float64, device=theta.device)
        self.d, self.numerator, self.weight = start + self.FIRST_D, start, start.clone()

    def _is_factored(self, piece: Piece) -> bool:
        return len(piece.shape) >= 2 and max(piece.shape) >= self.LARGE

    @property
    def state(self) -> list[Tensor]:
        rows = [tensor for one in self._factored for tensor in (one.rows, one.columns)]
        return [self.z, self.path, self.second, self.d, self.numerator, self.weight, *rows]

    @torch.no_grad()
    def step(self) -> None:
        y, z, gradient, d = self._y, self.z, self._gradients, self.d.to(self._y.dtype)
        update = self._direction(gradient * d, d)
        numerator, denominator = self._estimate(gradient)
        if self._decay:
            update.add_(y, alpha=self._decay)
        squared = self.d**2
        self.weight += squared
        share = (squared / self.weight).to(y.dtype)
        y.lerp_(z, share)
        z.sub_(update * d)
        y.sub_(update.mul_(d * (1 - self.BETA * (1 - share))))
        self._adapt(numerator, denominator)

    def weights(self) -> Tensor:
        return torch.lerp(self._y, self.z, 1 - 1 / self.BETA)

    def _direction(self, scaled: Tensor, d: Tensor) -> Tensor:
        """The step at d = 1, given the gradient times d."""
        square = scaled.square()
        self.second.lerp_(square, 1 - self.SECOND)
        denominator = self.second.sqrt()
        for factors in self._factored:
            factors.piece.of(denominator).copy_(factors.root(square, 1 - self.SECOND))
        update = scaled.div_(denominator.add_(d * self.SMALLEST))
        sizes = self._by_parameter(update, self._sizes, 2) / self._roots
        return update.mul_(sizes.clamp(min=1).rsqrt().index_select(1, self._numbers))

    def _estimate(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """How far the gradients say that the optimum is from the beginning, and the length of their sum."""
        scale = (self.d**2 / self.FIRST_D**0.5).to(gradient.dtype)
        sampled = gradient.index_select(1, self._sample)
        away = self._origin - self.z.index_select(1, self._sample)
        self.path.mul_(self.THIRD).add_(sampled * scale)
        lengths = self._by_parameter(self.path.to(gradient.dtype), self._counts, 1).to(self.path.dtype)
        return (sampled * away).sum(-1, keepdim=True) * scale, lengths.to(gradient.dtype).sum(-1, keepdim=True)

    def _adapt(self, numerator: Tensor, denominator: Tensor) -> None:
        """d is what the estimate says, if that is more; it begins to count once it is positive."""
        counts = (self.d > self.FIRST_D) | (numerator > 0)
        self.numerator.mul_(self.THIRD).add_(torch.where(counts, numerator, torch.zeros_like(numerator)))
        hat = torch.minimum(self.d * self.GROWTH, self.numerator / denominator)
        self.d.copy_(torch.where(denominator > 0, torch.maximum(self.d, hat), self.d))

    @staticmethod
    def _by_parameter(rows: Tensor, sizes: list[int], order: int) -> Tensor:
        """The norm of each parameter: [seed, parameter]."""
        parts = [part for row in rows for part in row.split(sizes)]
        return torch.stack(torch._foreach_norm(parts, order)).view(len(rows), len(sizes))


class _Factors:
    """The second moment of a matrix by its two longest axes."""

    def __init__(self, piece: Piece, theta: Tensor) -> None:
        self.piece = piece
        axes = sorted(range(len(piece.shape)), key=lambda axis: (piece.shape[axis], axis))
        self._long, self._short = axes[-1] + 1, axes[-2] + 1  # 0 is the seed
        # As in the package: the mean is over the axis to the left if the longer axis comes first. Of a matrix that one
        # has the length 1 in `rows`, so that they do not count.
        self._mean = self._short - 1 if self._short > self._long else self._short
        shape = [len(theta), *piece.shape]
        self.rows = theta.new_zeros([1 if axis == self._long else size for axis, size in enumerate(shape)])
        self.columns = theta.new_zeros([1 if axis == self._short else size for axis, size in enumerate(shape)])

    def root(self, square: Tensor, new: float) -> Tensor:
        """Of the second moment, the newest square of the gradient counting for ``new``."""
        own = self.piece.of(square)
        self.rows.lerp_(own.mean(self._long, keepdim=True), new)
        self.columns.lerp_(own.mean(self._short, keepdim=True), new)
        return (self.rows / (self.rows.mean(self._mean, keepdim=True) + 1e-30) * self.columns).sqrt_()


class ScheduleFreePlus:
    r"""ScheduleFree+ (Defazio 2026, arXiv 2605.19095): steps of Adam, as long as Polyak's rule says, and their average.

    .. math::
        \alpha_t = \gamma_t \max(0, f_t + \beta_t \langle g_t, z_t - x_t \rangle) / (\sqrt{\pi / 2} \lVert g_t \rVert_1)

        z_{t+1} = z_t - \alpha_t \hat m_t / (\sqrt{\hat v_t} + \epsilon), \quad
        x_{t+1} = (1 - c_t) x_t + c_t z_{t+1}, \quad y_{t+1} = \beta_t x_{t+1} + (1 - \beta_t) z_{t+1}

    Gradients and losses are those at y. :math:`\gamma_t` rises linearly to 1 over the warm-up, in which :math:`c_t` is
    1; then z is weighted by the square of the largest :math:`\alpha` so far. :math:`1 - \beta_t` falls geometrically
    from 0.1 to 0.035 over the run. All numbers are the defaults of the author's reference; so is a weight decay of 0.

    Args:
        theta: the runs' weights y [seed, parameter], stepped in place.
        gradients: of the last step.
        losses: of the last step, [seed].
        steps: of the run.
        warm_up: so many of them.
    """

    FIRST, SECOND, SMALLEST = 0.9, 0.95, 1e-8
    BETA, LAST_BETA = 0.9, 0.965

    def __init__(self, theta: Tensor, gradients: Tensor, losses: Tensor, steps: int, warm_up: int) -> None:
        self._y, self._gradients, self._losses = theta, gradients, losses
        self._steps, self._warm_up = steps, warm_up
        self.x, self.z = theta.clone(), theta.clone()
        self.first, self.second = torch.zeros_like(theta), torch.zeros_like(theta)
        self.count, self.longest, self.weight = theta.new_zeros(3, len(theta), 1)

    @property
    def state(self) -> list[Tensor]:
        return [self.x, self.z, self.first, self.second, self.count, self.longest, self.weight]

    @torch.no_grad()
    def step(self) -> None:
        gradient, x, z = self._gradients, self.x, self.z
        beta = 1 - (1 - self.BETA) * ((1 - self.LAST_BETA) / (1 - self.BETA)) ** (self.count / self._steps)
        self.count += 1
        above = self._losses[:, None] + beta * (gradient * (z - x)).sum(-1, keepdim=True)
        length = above.clamp(min=0) / (math.sqrt(math.pi / 2) * gradient.abs().sum(-1, keepdim=True))
        length *= (self.count / max(1, self._warm_up)).clamp(max=1)
        self.first.lerp_(gradient, 1 - self.FIRST)
        self.second.lerp_(gradient.square(), 1 - self.SECOND)
        root = (self.second / (1 - self.SECOND**self.count)).sqrt_().add_(self.SMALLEST)
        z.sub_((self.first / (1 - self.FIRST**self.count)).div_(root).mul_(length))
        x.lerp_(z, self._share(length))
        self._y.copy_(torch.lerp(z, x, beta))

    def weights(self) -> Tensor:
        return self.x

    def _share(self, length: Tensor) -> Tensor:
        """Of the newest z in the average."""
        self.longest.copy_(torch.maximum(self.longest, length.clamp(min=self.SMALLEST)))
        averages = self.count > self._warm_up
        self.weight.add_(self.longest**2 * averages)
        return torch.where(averages, self.longest**2 / self.weight, torch.ones_like(self.weight))


class ScheduleFree:
    """Schedule-Free around any optimizer: that one steps z, and x is the average of z.

    As the package's ``ScheduleFreeWrapper``, which fails around optimizers that expect only their own state, such as
    torch's Adam.

    Args:
        theta: the runs' weights y [seed, parameter], stepped in place.
        gradients: of the last step, at y.
        build: the optimizer for weights [seed, 1, parameter].
        rate: its rate, after a linear warm-up.
        warm_up: steps of it.
    """

    BETA = 0.9

    def __init__(
        self, theta: Tensor, gradients: Tensor, build: Callable[[Tensor], Optimizer], rate: float, warm_up: int
    ) -> None:
        self._y, self._gradients, self._rate, self._warm_up = theta, gradients, rate, warm_up
        self.x, self.z = theta.clone(), theta[:, None].clone()
        self._base = build(self.z)
        self.count, self.weight = theta.new_zeros(2, len(theta), 1)

    @property
    def state(self) -> list[Tensor]:
        return [self.x, self.z, self.count, self.weight, *self._base.state]

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        rate = self._rate * (self.count / max(1, self._warm_up)).clamp(max=1)
        self._base.step_(self.z, self._gradients[:, None], rate[:, None].expand_as(self.z))
        self.weight += rate**2
        self.x.lerp_(self.z[:, 0], rate**2 / self.weight)
        self._y.copy_(torch.lerp(self.z[:, 0], self.x, self.BETA))

    def weights(self) -> Tensor:
        return self.x
