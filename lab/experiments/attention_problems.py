"""Two problems with the temperature of an attention layer as a knob: one whose best value is known, and a GPT.

The temperature is a parameter of one number in a group of its own, whose rate is 0: so every run of a stack has one,
and it acts in training, in probes and in validation alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

import checkout  # noqa: F401 - so that lab is found
import torch
from torch import Tensor, nn

from lab.tasks import TextTask
from lab.tasks.streams import generator_of
from lab.tasks.task import Batch, Task
from lab.tasks.transformer import Attention

__all__ = ["GROUP", "PROBLEMS", "Known", "Problem", "SmallGPT", "with_temperature"]

GROUP = "temperature"
"""The parameter group of the temperature."""


class Problem(Task, Protocol):
    """A task whose model has a temperature."""

    steps: int
    rate: float
    """The peak of OneCycle, with Adam."""

    def probe(self, k: int) -> Batch:
        """Of round ``k``, the same for all arms; never trained on."""
        ...


def with_temperature(model: nn.Module) -> nn.Module:
    """The model with one temperature, a parameter that all its attention layers share."""
    shared = nn.Parameter(torch.ones(()))
    for layer in attentions(model):
        layer.temperature = shared  # type: ignore[assignment]  # a number elsewhere; both divide
    return model


def attentions(model: nn.Module) -> list[Attention]:
    """Its attention layers."""
    return [layer for layer in model.modules() if isinstance(layer, Attention)]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """What is trained, and the temperature."""
    named = list(model.named_parameters())
    apart = [p for name, p in named if name.endswith(GROUP)]
    rest = [p for name, p in named if not name.endswith(GROUP)]
    return [{"name": "trained", "params": rest}, {"name": GROUP, "params": apart}]


class Known:
    """Imitate a frozen attention layer of temperature 1: queries and keys are given, values and output are learned."""

    name = "known"
    width, heads, length, noise = 16, 2, 12, 0.3
    sharp = 0.354
    """Deviation of the weights of queries and keys, by which scores have a deviation of 2."""

    def __init__(self, steps: int = 800, rate: float = 1e-2, batch_size: int = 32) -> None:
        self.steps, self.rate, self.batch_size = steps, rate, batch_size

    @cached_property
    def teacher(self) -> Attention:
        return self._layer("teacher")

    def plain_model(self, seed: int) -> nn.Module:
        """As a user has it: the temperature is a plain number."""
        return Imitation(self._layer("student", seed), self.teacher)

    def model(self, seed: int) -> nn.Module:
        return with_temperature(self.plain_model(seed))

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return two_groups(model)

    def batch(self, seed: int, step: int, replica: int = 0, replicas: int = 1) -> Batch:
        return self._samples(self.batch_size, self.noise, "train", seed, step, replica)

    def probe(self, k: int) -> Batch:
        return self._samples(128, self.noise, "probe", k)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    def validation(self) -> list[Batch]:
        """Outputs without noise."""
        return [self._samples(512, 0.0, "validation")]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            return {"loss": float(self.loss(model, self.validation()[0]))}

    def _layer(self, *words: str | int) -> Attention:
        generator, layer = generator_of("known", *words), Attention(self.width, self.heads, causal=False)
        with torch.no_grad():
            layer.joint.weight.normal_(0, self.sharp, generator=generator)
            layer.out.weight.normal_(0, 1 / math.sqrt(self.width), generator=generator)
            layer.joint.bias.zero_()
            layer.out.bias.zero_()
        return layer

    @torch.no_grad()
    def _samples(self, count: int, noise: float, *words: str | int) -> Batch:
        generator = generator_of("known", *words)
        x = torch.randn(count, self.length, self.width, generator=generator)
        return x, self.teacher(x) + noise * torch.randn(x.shape, generator=generator)


class Imitation(nn.Module):
    """A layer that has the queries and keys of another one, frozen."""

    def __init__(self, layer: Attention, other: Attention) -> None:
        super().__init__()
        self.layer = layer
        fixed = 2 * layer.out.in_features  # queries and keys come first
        self._learned: Tensor
        self.register_buffer("_learned", (torch.arange(layer.joint.out_features) >= fixed).float())
        with torch.no_grad():
            layer.joint.weight[:fixed] = other.joint.weight[:fixed]

    def forward(self, x: Tensor) -> Tensor:
        joint = self.layer.joint
        weight, bias = _held(joint.weight, self._learned[:, None]), _held(joint.bias, self._learned)
        return self.layer.of(nn.functional.linear(x, weight, bias))


def _held(tensor: Tensor, learned: Tensor) -> Tensor:
    """The tensor, whose gradient is 0 where it is not learned."""
    return learned * tensor + (1 - learned) * tensor.detach()


class SmallGPT(TextTask):
    """Predict the next byte of Python source; half of the held-out windows are for probes."""

    def __init__(self, steps: int, rate: float = 3e-3, **options: Any) -> None:
        super().__init__(**options)
        self.name, self.steps, self.rate = "gpt", steps, rate

    @cached_property
    def _held(self) -> list[Batch]:
        return super().validation()

    def plain_model(self, seed: int) -> nn.Module:
        """As a user has it: the temperature is a plain number."""
        return super().model(seed)

    def model(self, seed: int) -> nn.Module:
        return with_temperature(self.plain_model(seed))

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return two_groups(model)

    def probe(self, k: int) -> Batch:
        probes = self._held[::2]
        return probes[k % len(probes)]

    def validation(self) -> list[Batch]:
        return self._held[1::2]


PROBLEMS: dict[str, Callable[[], Known | SmallGPT]] = {
    "known": Known,
    "gpt-small": lambda: SmallGPT(300, width=32, depth=2, heads=4, context=32, batch_size=16),
    "gpt": lambda: SmallGPT(1500, width=128, depth=5, heads=4, context=64, batch_size=32),
}
