"""Rows of tables: a label, a rating, a price, a density."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from hdet.tasks.task import Batch
from real.data import ADULT_CATEGORIES, ITEMS, USERS, load_or_stand_in
from real.models.tables import Factors, WideDeep
from real.models.weights import drawn
from real.pools import Rows, held_out
from real.task import RealTask

__all__ = ["adult", "movielens", "wide_deep"]

CROSSINGS = ((1, 3), (2, 4))
"""Education with occupation, marital status with relationship."""


def wide_deep(numbers: int) -> nn.Module:
    return WideDeep(ADULT_CATEGORIES, numbers, CROSSINGS)


def adult(model: Callable[[int], nn.Module], name: str, synthetic: bool) -> RealTask:
    """Who earns much; the model is asked for by the count of numbers in a row."""
    train, test = Rows.of(load_or_stand_in("adult", synthetic), "categories", "numbers", "labels")
    numbers = train.tables[1].shape[1]
    return RealTask(
        name,
        train,
        held_out(test, 2048, 1024),
        lambda generator: drawn(model(numbers), generator),
        _income_loss,
        batch_size=128,
    )


def _income_loss(model: nn.Module, batch: Batch) -> Tensor:
    categories, numbers, labels = batch
    return binary_cross_entropy_with_logits(model(categories.long(), numbers), labels.float())


def movielens(name: str, synthetic: bool) -> RealTask:
    """Few factors and three epochs: more of either, and validation rather measures who stops first."""
    train, test = Rows.of(load_or_stand_in("movielens", synthetic), "users", "items", "ratings")
    mean = float(train.tables[2].float().mean())
    return RealTask(
        name,
        train,
        held_out(test, 2048, 1024),
        lambda generator: drawn(Factors(USERS, ITEMS, mean), generator, table=0.1),
        _rating_loss,
        batch_size=64,
    )


def _rating_loss(model: nn.Module, batch: Batch) -> Tensor:
    users, items, ratings = batch
    predicted = model(users.long(), items.long())
    return (predicted - ratings.float()).square().mean()  # mse_loss fails under two vmaps
