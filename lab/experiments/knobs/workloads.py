"""The workloads: six on the benchmark's data, and three so small that two cores train them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch
from real.data import CHARACTERS, load_or_stand_in
from real.models.convolutions import CNN, ResNet
from real.models.transformers import GPT
from real.models.weights import drawn
from real.pools import Noised, Pool, Rows, Windows, batches_of
from real.problems.images import bright, mislabelled
from real.problems.texts import next_loss
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, grid_sample, log_softmax, relu

from knobs.task import Knob, KnobTask, TrainedLoss
from lab.tasks.streams import generator_of
from lab.tasks.task import Batch

__all__ = ["MINI", "REAL", "WORKLOADS", "Dropped", "KnobWorkload", "dropped_loss", "smoothed_loss", "warped"]

CONTEXT = 64
WRONG_LABELS = 0.3

DECAY = Knob("weight decay", "decay", "log", 0.3, (1e-6, 1e3))
COUPLED = Knob("weight decay", "decay", "log", 3e-3, (1e-7, 1.0))
"""A part of the gradient: times the rate and over 1 - momentum it is what AdamW's is."""
DROPOUT = Knob("dropout", "loss", "logit", 0.3, (1e-3, 0.97))
SMOOTHING = Knob("label smoothing", "loss", "logit", 0.3, (1e-3, 0.99))
STRENGTH = Knob("strength of augmentation", "loss", "log", 0.5, (1e-3, 20.0))
REST = Knob("1 - beta2", "rest", "log", 0.03, (1e-5, 0.9))


class KnobWorkload(NamedTuple):
    """What is trained, how long, and the knob."""

    name: str
    knob: Knob
    optimizer: str
    """``adamw`` or ``momentum``: torch's AdamW without decay, or SGD with momentum 0.9, but for the knob."""
    rate: float
    """The peak of OneCycle."""
    steps: int
    build: Callable[[str, Knob, bool], KnobTask]

    def task(self, synthetic: bool = False) -> KnobTask:
        return self.build(self.name, self.knob, synthetic)


# Losses --------------------------------------------------------------------------------------------------------------


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Without any regulariser; what else is in the batch is not looked at."""
    return cross_entropy(model(bright(batch[0])), batch[1].long())


def plainly(loss: Callable[[nn.Module, Batch], Tensor]) -> TrainedLoss:
    """A loss that does not depend on the knob: the optimizer does."""
    return lambda model, batch, value: loss(model, batch)


def smoothed_loss(model: nn.Module, batch: Batch, value: Tensor) -> Tensor:
    """Label smoothing as torch's, for a value that is a tensor."""
    logs = log_softmax(model(bright(batch[0])), -1)
    own = logs.gather(-1, batch[1].long()[:, None])[:, 0]
    return -((1 - value) * own + value * logs.mean(-1)).mean()


def dropped_loss(model: nn.Module, batch: Batch, value: Tensor) -> Tensor:
    """Dropout: the batch has normal numbers that say who is dropped, the same ones for all values."""
    images, labels, noise = batch
    return cross_entropy(model(bright(images), torch.special.ndtr(noise.float()), value), labels.long())


def warped_loss(model: nn.Module, batch: Batch, value: Tensor) -> Tensor:
    images, labels, noise = batch
    return cross_entropy(model(warped(bright(images), noise.float(), value)), labels.long())


def warped(images: Tensor, noise: Tensor, strength: Tensor) -> Tensor:
    """Images moved, turned, stretched, and brighter or darker. At strength 1 by some 2 pixels, 10 degrees, 15 %, 15 %.

    What comes in from outside is background.
    """
    across, down, turn, wide, high, light = (strength * noise).unbind(-1)
    turn, wide, high = 0.17 * turn, (0.15 * wide).exp(), (0.15 * high).exp()
    side = torch.linspace(-1, 1, images.shape[-1] + 1, device=images.device)
    middle = (side[1:] + side[:-1]) / 2  # of the pixels; torch's affine_grid would go through a slow loop under vmap
    x, y = (middle[None, None, :], middle[None, :, None])
    sine, cosine, across, down, wide, high = (
        part[:, None, None] for part in (turn.sin(), turn.cos(), 0.15 * across, 0.15 * down, wide, high)
    )
    grid = torch.stack([wide * (cosine * x - sine * y) + across, high * (sine * x + cosine * y) + down], -1)
    seen = grid_sample(images + 1, grid, align_corners=False) - 1  # the background is -1
    return seen * (0.15 * light).exp()[:, None, None, None]


class Dropped(nn.Module):
    """Two hidden layers with dropout behind each; it takes uniform numbers and drops where they are below the value."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, 10)

    def forward(self, images: Tensor, uniform: Tensor | None = None, value: Tensor | None = None) -> Tensor:
        x = images.flatten(1)
        for number, layer in enumerate((self.first, self.second)):
            x = relu(layer(x))
            if uniform is not None and value is not None:
                x = x * (uniform[:, number] >= value) / (1 - value)  # no number from the host: this is captured
        return self.head(x)  # type: ignore[no-any-return]


# Data ----------------------------------------------------------------------------------------------------------------


def little(
    data: str, count: int, probe: int, synthetic: bool, wrong: float = 0.0
) -> tuple[Rows, list[Batch], tuple[Pool, int, int]]:
    """So many training images, a probe from the other end of the training data, and the validation set.

    A share of the training labels may be ``wrong``; those of probe and validation are right.
    """
    found = load_or_stand_in(data, synthetic)
    images, labels = found["train_images"], found["train_labels"]
    probe = min(probe, len(labels) // 4)
    count = min(count, len(labels) - probe)
    train = Rows((images[:count], mislabelled(labels, wrong)[:count]))
    aside = Rows((images[-probe:], labels[-probe:]))
    test = Rows((found["test_images"], found["test_labels"]))
    judged, size = (64, 64) if synthetic else (2048, 512)
    return train, batches_of(aside, data, probe, probe), (test, judged, size)


def images(
    data: str,
    count: int,
    build: Callable[[], nn.Module],
    trained: TrainedLoss,
    batch_size: int,
    name: str,
    knob: Knob,
    synthetic: bool,
    noise: tuple[int, ...] = (),
    wrong: float = 0.0,
) -> KnobTask:
    """Ten classes from few images; ``noise``: what each of them brings along for its regulariser."""
    train, probe, judged = little(data, count, 512, synthetic, wrong)
    return _classes(name, knob, train, noise, probe, judged, build, trained, batch_size)


def _classes(
    name: str,
    knob: Knob,
    train: Rows,
    noise: tuple[int, ...],
    probe: list[Batch],
    judged: tuple[Pool, int, int],
    build: Callable[[], nn.Module],
    trained: TrainedLoss,
    batch_size: int,
) -> KnobTask:
    pool: Pool = Noised(train, (noise,)) if noise else train

    def new(generator: torch.Generator) -> nn.Module:
        return drawn(build(), generator, gain=2.0)

    return KnobTask(name, knob, pool, probe, judged, new, class_loss, trained, batch_size)


def text(characters: int, batch_size: int, name: str, knob: Knob, synthetic: bool) -> KnobTask:
    """What comes next, from so many characters of Shakespeare."""
    found = load_or_stand_in("shakespeare", synthetic)
    train, aside = found["train_text"], 257 * CONTEXT + 1
    aside = min(aside, len(train) // 4)
    probe, judged, size = (16, 16, 16) if synthetic else (256, 512, 128)
    return KnobTask(
        name,
        knob,
        Windows(train[: min(characters, len(train) - aside)], CONTEXT),
        batches_of(Windows(train[-aside:], CONTEXT).all(), name, probe, probe),
        (Windows(found["test_text"], CONTEXT).all(), judged, size),
        lambda generator: drawn(GPT(CHARACTERS, CONTEXT), generator),
        next_loss,
        plainly(next_loss),
        batch_size,
    )


def digits(
    count: int,
    trained: TrainedLoss,
    name: str,
    knob: Knob,
    synthetic: bool,
    noise: tuple[int, ...] = (),
    wrong: float = 0.0,
    hidden: int = 64,
) -> KnobTask:
    """scikit-learn's digits, 8 by 8: ``count`` to train on, 300 to probe with, the others to judge by."""
    found = import_module("sklearn.datasets").load_digits()  # not synthetic, but here wherever tests are run
    order = torch.randperm(len(found.target), generator=generator_of("order of digits"))
    pictures = (torch.from_numpy(found.images)[order] * (255 / 16)).to(torch.uint8)
    labels = torch.from_numpy(found.target)[order].to(torch.uint8)
    end = count + 300
    train = Rows((pictures[:count], mislabelled(labels, wrong)[:count]))
    probe = Rows((pictures[count:end], labels[count:end]))
    rest = Rows((pictures[end:], labels[end:]))
    judged = 128 if synthetic else rest.count
    return _classes(
        name,
        knob,
        train,
        noise,
        batches_of(probe, name, 300, 300),
        (rest, judged, judged),
        lambda: Dropped(64, hidden),
        trained,
        batch_size=32,
    )


# The table -----------------------------------------------------------------------------------------------------------

_PLAIN = plainly(class_loss)
_HIDDEN = 256

REAL = (
    KnobWorkload("decay-text", DECAY, "adamw", 3e-3, 1500, partial(text, 20_000, 32)),
    KnobWorkload(
        "decay-resnet", COUPLED, "momentum", 0.05, 1000, partial(images, "fashion", 1000, ResNet, _PLAIN, 128)
    ),
    KnobWorkload(
        "dropout",
        DROPOUT,
        "adamw",
        1e-3,
        1500,
        partial(images, "fashion", 500, partial(Dropped, 784, _HIDDEN), dropped_loss, 64, noise=(2, _HIDDEN)),
    ),
    KnobWorkload(
        "smoothing",
        SMOOTHING,
        "adamw",
        1e-3,
        1500,
        partial(images, "mnist", 1000, CNN, smoothed_loss, 64, wrong=WRONG_LABELS),
    ),
    KnobWorkload(
        "augmentation", STRENGTH, "adamw", 1e-3, 1500, partial(images, "mnist", 300, CNN, warped_loss, 64, noise=(6,))
    ),
    KnobWorkload("beta2", REST, "adamw", 1e-2, 600, partial(text, 200_000, 32)),
)
MINI = (
    KnobWorkload("mini-decay", DECAY, "adamw", 3e-3, 600, partial(digits, 100, _PLAIN)),
    KnobWorkload("mini-dropout", DROPOUT, "adamw", 3e-3, 600, partial(digits, 100, dropped_loss, noise=(2, 64))),
    KnobWorkload(
        "mini-smoothing", SMOOTHING, "adamw", 3e-3, 600, partial(digits, 300, smoothed_loss, wrong=WRONG_LABELS)
    ),
)
WORKLOADS = {workload.name: workload for workload in (*REAL, *MINI)}
"""By name."""
