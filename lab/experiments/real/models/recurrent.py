"""Networks that read step by step, or could."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import relu


class GRU(nn.Module):
    """A gated recurrent layer, step by step; what the inputs give is computed for all steps at once."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.inputs = nn.Linear(inputs, 3 * width)
        self.memory = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        """[sample, time, input] -> [sample, time, width]."""
        state = x.new_zeros(len(x), self.width)
        states = []
        for given in self.inputs(x).unbind(1):
            reset_in, update_in, new_in = given.chunk(3, -1)
            reset, update, new = self.memory(state).chunk(3, -1)
            keep = torch.sigmoid(update_in + update)
            fresh = torch.tanh(new_in + torch.sigmoid(reset_in + reset) * new)
            state = fresh + keep * (state - fresh)
            states.append(state)
        return torch.stack(states, 1)


class PlainRNN(nn.Module):
    """A tanh recurrence without gates; one number is read off its last state."""

    def __init__(self, inputs: int, width: int = 64) -> None:
        super().__init__()
        self.width = width
        self.inputs = nn.Linear(inputs, width)
        self.memory = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[sample, time, input] -> [sample]."""
        state = x.new_zeros(len(x), self.width)
        for given in self.inputs(x).unbind(1):
            state = torch.tanh(given + self.memory(state))
        return self.head(state)[:, 0]  # type: ignore[no-any-return]


class TextGRU(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, tokens: int, width: int = 96, table: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, table)
        self.gru = GRU(table, width)
        self.head = nn.Linear(width, tokens)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.gru(self.tokens(text)))  # type: ignore[no-any-return]


class ChordGRU(nn.Module):
    """The notes of all voices in, for each voice logits of its next note out."""

    def __init__(self, notes: int, voices: int = 4, width: int = 48, table: int = 16) -> None:
        super().__init__()
        self.voices = voices
        self.notes = nn.Embedding(notes, table)
        self.gru = GRU(voices * table, width)
        self.head = nn.Linear(width, voices * notes)

    def forward(self, chords: Tensor) -> Tensor:
        """[sample, time, voice] -> [sample, time, voice, note]."""
        x = self.gru(self.notes(chords).flatten(2))
        return self.head(x).unflatten(-1, (self.voices, -1))


class Oscillators(nn.Module):
    """A linear recurrence: every channel drives some damped oscillators and hears their sum (a diagonal S4).

    A recurrence of which all coefficients are constant is a convolution, and is computed as one.
    """

    def __init__(self, channels: int, states: int = 4) -> None:
        super().__init__()
        spread = torch.linspace(0, 1, channels * states).view(states, channels).T.contiguous()
        self.log_decay = nn.Parameter(math.log(0.02) + spread.roll(1, 0) * math.log(0.5 / 0.02))
        self.frequency = nn.Parameter(math.pi * spread)
        self.cosine = nn.Parameter(torch.full((channels, states), 1 / states))
        self.sine = nn.Parameter(torch.zeros(channels, states))

    def forward(self, x: Tensor) -> Tensor:
        """[sample, time, channel] -> the same."""
        length = x.shape[1]
        time = torch.arange(length, device=x.device, dtype=x.dtype)
        angle = self.frequency[..., None] * time
        swing = self.cosine[..., None] * angle.cos() + self.sine[..., None] * angle.sin()
        kernel = (swing * (-self.log_decay.exp()[..., None] * time).exp()).sum(1)  # [channel, time]
        ago = torch.arange(length, device=x.device)[:, None] - torch.arange(length, device=x.device)
        weights = kernel[:, ago.clamp(min=0)] * (ago >= 0)  # [channel, time, earlier time]
        return (weights @ x.permute(2, 1, 0)).permute(2, 1, 0)


class StateSpace(nn.Module):
    """Symbols in, for every place logits of its class out: linear recurrences with a gated layer behind each."""

    def __init__(self, symbols: int, classes: int, width: int = 48, blocks: int = 3) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.memory = nn.ModuleList(Oscillators(width) for _ in range(blocks))
        self.inner = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(blocks))
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, text: Tensor) -> Tensor:
        x = self.symbols(text)
        for norm, memory, inner, outer in zip(self.norms, self.memory, self.inner, self.outer, strict=True):
            new, gate = inner(relu(memory(norm(x)))).chunk(2, -1)
            x = x + outer(new * torch.sigmoid(gate))
        return self.head(self.norm(x))  # type: ignore[no-any-return]
