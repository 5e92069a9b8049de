"""Feed: an endless, drifting stream of users and items, in the manner of a recommender's training data.

Every sample is seen once. Three things are predicted at once: whether a user contributes (2 % do), likes (8 %) or
dwells (25 %).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, gelu

from hdet.errors import ArgumentError
from lab.tasks.metrics import auc, normalised_entropy
from lab.tasks.streams import check_count, check_place, generator_of
from lab.tasks.task import Batch, device_of, evaluating, moved
from lab.tasks.transformer import Block, four_groups, unseeded
from lab.tasks.world import BASE_RATES, TASKS, TOPICS, World

__all__ = ["FeedTask", "Ranker"]

VALIDATION_BATCHES, VALIDATION_SIZE = 16, 1024


class Ranker(nn.Module):
    """Tables for users and items, a transformer over the history with the shown item at its end, a head per task."""

    def __init__(self, users: int, items: int, history: int, width: int, depth: int) -> None:
        super().__init__()
        self.users = nn.Embedding(users, width)
        self.items = nn.Embedding(items, width)
        self.places = nn.Embedding(history + 1, width)
        self.blocks = nn.Sequential(*(Block(width, 2, causal=False) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.ModuleList([nn.Linear(4 * width, 4 * width), nn.Linear(4 * width, 2 * width)])
        self.heads = nn.Linear(2 * width, len(TASKS))

    def forward(self, user: Tensor, history: Tensor, item: Tensor) -> Tensor:
        tokens = self.items(torch.cat([history, item[:, None]], 1))
        seen = self.norm(self.blocks(tokens + self.places.weight))[:, -1]
        user, item = self.users(user), tokens[:, -1]
        x = torch.cat([user, item, user * item, seen], 1)
        for layer in self.hidden:
            x = gelu(layer(x))
        return self.heads(x)  # type: ignore[no-any-return]

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """The heads start at the base rates, which are known in advance in practice."""
        for table in (self.users, self.items, self.places):
            table.weight.normal_(0, 0.1, generator=generator)
        for block in self.modules():
            if isinstance(block, Block):
                block.draw(generator, 1 / math.sqrt(self.users.embedding_dim), len(self.blocks))
        for layer in self.hidden.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.normal_(0, math.sqrt(2 / layer.in_features), generator=generator)
                layer.bias.zero_()
        self.heads.weight.normal_(0, 0.1 / math.sqrt(self.heads.in_features), generator=generator)
        self.heads.bias.copy_(torch.tensor(BASE_RATES).logit())


class FeedTask:
    """Predict what users do with the items that they are shown.

    Args:
        users: users, who arrive equally often.
        items: items, a multiple of the 16 topics.
        history: items that a user saw before.
        width: numbers per embedding, even.
        depth: transformer blocks.
        batch_size: samples per replica and step.
        horizon: the sample of the stream where the held-out samples are taken; fashions drift (they come back after
            four million samples), so give the length of the run: steps times replicas times batch size.
        world: seed of the hidden truth. The seed of a run decides only which samples are drawn from it.
    """

    name = "feed"

    def __init__(
        self,
        users: int = 4000,
        items: int = 4000,
        history: int = 16,
        width: int = 32,
        depth: int = 2,
        batch_size: int = 256,
        horizon: int = 256_000,
        world: int = 0,
    ) -> None:
        check_count(users=users, items=items, history=history, width=width, depth=depth, batch_size=batch_size)
        check_count(horizon=horizon)
        if items % TOPICS or width % 2:
            raise ArgumentError(
                f"items must be a multiple of {TOPICS} and width of 2, but got items={items} and width={width}; "
                f"use items={-(-items // TOPICS) * TOPICS} and width={width + width % 2}"
            )
        self.width, self.depth, self.batch_size, self.horizon = width, depth, batch_size, horizon
        self.world = World(world, users, items, history)

    def model(self, seed: int) -> nn.Module:
        world = self.world
        model = unseeded(lambda: Ranker(world.users, world.items, world.history, self.width, self.depth))
        model.draw(generator_of("feed model", seed))
        return model

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return four_groups(model)

    def batch(self, seed: int, step: int, replica: int = 0, replicas: int = 1) -> Batch:
        """A step's samples follow those of the step before; each replica takes its part of them."""
        check_place(step, replica, replicas)
        index = (step * replicas + replica) * self.batch_size + torch.arange(self.batch_size)
        return self.world.samples("train", seed, index, time=index)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Log losses, summed over the three tasks and averaged over the samples."""
        *seen, labels = batch
        return binary_cross_entropy_with_logits(model(*seen), labels, reduction="none").sum(1).mean()

    def validation(self) -> list[Batch]:
        """16 batches of 1024 samples from the time after the horizon."""
        parts = torch.arange(VALIDATION_BATCHES * VALIDATION_SIZE).split(VALIDATION_SIZE)
        return [self.world.samples("validation", 0, part, self.horizon + part) for part in parts]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        with evaluating(model):
            device = device_of(model)
            held_out = [moved(batch, device) for batch in self.validation()]
            logits = torch.cat([model(*batch[:-1]) for batch in held_out])
            labels = torch.cat([batch[-1] for batch in held_out])
        every = binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="none")
        result = {"loss": float(every.sum(1).mean())}
        for k, task in enumerate(TASKS):
            result[f"auc_{task}"] = auc(logits[:, k], labels[:, k])
            result[f"ne_{task}"] = normalised_entropy(logits[:, k], labels[:, k])
        return result
