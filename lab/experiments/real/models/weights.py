"""First weights, and which parameters belong together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from real.models.transformers import Layer


@torch.no_grad()
def drawn(model: nn.Module, generator: torch.Generator, table: float = 0.02, gain: float = 1.0) -> nn.Module:
    """The model with first weights, normal, as wide as the inputs of a layer allow; no biases.

    Convolutions twice the variance for the relu behind them, the head a tenth: first predictions are near uniform.
    Transformers as GPT-2: 0.02, less where a layer adds to its input. ``table``: the width of embeddings; ``gain``: 2
    for many linear layers with relus.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Embedding):
            layer.weight.normal_(0, table, generator=generator)
        elif isinstance(layer, nn.Linear | nn.Conv2d):
            own = 0.1 if name.rpartition(".")[2] == "head" else 2 if isinstance(layer, nn.Conv2d) else gain
            layer.weight.normal_(0, math.sqrt(own / layer.weight[0].numel()), generator=generator)
            if layer.bias is not None:
                layer.bias.zero_()
    stack = [layer for layer in model.modules() if isinstance(layer, Layer)]
    inner = [(name, layer) for one in stack for name, layer in one.named_modules() if isinstance(layer, nn.Linear)]
    for name, layer in inner:
        share = math.sqrt(2 * len(stack)) if name.endswith("out") else 1
        layer.weight.normal_(0, 0.02 / share, generator=generator)
    return model


def draws(make: Callable[[], nn.Module], **how: float) -> Callable[[torch.Generator], nn.Module]:
    """What gives a new model its first weights; ``how``: as :func:`drawn`."""
    return lambda generator: drawn(make(), generator, **how)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Up to four groups: ``embedding`` tables, the weight of the ``head``, ``hidden`` weights, ``vectors``.

    Optimizers for matrices, such as Muon, take ``hidden``.
    """
    tables = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    found: dict[str, list[nn.Parameter]] = {"embedding": [], "head": [], "hidden": [], "vectors": []}
    for name, parameter in model.named_parameters():
        if id(parameter) in tables:
            kind = "embedding"
        elif parameter.ndim < 2:
            kind = "vectors"
        else:
            kind = "head" if name == "head.weight" else "hidden"
        found[kind].append(parameter)
    return [{"name": kind, "params": parameters} for kind, parameters in found.items() if parameters]
