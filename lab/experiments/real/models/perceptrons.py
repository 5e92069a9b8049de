"""Plain layers, one after the other, layers that take turns with two axes, and a network of sines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import relu


class Perceptron(nn.Module):
    """Linear layers with a function between them; no norm. Two widths are a linear model."""

    def __init__(self, widths: Sequence[int], function: Callable[[Tensor], Tensor] = relu) -> None:
        super().__init__()
        self.function = function
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths[:-1]))
        self.head = nn.Linear(widths[-2], widths[-1])

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = self.function(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


class Sines(nn.Module):
    """A SIREN (Sitzmann et al. 2020): what an image is at a place, from sines of sines."""

    FREQUENCY = 30.0

    def __init__(self, width: int = 96, depth: int = 3) -> None:
        super().__init__()
        widths = [2, *[width] * depth]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.head = nn.Linear(width, 1)

    @torch.no_grad()
    def drawn(self, generator: torch.Generator) -> Sines:
        """With its authors' first weights: uniform, so that every layer's sines are as wide as those before it."""
        for number, layer in enumerate([*self.hidden, self.head]):
            inputs = layer.weight.shape[1]
            bound = 1 / inputs if number == 0 else math.sqrt(6 / inputs) / self.FREQUENCY
            layer.weight.uniform_(-bound, bound, generator=generator)
            layer.bias.uniform_(-1 / math.sqrt(inputs), 1 / math.sqrt(inputs), generator=generator)
        return self

    def forward(self, places: Tensor) -> Tensor:
        x = places
        for layer in self.hidden:
            x = torch.sin(self.FREQUENCY * layer(x))
        return self.head(x)  # type: ignore[no-any-return]


class Mixer(nn.Module):
    """A stretch of a series in, several numbers for each later moment out: an MLP-Mixer (Tolstikhin et al. 2021).

    The stretch is cut into patches; layers take turns with the axis of the patches and with that of their features.
    """

    def __init__(self, length: int, ahead: int, numbers: int, patch: int = 8, width: int = 48, blocks: int = 3) -> None:
        super().__init__()
        patches = length // patch
        self.patch, self.ahead = patch, ahead
        self.first = nn.Linear(patch, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * blocks))
        self.across = nn.ModuleList(Perceptron((patches, 4 * patches, patches)) for _ in range(blocks))
        self.within = nn.ModuleList(Perceptron((width, 2 * width, width)) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(patches * width, ahead * numbers)

    def forward(self, x: Tensor) -> Tensor:
        """[sample, time] -> [sample, later time, number]."""
        x = self.first(x.unflatten(1, (-1, self.patch)))
        for number, (across, within) in enumerate(zip(self.across, self.within, strict=True)):
            normed = self.norms[2 * number](x).mT
            x = x + across(normed.flatten(0, 1)).view(normed.shape).mT
            normed = self.norms[2 * number + 1](x)
            x = x + within(normed.flatten(0, 1)).view(normed.shape)
        return self.head(self.norm(x).flatten(1)).unflatten(1, (self.ahead, -1))
