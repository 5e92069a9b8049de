"""Where copies live. What needs a GPU is in test_gpu_snapshots.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hdet.parameters import copy_all_, put_back
from hdet.rollback import snapshots
from hdet.rollback.snapshots import Storage, copied, leaves


def test_a_copy_has_the_structure_and_uses_old_memory_where_it_fits() -> None:
    store, pairs = Storage(), []
    value = {"step": 3, "a": torch.ones(2), "more": [torch.zeros(3), (torch.tensor(5), "word")]}
    first = copied(value, None, True, pairs)
    store.fill_(pairs)
    assert (first["step"], first["more"][1][1]) == (3, "word")
    assert [t.tolist() for t in leaves(first)] == [[1, 1], [0, 0, 0], 5]
    value["a"].mul_(7)
    again: list[tuple[Tensor, Tensor]] = []
    second = copied({**value, "more": [torch.zeros(4), (torch.tensor(6), "word")]}, first, True, again)
    store.fill_(again, beside=True)
    assert second["a"] is first["a"]
    assert second["a"].tolist() == [7, 7]
    assert second["more"][0].shape == (4,)
    assert second["more"][1][0] is first["more"][1][0]


class OnDevice:
    """Stands for a tensor of a device: only its place and size are looked at."""

    is_cpu = False

    def __init__(self, device: int, size: int) -> None:
        self.device, self.nbytes = torch.device("cuda", device), size


@pytest.mark.parametrize(("free", "fits"), [(200, True), (199, False)])
def test_copies_stay_on_a_device_while_half_of_what_is_free_is_enough(
    free: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred bytes on each of two devices; the second has room enough."""
    monkeypatch.setattr(snapshots, "_free", lambda device: free if device.index == 0 else 10**9)
    needed = [OnDevice(0, 60), OnDevice(0, 40), OnDevice(1, 100)]
    assert Storage.has_room(needed) is fits  # type: ignore[arg-type]


def test_the_host_has_room() -> None:
    assert Storage.has_room([torch.ones(3)])


def test_tensors_of_many_kinds_are_copied_in_few_calls() -> None:
    sources = [torch.full((2,), float(i), dtype=(torch.float32, torch.float64)[i % 2]) for i in range(100)]
    targets = [torch.zeros(2, dtype=torch.float32) for _ in sources]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        copy_all_(zip(targets, sources, strict=True))
    assert [t[0].item() for t in targets] == list(range(100))
    assert sum(event.count for event in seen.key_averages() if event.key == "aten::_foreach_copy_") == 2


def test_what_is_put_back_is_put_back_after_an_error_too() -> None:
    tensors = [torch.ones(2), torch.ones(3, dtype=torch.float64), torch.tensor([True])]
    with pytest.raises(KeyboardInterrupt), put_back(tensors) as own:
        assert all(map(torch.equal, own, tensors))
        for tensor in tensors:
            tensor.zero_()
        raise KeyboardInterrupt
    assert all(bool(tensor.all()) for tensor in tensors)
