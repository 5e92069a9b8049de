"""Small problems for the test, fewer than 1e5 weights each: made, bundled with scikit-learn, or of Python's library."""

from __future__ import annotations

import math
import re
import string
from functools import cache

import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

from lab.tasks.streams import generator_of
from lab.tasks.task import Batch
from lab.tasks.text import library
from real.models.perceptrons import DeepSets, NeuralODE, Perceptron, runge_kutta
from real.models.recurrent import PlainRNN
from real.models.tables import Ordinal, SkipGram
from real.models.weights import draws
from real.pools import Made, Noised, Rows, Skips, Stretches
from real.problems.texts import nearby_loss
from real.task import RealTask

# Ordered classes ------------------------------------------------------------------------------------------------------

CLASSES, UNSEEN_PATIENTS = 5, 142


def diabetes(name: str, synthetic: bool) -> RealTask:
    """How far has diabetes gone on after a year? Five classes, of as many patients each."""
    train, test = _patients()
    numbers = train.tables[0].shape[1]
    return RealTask(
        name,
        train,
        test,
        (UNSEEN_PATIENTS, UNSEEN_PATIENTS),
        draws(lambda: Ordinal(numbers, CLASSES)),
        _class_loss,
        16,
    )


@cache
def _patients() -> tuple[Rows, Rows]:
    """Numbers and classes of patients; scales and the borders of classes are those of the training rows."""
    found = load_diabetes(scaled=False)
    numbers, progress = torch.tensor(found.data).float(), torch.tensor(found.target).float()
    order = torch.randperm(len(progress), generator=generator_of("patients"))
    train, test = order[UNSEEN_PATIENTS:], order[:UNSEEN_PATIENTS]
    numbers = (numbers - numbers[train].mean(0)) / numbers[train].std(0)
    borders = progress[train].quantile(torch.arange(1, CLASSES) / CLASSES)
    classes = torch.bucketize(progress, borders).to(torch.uint8)
    return Rows((numbers[train], classes[train])), Rows((numbers[test], classes[test]))


def _class_loss(model: nn.Module, batch: Batch) -> Tensor:
    numbers, classes = batch
    return cross_entropy(model(numbers), classes.long())  # logarithms of probabilities are logits


# Counts ---------------------------------------------------------------------------------------------------------------

COUNTED, UNSEEN_COUNTS, CAUSES = 4096, 2048, 6


def counts(name: str, synthetic: bool) -> RealTask:
    """How many events are there in a given time? A network gives the logarithm of how often they come."""
    train, test = (_counted(part, count) for part, count in (("train", COUNTED), ("test", UNSEEN_COUNTS)))
    return RealTask(name, train, test, (UNSEEN_COUNTS, 1024), draws(lambda: Perceptron((CAUSES, 32, 1))), _deviance, 32)


def _counted(part: str, count: int) -> Rows:
    """Causes, time and count."""
    generator = generator_of("counts", part)
    x = 2 * torch.rand(count, CAUSES, generator=generator) - 1
    time = 0.1 + 1.9 * torch.rand(count, generator=generator)
    often = (torch.sin(3 * x[:, 0]) + x[:, 1] - x[:, 2] * x[:, 3] - 0.5).exp()
    return Rows((x, time, torch.poisson(often * time, generator=generator)))


def _deviance(model: nn.Module, batch: Batch) -> Tensor:
    """Half of Poisson's deviance: its gradient is that of the likelihood, and it is 0 where all counts are guessed."""
    x, time, count = batch
    log_mean = model(x)[:, 0] + time.log()
    return (torch.xlogy(count, count) - count * log_mean - count + log_mean.exp()).mean()


# Points and noise -----------------------------------------------------------------------------------------------------

BLUR = 0.05
"""The width of the two arcs."""


def moons(name: str, synthetic: bool) -> RealTask:
    """Which noise was added to a point of two arcs? The more of it, the less is left of the point (Ho et al. 2020)."""
    pool = Made(_noisy_moons)
    return RealTask(name, pool, pool, (2048, 1024), draws(lambda: Perceptron((4, 96, 96, 2), silu)), _added_loss, 64)


def _noisy_moons(count: int, generator: torch.Generator) -> Batch:
    """Points, levels and noise."""
    angle, level = math.pi * torch.rand(count, generator=generator), torch.rand(count, generator=generator)
    side = torch.randint(2, (count,), generator=generator) * 2 - 1
    arcs = side[:, None] * torch.stack([angle.cos() - 0.5, angle.sin() - 0.25], 1)  # one is the other turned around
    blur, noise = torch.randn(2, count, 2, generator=generator)
    return arcs + BLUR * blur, level, noise


def _added_loss(model: nn.Module, batch: Batch) -> Tensor:
    points, level, noise = batch
    angle = math.pi / 2 * level[:, None]
    left, added = angle.cos(), angle.sin()  # their squares sum to 1
    return (model(torch.cat([left * points + added * noise, left, added], 1)) - noise).square().mean()


# Sets -----------------------------------------------------------------------------------------------------------------

FEWEST, MOST = 3, 10


def sets(name: str, synthetic: bool) -> RealTask:
    """What is the sum of the two largest numbers of a set?"""
    pool = Made(_number_sets)
    return RealTask(name, pool, pool, (2048, 1024), draws(DeepSets), _largest_loss, 32)


def _number_sets(count: int, generator: torch.Generator) -> Batch:
    """Numbers, and how many of them belong to the set."""
    numbers = torch.randn(count, MOST, generator=generator)
    return numbers, torch.randint(FEWEST, MOST + 1, (count,), generator=generator)


def _largest_loss(model: nn.Module, batch: Batch) -> Tensor:
    numbers, sizes = batch
    present = torch.arange(MOST, device=sizes.device) < sizes[:, None]
    largest = numbers.masked_fill(~present, -math.inf).sort(-1, descending=True).values[:, :2].sum(-1)
    return (model(numbers, present) - largest).square().mean()


# A pendulum -----------------------------------------------------------------------------------------------------------

SWINGS, MOMENTS, MOMENT = 48, 120, 0.25
AHEAD, FINER = 4, 8
FRICTION, INACCURACY = 0.1, 0.05


def pendulum(name: str, synthetic: bool) -> RealTask:
    """Where will a pendulum be at the next four moments? Known from where it was seen, which is inaccurate."""
    train, test = (_swings(part) for part in ("train", "test"))
    return RealTask(name, train, test, (1024, 512), draws(lambda: NeuralODE(2, AHEAD, MOMENT)), _path_loss, 32)


def _swings(part: str) -> Stretches:
    """Angles and speeds as they are seen, from other starts in each part."""
    generator = generator_of("pendulum", part)
    state = torch.rand(SWINGS, 2, generator=generator) * torch.tensor([4.0, 2.0]) - torch.tensor([2.0, 1.0])
    path = []
    for _ in range(MOMENTS):
        path.append(state)
        for _ in range(FINER):
            state = runge_kutta(_swing, state, MOMENT / FINER)
    seen = torch.stack(path) + INACCURACY * torch.randn(MOMENTS, SWINGS, 2, generator=generator)
    angles, speeds = seen.unbind(-1)
    return Stretches((angles.T, speeds.T), 1 + AHEAD)


def _swing(state: Tensor) -> Tensor:
    angle, speed = state.unbind(-1)
    return torch.stack([speed, -angle.sin() - FRICTION * speed], -1)


def _path_loss(model: nn.Module, batch: Batch) -> Tensor:
    seen = torch.stack(batch, -1)
    return (model(seen[:, 0]) - seen[:, 1:]).square().mean()


# A sum over time ------------------------------------------------------------------------------------------------------

LENGTH = 24


def adding(name: str, synthetic: bool) -> RealTask:
    """What is the sum of the two marked numbers of a sequence (Hochreiter and Schmidhuber 1997)? Each half has one."""
    pool = Made(_marked_numbers)
    return RealTask(name, pool, pool, (2048, 1024), draws(lambda: PlainRNN(2)), _sum_loss, 64, clip=1.0)


def _marked_numbers(count: int, generator: torch.Generator) -> Batch:
    """Numbers and marks [sample, time, 2], and sums."""
    numbers = torch.rand(count, LENGTH, generator=generator)
    places = torch.randint(LENGTH // 2, (count, 2), generator=generator) + torch.tensor([0, LENGTH // 2])
    marks = torch.zeros_like(numbers).scatter_(1, places, 1.0)
    return torch.stack([numbers, marks], -1), (numbers * marks).sum(1)


def _sum_loss(model: nn.Module, batch: Batch) -> Tensor:
    marked, sums = batch
    return (model(marked) - sums).square().mean()


# Characters of names --------------------------------------------------------------------------------------------------

ALPHABET = "\n_" + string.ascii_letters + string.digits
"""A line ends each name."""
REACH = 2


def names(name: str, synthetic: bool) -> RealTask:
    """Which characters stand near each other in names of functions and classes of the standard library?"""
    train, test = (Skips.of(text, len(ALPHABET))._replace(reach=REACH) for text in _names())
    return RealTask(name, train, test, (8192, 4096), draws(lambda: SkipGram(len(ALPHABET)), table=0.2), nearby_loss, 64)


@cache
def _names() -> tuple[Tensor, Tensor]:
    """The characters of the names, each name once; every eighth is held out."""
    found = sorted({name for text in library() for name in re.findall(rb"\b(?:def|class) +(\w+)", text)})
    held_out = found[::8]
    del found[::8]
    return _numbered(found), _numbered(held_out)


def _numbered(found: list[bytes]) -> Tensor:
    numbers = bytes.maketrans(ALPHABET.encode(), bytes(range(len(ALPHABET))))
    return torch.frombuffer(bytearray(b"\n".join(found).translate(numbers)), dtype=torch.uint8)


# Two views of a digit -------------------------------------------------------------------------------------------------

PIXELS, UNSEEN_DIGITS, GRAIN = 64, 448, 0.5
FEATURES, BESIDE = 32, 0.05
"""What a network says of a digit; the weight of correlations between one thing it says and another."""


def digits(name: str, synthetic: bool) -> RealTask:
    """What can be said of a digit in spite of noise, in numbers that do not repeat each other (Zbontar et al. 2021)?"""
    shapes = ((PIXELS,), (PIXELS,))
    train, test = (Noised(rows, shapes) for rows in _digits())
    return RealTask(
        name,
        train,
        test,
        (UNSEEN_DIGITS, UNSEEN_DIGITS // 2),
        draws(lambda: Perceptron((PIXELS, 96, FEATURES))),
        _twin_loss,
        128,
    )


@cache
def _digits() -> tuple[Rows, Rows]:
    images = torch.tensor(load_digits().data, dtype=torch.uint8)
    order = torch.randperm(len(images), generator=generator_of("digits"))
    return Rows((images[order[UNSEEN_DIGITS:]],)), Rows((images[order[:UNSEEN_DIGITS]],))


def _twin_loss(model: nn.Module, batch: Batch) -> Tensor:
    """A feature of one view should correlate with itself in the other view, and with no other feature."""
    images, *noises = batch
    x = images.float() / 8 - 1
    one, other = (_standardised(model(x + GRAIN * noise.to(x.dtype))) for noise in noises)
    same = torch.eye(FEATURES, device=x.device, dtype=x.dtype)
    missed = (one.mT @ other / len(x) - same).square()
    return (missed * (same + BESIDE * (1 - same))).sum() / FEATURES


def _standardised(features: Tensor) -> Tensor:
    """Over the batch."""
    around = features - features.mean(0)
    return around * (around.square().mean(0) + 1e-5).rsqrt()
