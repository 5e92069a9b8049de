"""Networks that read step by step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["ChordGRU", "TextGRU", "TextLSTM"]


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


class LSTM(nn.Module):
    """A layer with a memory and three gates, step by step; the gate that keeps begins open."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.inputs = nn.Linear(inputs, 4 * width)
        self.memory = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        """[sample, time, input] -> [sample, time, width]."""
        state, cell = (x.new_zeros(len(x), self.width) for _ in range(2))
        states = []
        for given in self.inputs(x).unbind(1):
            let_in, keep, let_out, fresh = (given + self.memory(state)).chunk(4, -1)
            cell = torch.sigmoid(keep + 1) * cell + torch.sigmoid(let_in) * torch.tanh(fresh)
            state = torch.sigmoid(let_out) * torch.tanh(cell)
            states.append(state)
        return torch.stack(states, 1)


class TextLSTM(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, tokens: int, width: int = 80, table: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, table)
        self.lstm = LSTM(table, width)
        self.head = nn.Linear(width, tokens)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(text)))  # type: ignore[no-any-return]


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
