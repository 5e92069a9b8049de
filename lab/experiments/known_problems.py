"""Training problems whose best hyperparameter is known, for many runs and replicas at once.

Shapes: ``weights`` is [runs, replicas, ...], ``values`` is [runs, replicas], one value of the problem's knob for each
replica. A round is :data:`STEPS` steps. Every replica draws its own training data; the probe batch at the end of the
round is common to the replicas of a run and free of the regulariser.

How strong a slope one round shows, and against how much noise, was measured at fixed values; it is in LOG.md, with what
was changed after the first results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Generator, Tensor
from torch.nn.functional import logsigmoid

from hdet.ensemble.knob import KnobSpec, scale_named

STEPS = 32


LR = KnobSpec("lr", scale_named("relative"), 0.3, (0.0, 1.5))
WEIGHT_DECAY = KnobSpec("weight_decay", scale_named("log"), 0.3, (1e-3, 8.0))
LABEL_SMOOTHING = KnobSpec("label_smoothing", scale_named("linear"), 0.05, (0.0, 0.4))
DROPOUT = KnobSpec("dropout", scale_named("linear"), 0.05, (0.0, 0.6))
TEMPERATURE = KnobSpec("temperature", scale_named("log"), 0.3, (0.05, 100.0))


class Problem(Protocol):
    """One problem with one knob."""

    @property
    def knob(self) -> KnobSpec:
        """What is explored."""

    @property
    def algebra(self) -> float:
        """The best value by algebra; of a problem ``from_grid`` under assumptions that training meets only nearly."""

    @property
    def from_grid(self) -> bool:
        """Whether the best value is taken from a dense grid of fixed values instead."""

    def task(self, runs: int, generator: Generator) -> Tensor:
        """What stays fixed in each run (true weights, data set, teacher)."""

    def start(self, runs: int) -> Tensor:
        """Consensus before the first round, [runs, 1, ...]."""

    def round(self, task: Tensor, weights: Tensor, values: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """One round of every replica: (weights [runs, replicas, ...], probe losses [runs, replicas])."""


def normal(generator: Generator, *shape: int) -> Tensor:
    """Standard normal numbers; drawn in single precision, which is four times as fast, used in double."""
    return torch.randn(*shape, generator=generator).double()


def uniform(generator: Generator, *shape: int) -> Tensor:
    """Numbers from [0, 1)."""
    return torch.rand(*shape, generator=generator).double()


@dataclass(frozen=True)
class MovingTarget:
    r"""Learning rate of SGD that follows a target on a random walk, from noisy observations of it.

    With :math:`e = \theta - target`, one step is :math:`e \leftarrow (1-\eta) e + \eta s \epsilon - q \xi`, so the
    steady loss is :math:`(\eta^2 s^2 + q^2) / (\eta (2 - \eta))`, smallest at the Kalman gain, the positive root of
    :math:`s^2 \eta^2 + q^2 \eta - q^2 = 0`. The problem is stationary and a round lasts several time constants, so
    there is no short-horizon bias, and the last weights are the ones to probe: a round mean would aim at the past.
    """

    knob: KnobSpec = LR
    algebra: float = 0.1
    from_grid: bool = False
    size: int = 1024
    noise: float = 1.0
    probe: int = 32

    @property
    def walk(self) -> float:
        """q, such that the Kalman gain is :attr:`algebra`."""
        return self.algebra * self.noise / math.sqrt(1.0 - self.algebra)

    def task(self, runs: int, generator: Generator) -> Tensor:
        return torch.empty(runs, 0)

    def start(self, runs: int) -> Tensor:
        return torch.zeros(runs, 1, self.size, dtype=torch.double)

    def round(self, task: Tensor, weights: Tensor, values: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """All steps at once: the recursion is linear, so its end is a weighted sum of what was drawn."""
        runs, replicas = values.shape
        keep = 1.0 - values
        powers = keep.unsqueeze(-1) ** torch.arange(STEPS - 1, -1, -1, dtype=torch.double)
        walk = self.walk * normal(generator, runs, STEPS, self.size)  # one target for all replicas of a run
        own = self.noise * values * powers.square().sum(-1).sqrt()
        weights = (keep**STEPS).unsqueeze(-1) * weights - powers @ walk
        weights = weights + own.unsqueeze(-1) * normal(generator, runs, replicas, self.size)
        batch = self.noise / math.sqrt(self.probe) * normal(generator, runs, 1, self.size)
        return weights, (weights - batch).square().mean(-1)


@dataclass(frozen=True)
class Ridge:
    r"""Weight decay of linear regression with orthonormal features, of which every one matters a little.

    Each round every replica fits a new data set of its own by gradient descent, to convergence. The least-squares
    estimate of a weight is :math:`\theta^* + \sqrt{v} \epsilon`, the mean of :math:`\theta^{*2}` is
    :math:`\tau^2 = 1`, and decay w shrinks the estimate by 1 / (1 + w): expected loss
    :math:`(\tau^2 w^2 + v) / (1 + w)^2`, best at :math:`w = v / \tau^2`. The probe is the loss on fresh data.
    """

    knob: KnobSpec = WEIGHT_DECAY
    algebra: float = 0.5
    from_grid: bool = False
    size: int = 4096
    rate: float = 0.2
    probe: int = 64

    def task(self, runs: int, generator: Generator) -> Tensor:
        truth = normal(generator, runs, 1, self.size)
        return truth / truth.square().mean(-1, keepdim=True).sqrt()

    def start(self, runs: int) -> Tensor:
        return torch.zeros(runs, 1, self.size, dtype=torch.double)

    def round(self, task: Tensor, weights: Tensor, values: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """All steps at once: gradient descent on a quadratic approaches its end geometrically."""
        runs, replicas = values.shape
        decay = values.unsqueeze(-1)
        estimate = task + math.sqrt(self.algebra) * normal(generator, runs, replicas, self.size)
        end = estimate / (1.0 + decay)
        weights = end + (1.0 - self.rate * (1.0 + decay)) ** STEPS * (weights - end)
        batch = task + normal(generator, runs, 1, self.size) / math.sqrt(self.probe)
        return weights, (weights - batch).square().mean(-1)


@dataclass(frozen=True)
class NoisyLabels:
    r"""Label smoothing of a classifier that can memorise its noisy training labels.

    A table of logits, one row per input. A known share of the labels was replaced by uniform ones: given the label it
    sees, the true class has probability :math:`(1 - \rho) [label] + \rho / K`, and smoothing :math:`\epsilon` makes the
    table learn :math:`(1 - \epsilon) [label] + \epsilon / K`: the loss on clean labels is smallest at
    :math:`\epsilon = \rho`. The probe is the clean cross-entropy on a random half of the inputs, without smoothing, at
    the round mean.

    The logits of the K - 1 other classes start equal and get equal gradients, so a row is one number: its label's
    logit minus theirs.
    """

    knob: KnobSpec = LABEL_SMOOTHING
    algebra: float = 0.2
    from_grid: bool = False
    inputs: int = 160
    classes: int = 4
    rate: float = 3.0

    def task(self, runs: int, generator: Generator) -> Tensor:
        """1 where the label is right, 0 where it is wrong; exactly the expected number is. Inputs are alike."""
        wrong = round(self.algebra * (1 - 1 / self.classes) * self.inputs)
        return (torch.arange(self.inputs) >= wrong).double().expand(runs, self.inputs)

    def start(self, runs: int) -> Tensor:
        return torch.zeros(runs, 1, self.inputs, dtype=torch.double)

    def round(self, task: Tensor, weights: Tensor, values: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        runs, replicas = values.shape
        others = self.classes - 1
        goal = 1.0 - values.unsqueeze(-1) * others / self.classes
        rate = self.rate * (1.0 + 1.0 / others)  # the label's logit rises, and the others fall
        total = torch.zeros(runs, replicas, self.inputs, dtype=torch.double)
        for _ in range(STEPS):  # each step sees its own half of the inputs
            batch = uniform(generator, runs, replicas, self.inputs) < 0.5
            weights = weights - rate * batch * ((weights - math.log(others)).sigmoid() - goal)
            total += weights
        margin = total / STEPS - math.log(others)
        right, wrong = -logsigmoid(margin), -logsigmoid(-margin) + math.log(others)
        losses = task.unsqueeze(1) * right + (1.0 - task.unsqueeze(1)) * wrong
        probed = uniform(generator, runs, 1, self.inputs).argsort(-1) < self.inputs // 2
        return weights, (losses * probed).sum(-1) / (self.inputs // 2)


@dataclass(frozen=True)
class InputDropout:
    r"""Dropout on the inputs of a linear regression with many outputs, little data and much noise.

    In expectation dropout p on uncorrelated inputs is ridge regression with decay p / (1 - p), so p is best near
    :math:`v / (v + \tau^2)` with v the variance of a least-squares weight. Minibatches, masks and correlations of a
    finite data set shift that a little: the best value comes from the grid. Data set and truth are fixed in a run; each
    step has its own minibatch and masks. The probe is the noiseless loss on a fresh batch, at the round mean, without
    dropout.
    """

    knob: KnobSpec = DROPOUT
    algebra: float = 0.3
    from_grid: bool = True
    inputs: int = 12
    outputs: int = 64
    samples: int = 48
    batch: int = 24
    rate: float = 0.1
    probe: int = 256

    def task(self, runs: int, generator: Generator) -> Tensor:
        """[runs, samples, inputs + outputs] of data, then the true weights below them, padded: one tensor."""
        features = normal(generator, runs, self.samples, self.inputs)
        truth = normal(generator, runs, self.inputs, self.outputs)
        noise = math.sqrt(self.samples * self.algebra / (1.0 - self.algebra))
        targets = features @ truth + noise * normal(generator, runs, self.samples, self.outputs)
        padding = torch.zeros(runs, self.inputs, self.inputs, dtype=torch.double)
        return torch.cat([torch.cat([features, targets], -1), torch.cat([truth, padding], -1)], 1)

    def start(self, runs: int) -> Tensor:
        return torch.zeros(runs, 1, self.inputs, self.outputs, dtype=torch.double)

    def round(self, task: Tensor, weights: Tensor, values: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        runs, replicas = values.shape
        data, truth = task[:, : self.samples], task[:, self.samples :, : self.outputs].unsqueeze(1)
        keep = 1.0 - values[..., None, None]
        rows = torch.arange(runs)[:, None, None]
        total = torch.zeros(runs, replicas, self.inputs, self.outputs, dtype=torch.double)
        for _ in range(STEPS):
            chosen = torch.randint(self.samples, (runs, replicas, self.batch), generator=generator)
            features, targets = data[rows, chosen].split([self.inputs, self.outputs], -1)
            features = features * (uniform(generator, *features.shape) < keep) / keep
            weights = weights - self.rate / self.batch * features.mT @ (features @ weights - targets)
            total += weights
        batch = normal(generator, runs, 1, self.probe, self.inputs)
        return weights, (batch @ (total / STEPS - truth)).square().mean((-1, -2))


@dataclass(frozen=True)
class Teacher:
    r"""Temperature at which a fixed, overconfident teacher is imitated.

    Labels follow softmax(z / :math:`\tau^*`) where z are the teacher's logits; the student, of the teacher's own kind,
    learns softmax(z / :math:`\tau`) on fresh inputs. The loss on labels is smallest at :math:`\tau = \tau^*`, exactly.
    The probe is the loss on a fresh labelled batch, at the round mean.
    """

    knob: KnobSpec = TEMPERATURE
    algebra: float = 2.0
    from_grid: bool = False
    inputs: int = 16
    classes: int = 4
    batch: int = 32
    rate: float = 4.0
    probe: int = 512
    confidence: float = 3.0

    def task(self, runs: int, generator: Generator) -> Tensor:
        return self.confidence / math.sqrt(self.inputs) * normal(generator, runs, 1, self.classes, self.inputs)

    def start(self, runs: int) -> Tensor:
        return torch.zeros(runs, 1, self.classes, self.inputs, dtype=torch.double)

    def round(self, task: Tensor, weights: Tensor, values: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """Classes before samples: softmax is five times as fast along a dimension that is not the last."""
        runs, replicas = values.shape
        teacher = task / values[..., None, None]
        total = torch.zeros(runs, replicas, self.classes, self.inputs, dtype=torch.double)
        for _ in range(STEPS):
            x = normal(generator, runs, replicas, self.inputs, self.batch)
            error = (weights @ x).softmax(-2) - (teacher @ x).softmax(-2)
            weights = weights - self.rate / self.batch * error @ x.mT
            total += weights
        x = normal(generator, runs, 1, self.inputs, self.probe)
        chances = (task / self.algebra @ x).softmax(-2)
        labels = (chances.cumsum(-2) < uniform(generator, runs, 1, 1, self.probe)).sum(-2, keepdim=True)
        labels = labels.clamp(max=self.classes - 1).expand(runs, replicas, 1, self.probe)
        guesses = (total / STEPS @ x).log_softmax(-2)
        return weights, -guesses.gather(-2, labels).mean((-1, -2))


PROBLEMS: Sequence[Problem] = (MovingTarget(), Ridge(), NoisyLabels(), InputDropout(), Teacher())
