"""A recommender with three tasks on MovieLens: was a film watched, was it liked, and how was it rated?"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, gelu

from lab.tasks.metrics import auc, normalised_entropy
from lab.tasks.task import Batch, device_of, evaluating, moved
from real.data import ITEMS, USERS, load_or_stand_in
from real.models.weights import draws
from real.pools import Rows, Sampled, frozen
from real.task import RealTask

LIKED = 4
"""Ratings from this on, of 1 to 5."""
HELD_OUT = (4096, 1024)


class Tower(nn.Module):
    """Embeddings of a user and a film, their product beside them, two layers and a head for each task."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, width), nn.Embedding(ITEMS, width)
        self.hidden = nn.ModuleList([nn.Linear(3 * width, hidden), nn.Linear(hidden, hidden // 2)])
        self.head = nn.Linear(hidden // 2, 3)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """[sample, task]: logits of watched and liked, and the rating."""
        user, item = self.users(users), self.items(items)
        x = torch.cat([user, item, user * item], 1)
        for layer in self.hidden:
            x = gelu(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


class Recommender(RealTask):
    """Each rating with another film, drawn at random, that its user is taken not to have watched.

    The loss is the sum of the log losses of watched (of both films) and liked, and of half the squared error of the
    rating over its variance: the best constants have ln 2, the entropy of liked, and a half.

    Args:
        name: of the task.
        synthetic: with a stand-in for the data.
        width: of the embeddings.
        hidden: of the first layer.
        batch_size: ratings per step.
    """

    def __init__(
        self, name: str, synthetic: bool = False, width: int = 224, hidden: int = 512, batch_size: int = 64
    ) -> None:
        train, test = Rows.of(load_or_stand_in("movielens", synthetic), "users", "items", "ratings")
        ratings = train.tables[2].double()
        self._mean, self._deviation = float(ratings.mean()), float(ratings.std())
        share = float((test.tables[2] >= LIKED).double().mean())
        variance = float(((test.tables[2].double() - self._mean) / self._deviation).var(correction=0))
        entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
        self.constant_loss = math.log(2) + entropy + variance / 2
        """Of the best constant prediction."""
        super().__init__(
            name,
            Sampled(train, ITEMS, 1),
            frozen(Sampled(test, ITEMS, 1), name, test.count),
            HELD_OUT,
            draws(lambda: Tower(width, hidden), table=0.1),
            self._loss_of,
            batch_size,
        )

    def _logits(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of the films that were rated, and of the others."""
        users, items, _, others = batch
        return model(users.long(), items.long()), model(users.long(), others[:, 0].long() - 1)

    def _loss_of(self, model: nn.Module, batch: Batch) -> Tensor:
        rated, other = self._logits(model, batch)
        ratings = batch[2].float()
        watched = (
            binary_cross_entropy_with_logits(rated[:, 0], torch.ones_like(ratings))
            + binary_cross_entropy_with_logits(other[:, 0], torch.zeros_like(ratings))
        ) / 2
        liked = binary_cross_entropy_with_logits(rated[:, 1], (ratings >= LIKED).float())
        return watched + liked + (rated[:, 2] - (ratings - self._mean) / self._deviation).square().mean() / 2

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        with evaluating(model):
            held_out = [moved(batch, device_of(model)) for batch in self.validation()]
            losses = [float(self.loss(model, batch)) for batch in held_out]
            pairs = [self._logits(model, batch) for batch in held_out]
        rated, other = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        ratings = torch.cat([batch[2] for batch in held_out]).float()
        scores = {
            "watched": (torch.cat([rated[:, 0], other[:, 0]]), torch.cat([ratings * 0 + 1, ratings * 0])),
            "liked": (rated[:, 1], (ratings >= LIKED).float()),
        }
        result: dict[str, Any] = {"loss": math.fsum(losses) / len(losses)}
        for task, (logits, labels) in scores.items():
            result[f"auc_{task}"] = auc(logits, labels)
            result[f"ne_{task}"] = normalised_entropy(logits, labels)
        error = rated[:, 2] * self._deviation + self._mean - ratings
        return {**result, "rmse_rating": float(error.square().mean().sqrt())}
