"""A deep transformer as large language models are built: rotary places, RMSNorm, gated layers, no biases."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from real.models.weights import drawn


def _turned(x: Tensor) -> Tensor:
    """Queries or keys [sample, head, time, feature], each pair of features turned by an angle that grows with time."""
    half = x.shape[-1] // 2
    speed = torch.exp(-math.log(10_000) * torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * speed
    sine, cosine = angle.sin(), angle.cos()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cosine - b * sine, a * sine + b * cosine], -1)


class Block(nn.Module):
    """Attention to what came before, then a gated layer; each is added to its input."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.gated_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.joint = nn.Linear(width, 3 * width, bias=False)  # queries, keys, values
        self.mixed_out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.wide = nn.Linear(width, hidden, bias=False)
        self.gated_out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        joint = self.joint(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = joint.permute(2, 0, 3, 1, 4).unbind(0)
        scores = _turned(queries) @ _turned(keys).mT / math.sqrt(queries.shape[-1])
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ values
        x = x + self.mixed_out(mixed.transpose(1, 2).flatten(2))
        normed = self.gated_norm(x)
        return x + self.gated_out(silu(self.gate(normed)) * self.wide(normed))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Tokens in, logits of the next one out (Touvron et al. 2023). As it stands it has 51 million weights."""

    def __init__(self, tokens: int, width: int = 512, depth: int = 16, heads: int = 8, hidden: int = 1376) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)

    @torch.no_grad()
    def drawn(self, generator: torch.Generator) -> Llama:
        """With first weights; what adds to its input is thinner the more blocks there are, as in GPT-2."""
        drawn(self, generator)
        for block in self.blocks:
            for layer in (block.mixed_out, block.gated_out):
                layer.weight /= math.sqrt(2 * len(self.blocks))
        return self

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text)
        future = torch.ones(text.shape[1], text.shape[1], dtype=torch.bool, device=text.device).triu(1)
        for block in self.blocks:
            x = block(x, future)
        return self.head(self.norm(x))  # type: ignore[no-any-return]
