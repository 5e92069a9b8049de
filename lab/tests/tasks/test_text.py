"""The text task: what it reads, what it holds out, what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from hdet.errors import ArgumentError
from lab.tasks import TextTask, text
from lab.tasks.text import MAX_BYTES

TINY = {"width": 8, "depth": 1, "heads": 2, "context": 12, "batch_size": 8}


@pytest.fixture(scope="module")
def library() -> TextTask:
    return TextTask(**TINY)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> TextTask:
    """Each four bytes of the text occur once, so a window tells where it is from."""
    whole = b"".join(n.to_bytes(4, "big") for n in range(1500))
    monkeypatch.setattr(text, "library", lambda: (whole[:5700], whole[5700:]))
    return TextTask(**(TINY | {"context": 16}))


def test_size_at_the_defaults() -> None:
    model = TextTask().model(0)
    assert 0.65e6 < sum(parameter.numel() for parameter in model.parameters()) < 0.7e6


def test_the_library_is_python_source_with_a_twentieth_held_out(library: TextTask) -> None:
    train, held_out = (bytes(text.tolist()) for text in (library._train[:200_000], library._held_out[:200_000]))
    assert b"import " in train
    assert b"def " in held_out
    total = len(library._train) + len(library._held_out)
    assert 1_000_000 < total <= MAX_BYTES
    assert 0.02 < len(library._held_out) / total < 0.1


def test_targets_are_the_following_bytes(counting: TextTask) -> None:
    for before, following in (counting.batch(0, 3), *counting.validation()):
        assert torch.equal(before[:, 1:], following[:, :-1])
        assert before.dtype == torch.long


def test_replicas_and_steps_of_an_epoch_share_no_byte(counting: TextTask) -> None:
    starts = [
        place
        for step in range(counting_steps(counting, 3))
        for replica in range(3)
        for place in _starts(counting, counting.batch(0, step, replica, 3)[0])
    ]
    gaps = torch.tensor(sorted(starts)).diff()
    assert gaps.min() >= counting.context


def test_the_next_epoch_cuts_elsewhere(counting: TextTask) -> None:
    later = counting_steps(counting, 1)
    cuts = {_starts(counting, counting.batch(0, step)[0])[0] % counting.context for step in (0, later, 2 * later)}
    assert len(cuts) > 1


def test_training_never_sees_the_end_of_a_file(counting: TextTask) -> None:
    assert len(counting._train) == 5700
    for _, following in counting.validation():
        windows = [bytes(row) for row in following.tolist()]
        assert not any(window in bytes(counting._train.tolist()) for window in windows)


def test_bits_per_byte(library: TextTask) -> None:
    result = library.evaluate(library.model(0))
    assert result["bits_per_byte"] == pytest.approx(8, abs=0.2)
    assert result["loss"] == pytest.approx(result["bits_per_byte"] * math.log(2))


def test_refused() -> None:
    with pytest.raises(ArgumentError, match="width must be a multiple of heads, but got width=10 and heads=4"):
        TextTask(width=10)


def counting_steps(task: TextTask, replicas: int) -> int:
    """Steps of an epoch."""
    windows = (len(task._train) - 1) // task.context - 1
    return windows // (task.batch_size * replicas)


def _starts(task: TextTask, windows: torch.Tensor) -> list[int]:
    whole = bytes(task._train.tolist())
    return [whole.index(bytes(window)) for window in windows.tolist()]
