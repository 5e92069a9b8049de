"""Many tensors as few vectors: whatever their kinds, nothing is lost, and sums are those over the tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hdet.search import pieces as module
from hdet.search.pieces import Pieces

pytestmark = pytest.mark.quick


def some_tensors() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 5, 7, generator=g).to(memory_format=torch.channels_last)
    return [
        torch.randn(4, 9, generator=g),
        torch.randn((), generator=g),
        torch.randn(11, generator=g).bfloat16(),
        torch.randn(3, 2, generator=g, dtype=torch.complex64),
        images,
        torch.randn(6, 8, generator=g).t(),
        torch.randn(5, generator=g, dtype=torch.float64),
        torch.zeros(0),
    ]


@pytest.mark.parametrize("longest", [4, 7, 1000])
def test_there_and_back(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", longest)
    tensors = some_tensors()
    pieces = Pieces(tensors)
    kept = pieces.copied(tensors)
    assert {vector.dtype for vector in kept} == {torch.float32, torch.float64}
    for mine, theirs in zip(pieces.as_tensors(kept, tensors), tensors, strict=True):
        assert torch.equal(mine, theirs.to(mine.dtype))
    for vector, whole in zip(pieces.gathered(tensors, 0), kept, strict=True):
        assert torch.equal(vector, whole)
    assert all(map(torch.equal, tensors, some_tensors()))  # read, never written to


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 20))
def test_pieces_hold_every_number_once_and_are_no_longer_than_they_may(sizes: list[int], longest: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", longest)
        tensors, first = [], 0
        for size in sizes:
            tensors.append(torch.arange(first, first + size, dtype=torch.float32))
            first += size
        vectors = Pieces(tensors).copied(tensors)
    assert torch.cat(vectors).tolist() == list(range(first))
    assert all(len(vector) <= longest for vector in vectors)


def test_a_tensor_that_is_missing_is_zero_and_two_scratches_do_not_disturb_each_other() -> None:
    tensors = [torch.ones(3), torch.ones(2)]
    pieces = Pieces(tensors)
    for whole, part in zip(pieces.gathered(tensors, 0), pieces.gathered([None, tensors[1]], 1), strict=True):
        assert whole.tolist() == [1, 1, 1, 1, 1]
        assert part.tolist() == [0, 0, 0, 1, 1]
    for again in pieces.gathered(tensors, 1):
        assert again.tolist() == [1, 1, 1, 1, 1]


def test_a_tensor_that_fills_a_piece_is_read_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 8)
    tensors = [torch.arange(3.0), torch.arange(8.0).view(2, 4), torch.arange(8.0).view(4, 2).t(), torch.arange(3.0)]
    pieces = Pieces(tensors)
    seen = [vector.data_ptr() for vector in pieces.gathered(tensors, 0)]
    assert len(seen) == 4
    assert seen[1] == tensors[1].data_ptr()
    assert tensors[2].data_ptr() not in seen  # not in the order of memory
    way = list(pieces.displacement([t + 1 for t in tensors]))
    assert all(bool((vector == -1).all()) for vector in way)
    assert tensors[1].flatten().tolist() == list(range(8))


def test_many_tensors_are_few_calls() -> None:
    """On a device each call is a launch or a few: 300 parameters must not be 300 of them."""
    tensors = [torch.randn(16, 16) for _ in range(300)]
    pieces = Pieces(tensors)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for _ in pieces.gathered(tensors, 0):
            pass
    calls = [event for event in seen.key_averages() if event.key == "aten::_foreach_copy_"]
    assert sum(event.count for event in calls) == 1
