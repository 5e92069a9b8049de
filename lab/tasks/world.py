"""The hidden truth behind the feed: who likes what, what they look for today, and how fashions drift.

Sample i of a stream is a function of (seed, i) alone. A user arrives, looking for one of a few topics; most of the
items that the user saw last are of that topic, so the history tells it; an item is shown; three things may happen.

    score_k = b_k + w_k · (taste of the user for the item, match of topic and item, quality of the item,
                           fashion of the item's topic at that time) + leaning of the user towards k
    label_k = 1 with probability sigmoid(score_k)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lab.tasks.streams import generator_of, key_of, uniforms

__all__ = ["BASE_RATES", "TASKS", "World"]

TASKS = ("contribution", "like", "long_dwell")
BASE_RATES = (0.02, 0.08, 0.25)
FACTORS, TOPICS = 8, 16
WEIGHTS = ((0.9, 1.3, 0.7, 0.6), (0.9, 1.2, 0.9, 0.5), (0.8, 1.2, 0.5, 0.7))  # rows: tasks
LEANING = 0.4  # standard deviation
ON_TOPIC_HISTORY, ON_TOPIC_ITEM = 0.7, 0.4  # chances
PERIOD = 4_000_000  # samples until a fashion comes back


class World:
    """Hidden factors of users and items, drawn once from ``seed``, and the samples that follow from them."""

    def __init__(self, seed: int, users: int, items: int, history: int) -> None:
        self.users, self.items, self.history = users, items, history
        generator = generator_of("feed world", seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.topics = normal(TOPICS, FACTORS)
        self.tastes = normal(users, FACTORS)
        self.item_topic = torch.arange(items) % TOPICS
        self.factors = 0.8 * self.topics[self.item_topic] + 0.6 * normal(items, FACTORS)
        self.quality = normal(items)
        self.leaning = LEANING * normal(users, len(TASKS))
        self.phases = torch.randperm(TOPICS, generator=generator) / TOPICS  # so that fashions even out at any time
        preferences = (self.tastes @ self.topics.T / math.sqrt(FACTORS)).softmax(1)
        self._looks_for = preferences.cumsum(1)[:, :-1].contiguous()
        self.match = _standard(self.topics @ self.factors.T)
        self.weights = torch.tensor(WEIGHTS)
        self.bias = torch.zeros(len(TASKS))
        self.bias = self._calibrated()

    def samples(self, stream: str, seed: int, index: Tensor, time: Tensor) -> tuple[Tensor, ...]:
        """User, history, item (integers) and labels (zeros and ones) of the samples ``index`` of a stream."""
        *seen, scores, draws = self.scored(stream, seed, index, time)
        return *seen, (draws < scores.sigmoid()).float()

    def scored(self, stream: str, seed: int, index: Tensor, time: Tensor) -> tuple[Tensor, ...]:
        """User, history, item, the true scores of the three tasks, and the numbers that decide the labels."""
        length = self.history
        u = uniforms(key_of("feed", stream, seed), index, 2 + 3 * (length + 1) + len(TASKS))
        user = (u[:, 0] * self.users).long()
        topic = (self._looks_for[user] <= u[:, 1:2]).sum(1)
        chance, other, which = u[:, 2 : 2 + 3 * (length + 1)].view(-1, 3, length + 1).unbind(1)
        on_topic = torch.full((length + 1,), ON_TOPIC_HISTORY)
        on_topic[-1] = ON_TOPIC_ITEM
        topics = torch.where(chance < on_topic, topic[:, None], (other * TOPICS).long())
        rank = (which.square() * (self.items // TOPICS)).long()  # some items of a topic are seen more often
        items = rank * TOPICS + topics
        item = items[:, -1]
        scores = self.scores(user, topic, item, time)
        return user, items[:, :-1].contiguous(), item, scores, u[:, -len(TASKS) :]

    def scores(self, user: Tensor, topic: Tensor, item: Tensor, time: Tensor) -> Tensor:
        """The true log-odds of the three tasks."""
        taste = (self.tastes[user] * self.factors[item]).sum(1) / math.sqrt(FACTORS)
        turns = time.double() / PERIOD + self.phases[self.item_topic[item]]
        fashion = math.sqrt(2) * (2 * math.pi * turns).sin().float()
        parts = torch.stack([taste, self.match[topic, item], self.quality[item], fashion], 1)
        return parts @ self.weights.T + self.leaning[user] + self.bias

    def _calibrated(self) -> Tensor:
        """The biases at which the labels have their base rates on the first quarter of a period, by halving."""
        index = torch.arange(16_384)
        scores = self.scored("calibration", 0, index, index * (PERIOD // 4 // len(index)))[3]
        low, high = torch.full((len(TASKS),), -12.0), torch.full((len(TASKS),), 4.0)
        for _ in range(24):
            middle = (low + high) / 2
            above = (scores + middle).sigmoid().mean(0) > torch.tensor(BASE_RATES)
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        return (low + high) / 2


def _standard(values: Tensor) -> Tensor:
    return (values - values.mean()) / values.std()
