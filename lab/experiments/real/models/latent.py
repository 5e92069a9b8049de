"""Models of a density: by a hidden cause, or by a change of variables."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from real.models.perceptrons import Perceptron


class VAE(nn.Module):
    """A variational autoencoder; the noise that it samples with is handed in."""

    def __init__(self, inputs: int, hidden: int = 128, causes: int = 16) -> None:
        super().__init__()
        self.encoder = Perceptron((inputs, hidden, 2 * causes))
        self.decoder = Perceptron((causes, hidden, inputs))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """What it makes of its inputs, and for each of them the divergence of the causes from a standard normal."""
        mean, log_variance = self.encoder(x).chunk(2, -1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1)
        return self.decoder(mean + (0.5 * log_variance).exp() * noise), divergence


class Coupling(nn.Module):
    """One half of the numbers is scaled and shifted by what a small network makes of the other half."""

    def __init__(self, half: int, hidden: int) -> None:
        super().__init__()
        self.network = Perceptron((half, hidden, hidden, 2 * half))

    def forward(self, kept: Tensor, changed: Tensor) -> tuple[Tensor, Tensor]:
        """The changed half, and the logarithm of what it was scaled by."""
        scale, shift = self.network(kept).chunk(2, -1)
        scale = 2 * torch.tanh(scale / 2)
        return changed * scale.exp() + shift, scale.sum(-1)


class Flow(nn.Module):
    """A RealNVP: couplings that take turns with the two halves; numbers are dealt to them alternately."""

    def __init__(self, numbers: int, couplings: int = 8, hidden: int = 48) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(numbers // 2, hidden) for _ in range(couplings))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The standard normal numbers that x stands for, and the logarithm of the volume's change."""
        a, b = x[:, ::2], x[:, 1::2]
        volume = torch.zeros_like(x[:, 0])
        for coupling in self.couplings:
            changed, scaled = coupling(a, b)
            a, b, volume = changed, a, volume + scaled
        return torch.cat([a, b], -1), volume
