"""Rows of tables: a label, a rating, a price, a density."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from lab.tasks.task import Batch
from real.data import ADULT_CATEGORIES, DIAMOND_CATEGORIES, ITEMS, USERS, load_or_stand_in
from real.models.perceptrons import Flow
from real.models.tables import ColumnAttention, Factors, TableResidual, WideDeep
from real.models.weights import draws
from real.pools import Noised, Rows
from real.task import RealTask

CROSSINGS = ((1, 3), (2, 4))
"""Education with occupation, marital status with relationship."""
ROUNDING = 0.02
"""The width of the noise on numbers that were rounded: a density needs numbers that are not."""


def wide_deep(numbers: int) -> nn.Module:
    return WideDeep(ADULT_CATEGORIES, numbers, CROSSINGS)


def column_attention(numbers: int) -> nn.Module:
    return ColumnAttention(ADULT_CATEGORIES, numbers)


def adult(model: Callable[[int], nn.Module], name: str, synthetic: bool) -> RealTask:
    """Who earns much; the model is asked for by the count of numbers in a row."""
    train, test = Rows.of(load_or_stand_in("adult", synthetic), "categories", "numbers", "labels")
    numbers = train.tables[1].shape[1]
    return RealTask(name, train, test, (2048, 1024), draws(lambda: model(numbers)), _income_loss, 128)


def _income_loss(model: nn.Module, batch: Batch) -> Tensor:
    categories, numbers, labels = batch
    return binary_cross_entropy_with_logits(model(categories.long(), numbers), labels.float())


def movielens(name: str, synthetic: bool) -> RealTask:
    """Few factors and three epochs: more of either, and validation rather measures who stops first."""
    train, test = Rows.of(load_or_stand_in("movielens", synthetic), "users", "items", "ratings")
    mean = float(train.tables[2].float().mean())
    return RealTask(
        name, train, test, (2048, 1024), draws(lambda: Factors(USERS, ITEMS, mean), table=0.1), _rating_loss, 64
    )


def _rating_loss(model: nn.Module, batch: Batch) -> Tensor:
    users, items, ratings = batch
    predicted = model(users.long(), items.long())
    return (predicted - ratings.float()).square().mean()  # mse_loss fails under two vmaps


def diamonds(name: str, synthetic: bool) -> RealTask:
    """The price, as a logarithm."""
    train, test = Rows.of(load_or_stand_in("diamonds", synthetic), "categories", "numbers", "prices")
    numbers = train.tables[1].shape[1]
    return RealTask(
        name, train, test, (4096, 1024), draws(lambda: TableResidual(DIAMOND_CATEGORIES, numbers)), _price_loss, 128
    )


def _price_loss(model: nn.Module, batch: Batch) -> Tensor:
    categories, numbers, prices = batch
    return (model(categories.long(), numbers) - prices).square().mean()


def weather(name: str, synthetic: bool) -> RealTask:
    """How likely are the six numbers of an hour?"""
    train, test = Rows.of(load_or_stand_in("weather", synthetic), "hours")
    numbers = train.tables[0].shape[1]
    shapes = ((numbers,),)
    return RealTask(
        name,
        Noised(train, shapes),
        Noised(test, shapes),
        (4096, 1024),
        draws(lambda: Flow(numbers)),
        _density_loss,
        128,
        density=True,
    )


def _density_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Minus the logarithm of the density, in nats per number."""
    hours, noise = batch
    normal, volume = model(hours + ROUNDING * noise.to(hours.dtype))
    log_density = volume - 0.5 * (normal.square() + math.log(2 * math.pi)).sum(-1)
    return -log_density.mean() / hours.shape[1]
