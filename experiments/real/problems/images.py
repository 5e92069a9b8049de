"""Images by their class."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hdet.tasks.streams import generator_of
from hdet.tasks.task import Batch
from real.data import load_or_stand_in
from real.models.weights import drawn
from real.pools import Rows, held_out
from real.task import RealTask

__all__ = ["classes"]


def classes(
    data: str, model: Callable[[], nn.Module], name: str, synthetic: bool, wrong: float = 0.0, batch_size: int = 64
) -> RealTask:
    """Which of ten classes; a share of the labels may be ``wrong``."""
    found = load_or_stand_in(data, synthetic)
    labels = _mislabelled(found["train_labels"], wrong)
    return RealTask(
        name,
        Rows((found["train_images"], labels)),
        held_out(Rows((found["test_images"], found["test_labels"])), 2048, 512),
        lambda generator: drawn(model(), generator),
        _class_loss,
        batch_size,
    )


def _class_loss(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return cross_entropy(model(_bright(images)), labels.long())


def _bright(images: Tensor) -> Tensor:
    """One channel, around 0."""
    return (images[:, None].float() / 255 - 0.3) / 0.3


def _mislabelled(labels: Tensor, share: float) -> Tensor:
    """A share of the labels is drawn anew, always the same ones; a tenth of these happen to be right."""
    generator = generator_of("wrong labels")
    fresh = torch.randint(10, labels.shape, generator=generator, dtype=labels.dtype)
    return torch.where(torch.rand(labels.shape, generator=generator) < share, fresh, labels)
