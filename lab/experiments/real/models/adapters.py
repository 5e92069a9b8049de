"""Low-rank adapters (LoRA) beside the layers of a model that does not change any more."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from real.models.transformers import Layer


class Adapter(nn.Module):
    """A linear layer that stays, and a product of two thin matrices that is added to it; it begins at zero."""

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
