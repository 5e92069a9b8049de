"""Where the samples come from: numbers that depend on their arguments alone, never on a global generator.

Two sources. :func:`uniforms` gives the numbers of sample i without those of the samples before it, for streams that
never end. :func:`epoch_places` deals the places of a finite data set, each once per epoch, to steps and replicas.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256

import torch
from torch import Tensor

from hdet.errors import ArgumentError

__all__ = ["check_count", "check_place", "epoch_places", "generator_of", "key_of", "uniforms"]

# splitmix64, public domain (S. Vigna): position n of the sequence is a mix of n times the first number.
_GOLDEN, _MIX_1, _MIX_2 = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def key_of(*words: str | int) -> int:
    """One signed 64-bit key for a list of words; neighbours are unrelated."""
    digest = sha256(":".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def generator_of(*words: str | int) -> torch.Generator:
    """A CPU generator for a list of words."""
    return torch.Generator(device="cpu").manual_seed(key_of(*words))


def uniforms(key: int, samples: Tensor, columns: int) -> Tensor:
    """``columns`` numbers in [0, 1) for each sample index: row i depends on ``key`` and ``samples[i]`` alone.

    >>> some, others = uniforms(7, torch.tensor([5, 6, 7]), 2), uniforms(7, torch.tensor([7]), 2)
    >>> bool((some[2] == others[0]).all())
    True
    """
    z = (samples[:, None] * columns + torch.arange(columns)) * _GOLDEN + key  # int64 wraps around, as it should
    z = (z ^ _shifted(z, 30)) * _MIX_1
    z = (z ^ _shifted(z, 27)) * _MIX_2
    return _shifted(z ^ _shifted(z, 31), 40).float() * 2.0**-24


def _shifted(z: Tensor, bits: int) -> Tensor:
    """A right shift that brings in zeros; torch's own repeats the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def epoch_places(words: str, count: int, size: int, step: int, replica: int, replicas: int) -> tuple[int, Tensor]:
    """Epoch of a step, and the ``size`` of ``count`` places that belong to one replica in it.

    Within an epoch no place is dealt twice, neither to one replica nor to two; what does not fill a step is left out,
    another part in every epoch.
    """
    steps = count // (size * replicas)
    if steps == 0:
        raise ArgumentError(
            f"a step of {replicas} replicas needs {size * replicas} samples, but the training data has {count}; "
            f"use batch_size={max(1, count // replicas)} or less, or fewer replicas"
        )
    epoch, turn = divmod(step, steps)
    first = (turn * replicas + replica) * size
    return epoch, _permutation(words, epoch, count)[first : first + size]


@lru_cache(maxsize=4)
def _permutation(words: str, epoch: int, count: int) -> Tensor:
    return torch.randperm(count, generator=generator_of("order", words, epoch))


def check_place(step: int, replica: int, replicas: int) -> None:
    """A batch is asked for by a step and a seat among the replicas."""
    if step < 0:
        raise ArgumentError(f"step must be at least 0, but got step={step}; the first step of a run is 0")
    if not 0 <= replica < replicas:
        raise ArgumentError(
            f"replica must be in 0 ... replicas - 1, but got replica={replica} and replicas={replicas}; "
            "give the rank and the world size"
        )


def check_count(**values: int) -> None:
    """Sizes of a task are positive integers."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ArgumentError(f"{name} must be an integer, at least 1, but got {name}={value!r}; leave it out")
