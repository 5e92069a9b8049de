"""Networks over rows of tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, relu

from real.models.perceptrons import Perceptron
from real.models.transformers import Layer


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


class Columns(nn.Module):
    """Categories as embeddings, and numbers beside them."""

    def __init__(self, sizes: Sequence[int], numbers: int, table: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, table) for size in sizes)
        self.width = len(sizes) * table + numbers

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        columns = zip(self.tables, categories.unbind(1), strict=True)
        return torch.cat([*(table(column) for table, column in columns), numbers], 1)


class TableResidual(nn.Module):
    """A wide network over a row, of blocks that add to their input."""

    def __init__(self, sizes: Sequence[int], numbers: int, width: int = 96, blocks: int = 3) -> None:
        super().__init__()
        self.columns = Columns(sizes, numbers)
        self.first = nn.Linear(self.columns.width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        """One number per row."""
        x = self.first(self.columns(categories, numbers))
        for norm, inner, outer in zip(self.norms, self.inner, self.outer, strict=True):
            x = x + outer(relu(inner(norm(x))))
        return self.head(self.norm(x))[:, 0]  # type: ignore[no-any-return]


class ColumnAttention(nn.Module):
    """Every column of a row is a token, and so is the answer, which looks at them (FT-Transformer, Gorishniy 2021).

    A category has a vector of its own; a number is a multiple of its column's.
    """

    def __init__(self, sizes: Sequence[int], numbers: int, width: int = 64, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.numbers = nn.Embedding(numbers, width)
        self.places = nn.Embedding(1 + len(sizes) + numbers, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        """Logits [sample] of the label 1."""
        columns = zip(self.tables, categories.unbind(1), strict=True)
        named = torch.stack([table(column) for table, column in columns], 1)
        x = torch.cat([named, numbers[..., None] * self.numbers.weight], 1) + self.places.weight[1:]
        x = torch.cat([self.places.weight[:1].expand(len(x), 1, -1), x], 1)
        for layer in self.layers:
            x = layer(x, None)
        return self.head(self.norm(x[:, 0]))[:, 0]  # type: ignore[no-any-return]


class SkipGram(nn.Module):
    """Two vectors for each word: as the one in the middle, and as one nearby."""

    def __init__(self, words: int, width: int = 24) -> None:
        super().__init__()
        self.middle, self.nearby = nn.Embedding(words, width), nn.Embedding(words, width)

    def forward(self, words: Tensor, others: Tensor) -> Tensor:
        """How well each word goes with each of its others: [sample, other]."""
        return (self.middle(words)[:, None] * self.nearby(others)).sum(-1)


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


class ComplEx(nn.Module):
    """Which thing does a subject stand in a relation to? Products of complex vectors (Trouillon et al. 2016)."""

    def __init__(self, entities: int, relations: int, rank: int = 16) -> None:
        super().__init__()
        self.entities, self.relations = nn.Embedding(entities, 2 * rank), nn.Embedding(relations, 2 * rank)

    def forward(self, subjects: Tensor, relations: Tensor) -> Tensor:
        """Logits [sample, entity]: the real part of subject times relation times the conjugate of the entity."""
        a, b = self.entities(subjects).chunk(2, -1)
        c, d = self.relations(relations).chunk(2, -1)
        real, imaginary = self.entities.weight.chunk(2, -1)
        return (a * c - b * d) @ real.T + (a * d + b * c) @ imaginary.T


class Ordinal(nn.Module):
    """Ordered classes: a network gives a score, and cuts that never cross part the scores (McCullagh 1980)."""

    def __init__(self, numbers: int, classes: int, hidden: int = 32) -> None:
        super().__init__()
        self.score = Perceptron((numbers, hidden, 1))
        self.first = nn.Parameter(torch.full((1,), 1 - classes / 2))  # the first cuts lie evenly around 0
        self.log_gaps = nn.Parameter(torch.zeros(classes - 2))

    def forward(self, x: Tensor) -> Tensor:
        """The logarithms of the probabilities [sample, class].

        sigmoid(a) - sigmoid(b) is sigmoid(a) sigmoid(-b) (1 - exp(b - a)), whose logarithm never cancels.
        """
        gaps = self.log_gaps.exp()
        over = torch.cat([self.first, self.first + gaps.cumsum(0)]) - self.score(x)
        below, above = logsigmoid(over), logsigmoid(-over)
        between = below[:, 1:] + above[:, :-1] + (-torch.expm1(-gaps)).log()
        return torch.cat([below[:, :1], between, above[:, -1:]], 1)
