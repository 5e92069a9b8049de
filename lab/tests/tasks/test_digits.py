"""The digits task: augmentation, splits, own images, errors."""

from __future__ import annotations

import importlib

import pytest
import torch

from hdet.errors import ArgumentError
from lab.tasks import DigitsTask, digits


@pytest.fixture(scope="module")
def task() -> DigitsTask:
    return DigitsTask()


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No augmentation."""
    for name in ("SHIFT", "CONTRAST", "NOISE"):
        monkeypatch.setattr(digits, name, 0)


def rows(images: torch.Tensor) -> set[tuple[float, ...]]:
    return {tuple(image) for image in images.flatten(1).tolist()}


def test_size_and_groups_at_the_defaults(task: DigitsTask) -> None:
    model = task.model(0)
    assert 30_000 < sum(parameter.numel() for parameter in model.parameters()) < 60_000
    assert [group["name"] for group in task.groups(model)] == ["convolution", "head", "no_decay"]
    assert sum(1 for _ in model.buffers()) == 9  # running statistics of three BatchNorms


@pytest.mark.usefixtures("plain")
def test_an_epoch_shows_each_training_image_once_and_none_that_is_held_out(task: DigitsTask) -> None:
    seen = [task.batch(0, step, replica, 2)[0] for step in range(11) for replica in range(2)]
    assert len(rows(torch.cat(seen))) == 22 * 64
    (held_out, labels), *others = task.validation()
    assert not others
    assert len(labels) == 359
    assert not rows(torch.cat(seen)) & rows(held_out)


def test_augmentation_shifts_by_a_pixel(task: DigitsTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "CONTRAST", 0)
    monkeypatch.setattr(digits, "NOISE", 0)
    shifted, _ = task.batch(0, 0)
    monkeypatch.setattr(digits, "SHIFT", 0)
    original, _ = task.batch(0, 0)
    background = (0 - task._mean) / task._std
    moves = set()
    for image, moved in zip(original[:, 0], shifted[:, 0], strict=True):
        padded = torch.nn.functional.pad(image, (1,) * 4, value=background.item())
        places = [(y, x) for y in range(3) for x in range(3) if torch.allclose(padded[y : y + 8, x : x + 8], moved)]
        assert places
        moves.add(places[0])
    assert len(moves) == 9


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(digits, "import_module", missing)
    with pytest.raises(
        ArgumentError, match=r"needs scikit-learn, but it is not installed; run .*pip install -e '\.\[dev\]'"
    ):
        DigitsTask()
    assert importlib.import_module("sklearn")


def test_too_many_replicas(task: DigitsTask) -> None:
    with pytest.raises(
        ArgumentError, match="of 32 replicas needs 2048 samples, but the training data has 1438; use bat"
    ):
        task.batch(0, 0, 0, 32)
