"""Digits: a small convolutional network with BatchNorm on scikit-learn's handwritten digits."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, relu

from hdet.errors import ArgumentError
from lab.tasks.streams import check_count, check_place, epoch_places, generator_of
from lab.tasks.task import Batch, device_of, evaluating, moved
from lab.tasks.transformer import unseeded

__all__ = ["CNN", "DigitsTask"]

SHIFT, CONTRAST, NOISE = 1, 0.1, 0.1


class CNN(nn.Module):
    """Three convolutions with BatchNorm, the mean over the image, one linear layer."""

    def __init__(self, channels: int, width: int, classes: int) -> None:
        super().__init__()
        sizes = (channels, width, 2 * width, 3 * width)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(sizes[k], sizes[k + 1], 3, stride=(1, 1, 2)[k], padding=1, bias=False) for k in range(3)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for b in sizes[1:])
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = relu(norm(convolution(x)))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """He's rule for the convolutions, a small head: the first predictions are near uniform."""
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                layer.weight.normal_(0, math.sqrt(2 / layer.weight[0].numel()), generator=generator)
        self.head.weight.normal_(0, 0.5 / math.sqrt(self.head.in_features), generator=generator)
        self.head.bias.zero_()


class DigitsTask:
    """Tell which digit an 8×8 image shows.

    Training images are shifted by up to a pixel, made brighter or darker, and get some noise.

    Args:
        width: channels of the first convolution.
        batch_size: images per replica and step.
    """

    name = "digits"

    def __init__(self, width: int = 24, batch_size: int = 64) -> None:
        check_count(width=width, batch_size=batch_size)
        self.width, self.batch_size = width, batch_size
        images, labels = _bundled()
        self.channels, self.classes = images.shape[1], int(labels.max()) + 1
        order = torch.randperm(len(labels), generator=generator_of("digits split"))
        train, self._held_out = order[len(order) // 5 :], order[: len(order) // 5]
        self._images, self._labels, self._train = images, labels, train
        self._mean, self._std = images[train].mean(), images[train].std().clamp(min=1e-6)

    def model(self, seed: int) -> nn.Module:
        model = unseeded(lambda: CNN(self.channels, self.width, self.classes))
        model.draw(generator_of("digits model", seed))
        return model

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """``convolution``: filters; ``head``: the last layer's weight; ``no_decay``: norms and biases."""
        groups: dict[str, list[nn.Parameter]] = {"convolution": [], "head": [], "no_decay": []}
        for parameter in model.parameters():
            groups[{4: "convolution", 2: "head"}.get(parameter.ndim, "no_decay")].append(parameter)
        return [{"name": name, "params": parameters} for name, parameters in groups.items()]

    def batch(self, seed: int, step: int, replica: int = 0, replicas: int = 1) -> Batch:
        check_place(step, replica, replicas)
        _, places = epoch_places(f"digits {seed}", len(self._train), self.batch_size, step, replica, replicas)
        return self._varied(self._train[places], generator_of("digits batch", seed, step, replica, replicas))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return cross_entropy(model(images), labels)

    def validation(self) -> list[Batch]:
        """The held-out fifth as it is, in one batch."""
        held_out = self._held_out
        return [((self._images[held_out] - self._mean) / self._std, self._labels[held_out])]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        losses, right = [], []
        with evaluating(model):
            for batch in self.validation():
                images, labels = moved(batch, device_of(model))
                logits = model(images)
                losses.append(float(cross_entropy(logits, labels)))
                right.append(float((logits.argmax(1) == labels).double().mean()))
        return {"loss": math.fsum(losses) / len(losses), "accuracy": math.fsum(right) / len(right)}

    def _varied(self, places: Tensor, generator: torch.Generator) -> Batch:
        images = self._images[places]
        n, channels, height, width = images.shape
        down, right = torch.randint(2 * SHIFT + 1, (2, n, 1), generator=generator)
        rows, columns = (down + torch.arange(height))[:, :, None], (right + torch.arange(width))[:, None, :]
        padded = pad(images, (SHIFT,) * 4).permute(0, 2, 3, 1)
        images = padded[torch.arange(n)[:, None, None], rows, columns].permute(0, 3, 1, 2)
        contrast = 1 + CONTRAST * (2 * torch.rand(n, 1, 1, 1, generator=generator) - 1)
        noise = NOISE * torch.randn(n, channels, height, width, generator=generator)
        return ((images * contrast - self._mean) / self._std + noise).contiguous(), self._labels[places]


def _bundled() -> tuple[Tensor, Tensor]:
    try:
        found = import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        raise ArgumentError(
            "the digits task needs scikit-learn, but it is not installed; run `pip install -e '.[dev]'` in the checkout"
        ) from error
    return torch.tensor(found.images).float()[:, None] / 16, torch.tensor(found.target).long()
