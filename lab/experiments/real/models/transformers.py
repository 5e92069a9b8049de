"""Attention, and what is made of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu


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


class LateLayer(Layer):
    """A layer of the first transformers: norms come after the sums, so a deep stack of them is slow to take off."""

    def forward(self, x: Tensor, hidden: Tensor | None, other: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x = self.own_norm(x + self.own(x, x, hidden))
        return self.mlp_norm(x + self.mlp_out(relu(self.mlp_in(x))))  # type: ignore[no-any-return]


def _future(length: int, device: torch.device) -> Tensor:
    """What a place may not look at: all that come after it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


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


class Encoder(GPT):
    """Characters in, logits for every place out, which looks both ways (as BERT)."""

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.places.weight[: text.shape[1]]
        for layer in self.layers:
            x = layer(x, None)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Causal(nn.Module):
    """Vectors of a sequence in, as many out, of which each knows those before it.

    The GPT has the same inside; its stored weights have other names.
    """

    def __init__(self, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.places = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        future = _future(x.shape[1], x.device)
        x = x + self.places.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x, future)
        return self.norm(x)  # type: ignore[no-any-return]


class ChordTransformer(nn.Module):
    """The notes of all voices in, for each voice logits of its next note out."""

    def __init__(self, notes: int, context: int, voices: int = 4, table: int = 16, width: int = 64) -> None:
        super().__init__()
        self.voices = voices
        self.notes = nn.Embedding(notes, table)
        self.first = nn.Linear(voices * table, width)
        self.past = Causal(context, width, depth=3, heads=4)
        self.head = nn.Linear(width, voices * notes)

    def forward(self, chords: Tensor) -> Tensor:
        """[sample, time, voice] -> [sample, time, voice, note]."""
        x = self.past(self.first(self.notes(chords).flatten(2)))
        return self.head(x).unflatten(-1, (self.voices, -1))


class NextThing(nn.Module):
    """What someone chose before in, scores of candidates for the next choice out (as SASRec, Kang and McAuley 2018).

    A thing has the same vector when it was chosen and when it is a candidate.
    """

    def __init__(self, things: int, context: int, width: int = 48, depth: int = 2, heads: int = 3) -> None:
        super().__init__()
        self.things = nn.Embedding(things, width)
        self.past = Causal(context, width, depth, heads)

    def forward(self, chosen: Tensor, following: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """[sample, time] twice and [sample, other] -> scores [sample, time] and [sample, time, other]."""
        x = self.past(self.things(chosen))
        return (x * self.things(following)).sum(-1), x @ self.things(others).mT


def patches_of(images: Tensor, side: int) -> Tensor:
    """[sample, 1, row, column] -> [sample, patch, point]: squares of so many points a side, row by row."""
    cut = images[:, 0].unflatten(2, (-1, side)).unflatten(1, (-1, side))
    return cut.transpose(2, 3).flatten(3).flatten(1, 2)


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
        x = self.patches(patches_of(images, self.patch)) + self.places.weight[1:]
        first = self.places.weight[:1].expand(len(images), 1, -1)
        x = torch.cat([first, x], 1)
        for layer in self.layers:
            x = layer(x, None)
        return self.head(x[:, 0])  # type: ignore[no-any-return]


class MaskedViT(nn.Module):
    """Some patches of an image in, the hidden ones out: a masked autoencoder (He et al. 2022).

    The encoder reads the shown patches alone. A shorter decoder gets what it makes of them, and for each hidden patch a
    vector that is the same for all.
    """

    def __init__(
        self, patches: int, points: int, width: int = 64, depth: tuple[int, int] = (4, 1), heads: int = 4
    ) -> None:
        super().__init__()
        self.patches = nn.Linear(points, width)
        self.places = nn.Embedding(patches, width)
        self.encoder, self.decoder = (nn.ModuleList(Layer(width, heads) for _ in range(count)) for count in depth)
        self.encoder_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.between = nn.Linear(width, width)
        self.missing = nn.Parameter(torch.zeros(width))
        self.decoder_places = nn.Embedding(patches, width)
        self.head = nn.Linear(width, points)

    def forward(self, shown: Tensor, order: Tensor) -> Tensor:
        """[sample, shown, point], and the places of all patches, shown ones first -> [sample, hidden, point]."""
        count = shown.shape[1]
        x = self.patches(shown) + self.places(order[:, :count])
        for layer in self.encoder:
            x = layer(x, None)
        known = self.between(self.encoder_norm(x))
        missing = self.missing.expand(len(x), order.shape[1] - count, -1)
        x = torch.cat([known, missing], 1) + self.decoder_places(order)
        for layer in self.decoder:
            x = layer(x, None)
        return self.head(self.norm(x[:, count:]))  # type: ignore[no-any-return]


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


# Low-rank adapters ---------------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """LoRA: a linear layer that stays, and a product of two thin matrices that is added to it; it begins at zero."""

    def __init__(self, layer: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.layer = layer
        inputs, outputs = layer.in_features, layer.out_features
        self.down = nn.Parameter(torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2 * linear(linear(x, self.down), self.up)  # type: ignore[no-any-return]


def adapted(model: nn.Module, generator: torch.Generator, rank: int = 8) -> nn.Module:
    """The model, frozen, with an adapter at every linear layer of its transformer layers."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach())
    for stack in [layer for layer in model.modules() if isinstance(layer, Layer)]:
        for owner in list(stack.modules()):
            for name, child in list(owner.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(owner, name, Adapter(child, rank, generator))
    return model
