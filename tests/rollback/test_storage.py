"""Where copies live. What needs a GPU is in test_gpu_snapshots.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from hdet.copies import copy_all_, put_back
from hdet.rollback import storage
from hdet.rollback.snapshots import Snapshots
from hdet.rollback.storage import Slabs, Storage, has_room, leaves


def test_a_copy_has_the_structure_and_uses_old_memory_where_it_fits() -> None:
    store = Storage()
    value = {"step": 3, "a": torch.ones(2), "more": [torch.zeros(3), (torch.tensor(5), "word")]}
    first = store.copied(value, None, True, Slabs())
    assert (first["step"], first["more"][1][1]) == (3, "word")
    assert [t.tolist() for t in leaves(first)] == [[1, 1], [0, 0, 0], 5]
    value["a"].mul_(7)
    more = [torch.zeros(4), (torch.tensor(6), "word")]
    second = store.copied({**value, "more": more}, first, True, Slabs(), beside=True)
    assert second["a"] is first["a"]
    assert second["a"].tolist() == [7, 7]
    assert second["more"][0].shape == (4,)
    assert second["more"][1][0] is first["more"][1][0]


class Moments(NamedTuple):
    first: Tensor
    rest: tuple[Any, ...]


def test_tuples_with_names_are_kept_as_they_are() -> None:
    """As optimizers may keep their state."""
    value = {"moments": Moments(torch.ones(2), (torch.zeros(1), 3))}
    copied = Storage().copied(value, None, True, Slabs())["moments"]
    assert type(copied) is Moments
    assert (copied.first.tolist(), copied.rest[1]) == ([1, 1], 3)


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
    monkeypatch.setattr(storage, "_free", lambda device: free if device.index == 0 else 10**9)
    needed = [OnDevice(0, 60), OnDevice(0, 40), OnDevice(1, 100)]
    assert has_room(needed) is fits  # type: ignore[arg-type]


def test_the_host_has_room() -> None:
    assert has_room([torch.ones(3)])


def test_tensors_of_many_kinds_are_copied_in_few_calls() -> None:
    sources = [torch.full((2,), float(i), dtype=(torch.float32, torch.float64)[i % 2]) for i in range(100)]
    targets = [torch.zeros(2, dtype=torch.float32) for _ in sources]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        copy_all_(zip(targets, sources, strict=True))
    assert [t[0].item() for t in targets] == list(range(100))
    assert sum(event.count for event in seen.key_averages() if event.key == "aten::_foreach_copy_") == 2


class Copies(TorchDispatchMode):
    """Notes which copies nothing waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.asynchronous: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {**dict(zip(("self", "src", "non_blocking"), args, strict=False)), **(kwargs or {})}
        if func is torch.ops.aten.copy_.default:
            self.asynchronous.append(bool(given.get("non_blocking", False)))
        return func(*args, **(kwargs or {}))


def test_a_copy_between_host_and_device_is_there_at_once_unless_memory_is_pinned() -> None:
    """Only CUDA devices are waited for, and an MPS device copies beside the host without pinned memory."""
    host, device = torch.ones(3), torch.ones(3, device="meta")
    with Copies() as seen:
        copy_all_([(device, host)])
    assert seen.asynchronous == [False]


def test_what_is_put_back_is_put_back_after_an_error_too() -> None:
    tensors = [torch.ones(2), torch.ones(3, dtype=torch.float64), torch.tensor([True])]
    with pytest.raises(KeyboardInterrupt), put_back(tensors) as own:
        assert all(map(torch.equal, own, tensors))
        for tensor in tensors:
            tensor.zero_()
        raise KeyboardInterrupt
    assert all(bool(tensor.all()) for tensor in tensors)


def test_slots_that_were_saved_come_back_on_the_host_until_they_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_free", lambda device: 10**9)
    near, far = (SGD([nn.Parameter(torch.ones(3, device=device))], lr=0.1) for device in ("cpu", "meta"))
    kept = Snapshots()
    for slot in (0, 1):
        kept.keep(slot, near, None)
    loaded = Snapshots.loaded(kept.saved(near), far)
    assert {slot: row["weights"][0].device.type for slot, row in loaded.saved(far)} == {0: "cpu", 1: "cpu"}
    loaded.keep(0, far, None)
    assert {slot: row["weights"][0].device.type for slot, row in loaded.saved(far)} == {0: "meta", 1: "cpu"}


def test_of_two_slots_the_second_lies_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    stays: dict[int, set[bool]] = {0: set(), 1: set()}
    kept, optimizer, copied = Snapshots(), SGD([nn.Parameter(torch.ones(3))], lr=0.1), Storage.copied
    for slot, seen in stays.items():

        def noting(
            self: Storage, value: Any, old: Any, on_device: bool, *more: Any, seen: Any = seen, **how: Any
        ) -> Any:
            seen.add(on_device)
            return copied(self, value, old, on_device, *more, **how)

        monkeypatch.setattr(Storage, "copied", noting)
        kept.keep(slot, optimizer, None)
    assert stays == {0: {True}, 1: {False}}


def test_a_snapshot_that_is_retired_goes_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing in a tensor of this device that could be copied."""
    monkeypatch.setattr(storage, "_free", lambda device: 10**9)
    monkeypatch.setattr(storage, "copy_all_", lambda pairs: None)
    kept, optimizer = Snapshots(host=(2,)), SGD([nn.Parameter(torch.ones(3, device="meta"))], lr=0.1)
    kept.keep(0, optimizer, None)
    kept.retire(0, 2)
    assert {slot: row["weights"][0].device.type for slot, row in kept.saved(optimizer)} == {0: "meta", 2: "cpu"}


def test_room_is_needed_for_what_the_optimizer_remembers_or_else_for_two_moments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def noting(tensors: list[Tensor]) -> bool:
        asked.append(len(tensors))
        return True

    monkeypatch.setattr("hdet.rollback.snapshots.has_room", noting)
    p = nn.Parameter(torch.ones(3))
    optimizer = SGD([p], lr=0.1, momentum=0.9)
    Snapshots().keep(0, optimizer, None)
    p.grad = torch.ones(3)
    optimizer.step()
    Snapshots().keep(0, optimizer, None)
    assert asked == [3, 2]


def test_two_places_that_shared_a_tensor_once_have_copies_of_their_own() -> None:
    """As if an optimizer's first step sets its last and its present gradient to the same tensor."""
    stored, slabs = Storage(), Slabs()
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    shared = stored.copied({"last": one, "now": one}, None, True, slabs)
    apart = stored.copied({"last": one, "now": two}, shared, True, slabs)
    assert (float(apart["last"]), float(apart["now"])) == (1, 2)
