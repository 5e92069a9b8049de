"""Numbers by index, and places dealt to steps and replicas."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.tasks.streams import epoch_places, key_of, uniforms


def mixed(key: int, position: int) -> float:
    """The slow twin of ``uniforms``, with Python's unbounded integers."""
    mask = (1 << 64) - 1
    z = (key + position * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return ((z ^ z >> 31) >> 40) / 2**24


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(1, 60))
def test_uniforms_agree_with_their_slow_twin(key: int, sample: int, columns: int) -> None:
    row = uniforms(key, torch.tensor([sample]), columns)[0]
    assert row.tolist() == [mixed(key, sample * columns + column) for column in range(columns)]


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    u = uniforms(key_of("test"), torch.arange(20_000), 8).double()
    assert u.min() >= 0
    assert u.max() < 1
    histogram = torch.histc(u, 16, 0, 1) / u.numel()
    assert (histogram - 1 / 16).abs().max() < 0.002
    assert (torch.corrcoef(u.T) - torch.eye(8)).abs().max() < 0.03
    assert abs(float(torch.corrcoef(torch.stack([u[:-1, 0], u[1:, 0]]))[0, 1])) < 0.03


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 60), st.integers(0, 5))
def test_no_place_is_dealt_twice_in_an_epoch(size: int, replicas: int, more: int, seed: int) -> None:
    count = size * replicas + more
    steps = count // (size * replicas)
    dealt: dict[int, list[int]] = {}
    for step in range(2 * steps):
        for replica in range(replicas):
            epoch, places = epoch_places(f"test {seed}", count, size, step, replica, replicas)
            assert len(places) == size
            dealt.setdefault(epoch, []).extend(places.tolist())
    assert list(dealt) == [0, 1]
    for places in dealt.values():
        assert len(set(places)) == len(places) == steps * size * replicas
        assert set(places) <= set(range(count))
