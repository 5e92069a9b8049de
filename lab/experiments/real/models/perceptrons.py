"""Plain layers, one after the other, and a network of sines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

__all__ = ["Perceptron", "Sines"]


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
