"""Networks that read step by step, or could."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, silu


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


class FadingAttention(nn.Module):
    """Attention without softmax, in which the past fades: a recurrence of matrices (as RetNet, Sun et al. 2023).

    Every head has a memory, which decays at a learned rate; keys write values into it and queries read them. A
    recurrence of which all coefficients are constant is a product with a triangle of decays, and is computed as one.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.joint = nn.Linear(width, 3 * width, bias=False)  # queries, keys, values
        self.gate = nn.Linear(width, width, bias=False)
        self.log_decay = nn.Parameter(torch.linspace(math.log(0.02), math.log(0.5), heads))
        self.norm = nn.LayerNorm(width // heads)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[sample, time, width] -> the same."""
        joint = self.joint(x).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = joint.permute(2, 0, 3, 1, 4).unbind(0)
        time = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        ago = time[:, None] - time
        decay = self.log_decay.exp()[:, None, None]
        left = (-decay * ago.clamp(min=0)).exp() * (ago >= 0)  # [head, time, earlier time]
        read = (queries @ keys.mT / math.sqrt(keys.shape[-1]) * left) @ values
        return self.out(silu(self.gate(x)) * self.norm(read).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class LinearText(nn.Module):
    """Characters in, logits of the next character out: memories that fade, with two layers per place behind each.

    No places are learned: the decays tell what is near.
    """

    def __init__(self, tokens: int, width: int = 96, blocks: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.memory_norms, self.norms = (nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks)) for _ in range(2))
        self.memory = nn.ModuleList(FadingAttention(width, heads) for _ in range(blocks))
        self.inner = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(blocks))
        self.outer = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text)
        blocks = zip(self.memory_norms, self.memory, self.norms, self.inner, self.outer, strict=True)
        for memory_norm, memory, norm, inner, outer in blocks:
            x = x + memory(memory_norm(x))
            x = x + outer(relu(inner(norm(x))))
        return self.head(self.norm(x))  # type: ignore[no-any-return]
