"""The block, and the four groups."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lab.tasks.streams import generator_of
from lab.tasks.transformer import Block


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 5, 8, generator=generator_of("x"))


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_the_fused_one_written_out(x: torch.Tensor, causal: bool) -> None:
    block = Block(8, 2, causal)
    block.draw(generator_of("block"), 1.0, depth=1)
    attention = block.attention
    parts = attention.joint(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
    fused = scaled_dot_product_attention(*parts, is_causal=causal).transpose(1, 2).reshape(2, 5, 8)
    torch.testing.assert_close(attention(x), attention.out(fused))


def test_the_temperature_divides_the_scores(x: torch.Tensor) -> None:
    attention = Block(8, 2, causal=False).attention
    attention.temperature = 0.5
    parts = attention.joint(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
    fused = scaled_dot_product_attention(*parts, scale=2 / 4**0.5).transpose(1, 2).reshape(2, 5, 8)
    torch.testing.assert_close(attention(x), attention.out(fused))


def test_a_causal_block_does_not_look_ahead(x: torch.Tensor) -> None:
    later = torch.cat([x[:, :3], -x[:, 3:]], 1)
    for causal in (True, False):
        block = Block(8, 2, causal)
        block.draw(generator_of("block"), 1.0, depth=1)
        assert torch.allclose(block(x)[:, :3], block(later)[:, :3]) == causal
