"""A network that listens, and the loss of what it heard."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, log_softmax, pad

IMPOSSIBLE = -1e4
"""The logarithm of a probability of zero: finite, so that gradients are."""


class ListeningBlock(nn.Module):
    """A convolution of every channel along time, a norm over channels, two layers per moment; added to the input."""

    def __init__(self, width: int, length: int = 7) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(width, width, length, padding=length // 2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[sample, moment, channel] -> the same."""
        y = self.norm(self.depthwise(x.transpose(1, 2)).transpose(1, 2))
        return x + self.outer(gelu(self.inner(y)))  # type: ignore[no-any-return]


class Listener(nn.Module):
    """Bands of a spectrum -> at each moment, logarithms of probabilities of nothing (0) and of each sound."""

    def __init__(self, bands: int, sounds: int, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(bands, width)
        self.blocks = nn.Sequential(*(ListeningBlock(width) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, sounds + 1)

    def forward(self, spectrum: Tensor) -> Tensor:
        return log_softmax(self.head(self.norm(self.blocks(self.stem(spectrum)))), -1)


def heard(logs: Tensor, sounds: Tensor) -> Tensor:
    """Minus the log probability of a sequence of sounds, whenever each is said: CTC, for sequences of one length.

    torch's own has no rule for ``vmap``, which trains many runs as one. The sequence is written with a blank before
    and behind each sound; alpha[s] is the probability of all ways to have come to its place s by now.

    Args:
        logs: log probabilities [sample, moment, class]; class 0 is the blank.
        sounds: classes from 1 on [sample, number].

    Returns:
        One for each sample.
    """
    places = pad(sounds.repeat_interleave(2, 1), (1, 0))  # a first blank; every other place becomes one next
    is_sound = torch.arange(places.shape[1], device=logs.device) % 2 == 1
    places = torch.where(is_sound, places, 0)
    emitted = logs.gather(2, places[:, None].expand(-1, logs.shape[1], -1)).unbind(1)
    differs = pad(places[:, 2:] != places[:, :-2], (2, 0)) & is_sound  # a blank between two sounds may be left out
    alpha = torch.where(torch.arange(places.shape[1], device=logs.device) < 2, emitted[0], IMPOSSIBLE)
    for moment in emitted[1:]:
        one = pad(alpha[:, :-1], (1, 0), value=IMPOSSIBLE)
        two = torch.where(differs, pad(alpha[:, :-2], (2, 0), value=IMPOSSIBLE), IMPOSSIBLE)
        alpha = torch.stack([alpha, one, two]).logsumexp(0) + moment
    return -alpha[:, -2:].logsumexp(1)
