"""The transformer block that the text and the feed task share, its initial weights and its parameter groups.

Attention is written out instead of calling the fused kernel: so the models also run under ``torch.func.vmap``, where a
stack of weights trains at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

__all__ = ["Attention", "Block", "four_groups", "unseeded"]

M = TypeVar("M", bound=nn.Module)


class Attention(nn.Module):
    """softmax(Q K' / (temperature sqrt(d))) V in several heads."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.temperature = 1.0  # of the softmax, a plain number: a knob may set it
        self.joint = nn.Linear(width, 3 * width)  # queries, keys and values
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.joint(x))

    def of(self, joint: Tensor) -> Tensor:
        """The output, given queries, keys and values side by side."""
        samples, length, width = joint.shape[0], joint.shape[1], joint.shape[2] // 3
        parts = joint.view(samples, length, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4).unbind(0)
        scores = queries @ keys.transpose(-2, -1) / (self.temperature * math.sqrt(width // self.heads))
        if self.causal:
            future = torch.ones(length, length, dtype=torch.bool, device=joint.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        mixed = scores.softmax(-1) @ values
        return self.out(mixed.transpose(1, 2).reshape(samples, length, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then two layers per place; each normalised before and added to its input."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp_out(gelu(self.mlp_in(self.mlp_norm(x))))  # type: ignore[no-any-return]

    @torch.no_grad()
    def draw(self, generator: torch.Generator, std: float, depth: int) -> None:
        """Normal weights, smaller where the block adds to its input: then the sum does not grow with the depth."""
        for layer in (self.attention.joint, self.mlp_in):
            layer.weight.normal_(0, std, generator=generator)
        for layer in (self.attention.out, self.mlp_out):
            layer.weight.normal_(0, std / math.sqrt(2 * depth), generator=generator)
        for layer in (self.attention.joint, self.attention.out, self.mlp_in, self.mlp_out):
            layer.bias.zero_()


def four_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The four groups of the paper, in alphabetical order.

    ``embedding``: tables; ``no_decay``: norms and biases; ``transformer``: the other weights of blocks;
    ``non_embedding``: all other weights.
    """
    names = ("embedding", "no_decay", "non_embedding", "transformer")
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in names}
    in_blocks = {id(p) for block in model.modules() if isinstance(block, Block) for p in block.parameters()}
    tables = {id(p) for table in model.modules() if isinstance(table, nn.Embedding) for p in table.parameters()}
    for parameter in model.parameters():
        if id(parameter) in tables:
            name = "embedding"
        elif parameter.ndim < 2:
            name = "no_decay"
        else:
            name = "transformer" if id(parameter) in in_blocks else "non_embedding"
        groups[name].append(parameter)
    return [{"name": name, "params": parameters} for name, parameters in groups.items()]


def unseeded(build: Callable[[], M]) -> M:
    """Build a model whose weights are drawn later, and leave the global generator where it was."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        return build()
