"""Networks over rows of tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

__all__ = ["Factors", "WideDeep"]


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
