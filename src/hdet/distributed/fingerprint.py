"""Fingerprints: numbers that tell whether replicas hold the same tensors without sending them."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

import torch
from torch import Tensor

from hdet.distributed.shards import local

__all__ = ["bits", "halves", "words"]

_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WEIGHT = -7046029254386353131  # odd, as a signed 64-bit number: the golden ratio times 2**64
_MIX = 6364136223846793005
_CHUNK = 1 << 20
_HALF = 0xFFFFFFFF


def halves(bits64: int) -> list[float]:
    """64 bits as two numbers that a float64 holds exactly."""
    return [float(bits64 & _HALF), float((bits64 >> 32) & _HALF)]


def words(parts: Iterable[str]) -> float:
    """48 bits over some texts: exact as a float64."""
    return float(int.from_bytes(sha256(";".join(parts).encode()).digest()[:6], "big"))


def bits(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """64 bits over every bit that this rank holds of the tensors, and its position: an int64 scalar on ``device``.

    Stays on the device: nothing is synchronised. Extra memory is a few times a chunk of a million elements.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        own = local(tensor).detach()
        real = torch.view_as_real(own) if own.is_complex() else own
        for chunk in real.reshape(-1).split(_CHUNK):
            total = total * _MIX + _weighted_sum(chunk).to(device)
    return total


def _weighted_sum(chunk: Tensor) -> Tensor:
    """Sum of bits_i * w_i modulo 2**64, with odd weights that depend on the position."""
    integers = chunk.view(_INTEGER_OF_SIZE[chunk.element_size()]).long()
    weights = torch.arange(1, chunk.numel() + 1, device=chunk.device).mul_(_WEIGHT).bitwise_or_(1)
    return (integers * weights).sum()
