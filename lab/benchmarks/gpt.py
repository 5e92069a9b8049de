"""A GPT, and text for it that needs no data: what is timed is the same whatever the tokens are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

VOCABULARY = 256


class Size(NamedTuple):
    """A model, and what it sees in a step."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    bf16: bool
    """Whether forward passes run under autocast."""
    vocabulary: int = VOCABULARY


SIZES = {
    "gpt-0.02M": Size(2, 32, 2, 16, 4, bf16=False),
    "gpt-0.8M": Size(4, 128, 4, 64, 16, bf16=False),
    "gpt-10M": Size(8, 320, 5, 256, 16, bf16=True),
    "gpt-86M": Size(12, 768, 12, 512, 16, bf16=True),
    "gpt-1B": Size(20, 2048, 16, 512, 4, bf16=True),
}


class Block(nn.Module):
    """Attention and a network of two layers, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.attend(self.first(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(n, length, width))
        return x + self.network(self.second(x))


class GPT(nn.Module):
    """Tokens to logits of the next ones."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm, self.out = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        out: Tensor = self.out(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))
        return out


def batches(size: Size, number: int, device: torch.device) -> list[Tensor]:
    """Sentences in which a token follows from the one before, now and then from a die."""
    dice = torch.Generator().manual_seed(0)
    rows = [torch.randint(size.vocabulary, (number * size.batch,), generator=dice)]
    for _ in range(size.context):
        follows = (5 * rows[-1] + 7) % size.vocabulary
        drawn = torch.randint(size.vocabulary, follows.shape, generator=dice)
        rows.append(torch.where(torch.rand(follows.shape, generator=dice) < 0.2, drawn, follows))
    return list(torch.stack(rows, 1).to(device).split(size.batch))


def loss_of(size: Size, model: nn.Module, batch: Tensor) -> Tensor:
    """Of predicting each token from those before it."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=size.bf16):
        logits = model(batch[:, :-1])
    return cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
