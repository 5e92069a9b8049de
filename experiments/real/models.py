"""Small models of the kinds that people train.

All of them run under ``torch.func.vmap``: attention and recurrence are written out, and there is no dropout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, relu

__all__ = [
    "CNN",
    "GPT",
    "ChordGRU",
    "Factors",
    "ResNet",
    "Seq2Seq",
    "TextGRU",
    "ViT",
    "WideDeep",
    "draw",
    "groups",
]


# Transformers -------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Places of one sequence look at those of another, or of their own, except where ``hidden``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries = nn.Linear(width, width)
        self.joint = nn.Linear(width, 2 * width)  # keys and values
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, hidden: Tensor | None) -> Tensor:
        queries = self.queries(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        joint = self.joint(memory).unflatten(-1, (2, self.heads, -1))
        keys, values = joint.permute(2, 0, 3, 1, 4).unbind(0)
        scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        mixed = scores.softmax(-1) @ values
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention to its own sequence, to another one if ``crossed``, then two layers per place; each added to its input.

    With relu, and not hdet's own block with gelu: on a CPU that alone would be a third of a step.
    """

    def __init__(self, width: int, heads: int, crossed: bool = False) -> None:
        super().__init__()
        self.own_norm, self.own = nn.LayerNorm(width), Attention(width, heads)
        if crossed:
            self.cross_norm, self.cross = nn.LayerNorm(width), Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, hidden: Tensor | None, other: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """``hidden``: places not to be looked at; ``other``: another sequence and its hidden places."""
        normed = self.own_norm(x)
        x = x + self.own(normed, normed, hidden)
        if other is not None:
            x = x + self.cross(self.cross_norm(x), *other)
        return x + self.mlp_out(relu(self.mlp_in(self.mlp_norm(x))))  # type: ignore[no-any-return]


def _future(length: int, device: torch.device) -> Tensor:
    """What a place may not look at: all that come after it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


# Images --------------------------------------------------------------------------------------------------------------


class CNN(nn.Module):
    """Two convolutions, each halving the image, and two linear layers; no norm."""

    def __init__(self, width: int = 8, hidden: int = 64) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 5, stride=2, padding=2)
        self.second = nn.Conv2d(width, 2 * width, 5, stride=2, padding=2)
        self.hidden = nn.Linear(2 * width * 49, hidden)
        self.head = nn.Linear(hidden, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = relu(self.second(relu(self.first(images))))
        return self.head(relu(self.hidden(x.flatten(1))))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Two convolutions with BatchNorm, added to their input; the first may halve the image."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.short = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.first_norm(self.first(x)))
        return relu(self.short(x) + self.second_norm(self.second(y)))


class ResNet(nn.Module):
    """A ResNet of three stages on the image at half its size."""

    def __init__(self, widths: Sequence[int] = (8, 16, 32), blocks: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, widths[0], 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(widths[0])
        sizes = [(width, width, 1) for width in widths for _ in range(blocks)]
        for stage in range(1, len(widths)):
            sizes[stage * blocks] = (widths[stage - 1], widths[stage], 2)
        self.blocks = nn.Sequential(*(Residual(*size) for size in sizes))
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        x = relu(self.stem_norm(self.stem(avg_pool2d(images, 2))))
        return self.head(self.blocks(x).mean((2, 3)))  # type: ignore[no-any-return]


class LateLayer(Layer):
    """A layer of the first transformers: norms come after the sums, so a deep stack of them is slow to take off."""

    def forward(self, x: Tensor, hidden: Tensor | None, other: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x = self.own_norm(x + self.own(x, x, hidden))
        return self.mlp_norm(x + self.mlp_out(relu(self.mlp_in(x))))  # type: ignore[no-any-return]


class ViT(nn.Module):
    """A vision transformer on patches of 7 by 7: no convolution, learned positions, a token that reads the answer.

    Its norms come late: it rests on a plateau at first, as larger ones do.
    """

    def __init__(self, width: int = 48, depth: int = 4, heads: int = 3, patch: int = 7) -> None:
        super().__init__()
        self.patch = patch
        self.patches = nn.Linear(patch * patch, width)
        self.places = nn.Embedding((28 // patch) ** 2 + 1, width)
        self.layers = nn.ModuleList(LateLayer(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        samples, side = len(images), 28 // self.patch
        cut = images.reshape(samples, side, self.patch, side, self.patch).transpose(2, 3)
        x = self.patches(cut.reshape(samples, side * side, -1)) + self.places.weight[1:]
        first = self.places.weight[:1].expand(samples, 1, -1)
        x = torch.cat([first, x], 1)
        for layer in self.layers:
            x = layer(x, None)
        return self.head(x[:, 0])  # type: ignore[no-any-return]


# Sequences -----------------------------------------------------------------------------------------------------------


class GPT(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, tokens: int, context: int, width: int = 48, depth: int = 2, heads: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.places = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.places.weight[: text.shape[1]]
        future = _future(text.shape[1], text.device)
        for layer in self.layers:
            x = layer(x, future)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


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


class Seq2Seq(nn.Module):
    """An encoder reads letters, a decoder speaks phonemes. 0 is padding in both; the decoder starts from 0."""

    def __init__(
        self, letters: int, phonemes: int, length: int = 12, width: int = 48, depth: int = 2, heads: int = 3
    ) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.phonemes = nn.Embedding(phonemes, width)
        self.letter_places = nn.Embedding(length, width)
        self.phoneme_places = nn.Embedding(length, width)
        self.encoder = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.decoder = nn.ModuleList(Layer(width, heads, crossed=True) for _ in range(depth))
        self.memory_norm = nn.LayerNorm(width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, phonemes)

    def forward(self, letters: Tensor, phonemes: Tensor) -> Tensor:
        """Logits of every phoneme, given the letters and the phonemes before it."""
        padding = (letters == 0)[:, None, None, :]
        memory = self.letters(letters) + self.letter_places.weight
        for layer in self.encoder:
            memory = layer(memory, padding)
        memory = self.memory_norm(memory)
        said = torch.cat([torch.zeros_like(phonemes[:, :1]), phonemes[:, :-1]], 1)
        future = _future(phonemes.shape[1], phonemes.device)
        x = self.phonemes(said) + self.phoneme_places.weight
        for layer in self.decoder:
            x = layer(x, future, (memory, padding))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


# Tables --------------------------------------------------------------------------------------------------------------


class WideDeep(nn.Module):
    """A linear part over the categories and two crossings of them, and a small network over their embeddings."""

    def __init__(
        self,
        sizes: Sequence[int],
        numbers: int,
        crossings: Sequence[tuple[int, int]],
        table: int = 8,
        hidden: Sequence[int] = (64, 32),
    ) -> None:
        super().__init__()
        self.sizes, self.crossings = tuple(sizes), tuple(crossings)
        crossed = [sizes[a] * sizes[b] for a, b in crossings]
        self.wide = nn.ModuleList(nn.Embedding(size, 1) for size in (*sizes, *crossed))
        self.deep = nn.ModuleList(nn.Embedding(size, table) for size in sizes)
        widths = (len(sizes) * table + numbers, *hidden)
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.head = nn.Linear(widths[-1], 1)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        """Logits [sample] of the label 1."""
        columns = list(categories.unbind(1))
        crossed = [columns[a] * self.sizes[b] + columns[b] for a, b in self.crossings]
        wide = sum(table(column)[:, 0] for table, column in zip(self.wide, columns + crossed, strict=True))
        x = torch.cat([*(table(column) for table, column in zip(self.deep, columns, strict=True)), numbers], 1)
        for layer in self.hidden:
            x = relu(layer(x))
        return self.head(x)[:, 0] + wide  # type: ignore[no-any-return]


class Factors(nn.Module):
    """A rating: the mean, what the user and the item add to it, and the product of their factors."""

    def __init__(self, users: int, items: int, mean: float, rank: int = 8) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, rank), nn.Embedding(items, rank)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        self.mean = nn.Parameter(torch.full((1,), mean))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        product = (self.users(users) * self.items(items)).sum(1)
        return self.mean + self.user_bias(users)[:, 0] + self.item_bias(items)[:, 0] + product


# Weights -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def draw(model: nn.Module, generator: torch.Generator, table: float = 0.02) -> None:
    """First weights, normal, as wide as the inputs of a layer allow; no biases.

    Convolutions twice the variance for the relu behind them, the head a tenth: first predictions are near uniform.
    Transformers as GPT-2: 0.02, less where a layer adds to its input. ``table``: the width of embeddings.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Embedding):
            layer.weight.normal_(0, table, generator=generator)
        elif isinstance(layer, nn.Linear | nn.Conv2d):
            gain = 2 if isinstance(layer, nn.Conv2d) else 0.1 if name == "head" else 1
            layer.weight.normal_(0, math.sqrt(gain / layer.weight[0].numel()), generator=generator)
            if layer.bias is not None:
                layer.bias.zero_()
    stack = [layer for layer in model.modules() if isinstance(layer, Layer)]
    inner = [(name, layer) for one in stack for name, layer in one.named_modules() if isinstance(layer, nn.Linear)]
    for name, layer in inner:
        share = math.sqrt(2 * len(stack)) if name.endswith("out") else 1
        layer.weight.normal_(0, 0.02 / share, generator=generator)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Up to four groups: ``embedding`` tables, the weight of the ``head``, ``hidden`` weights, ``vectors``.

    Optimizers for matrices, such as Muon, take ``hidden``.
    """
    tables = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    found: dict[str, list[nn.Parameter]] = {"embedding": [], "head": [], "hidden": [], "vectors": []}
    for name, parameter in model.named_parameters():
        if id(parameter) in tables:
            kind = "embedding"
        elif parameter.ndim < 2:
            kind = "vectors"
        else:
            kind = "head" if name == "head.weight" else "hidden"
        found[kind].append(parameter)
    return [{"name": kind, "params": parameters} for kind, parameters in found.items() if parameters]
