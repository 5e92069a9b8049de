"""The digits task: augmentation, splits, own images, errors."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy
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


def test_images_are_standardised(task: DigitsTask) -> None:
    images = torch.cat([task.batch(0, step)[0] for step in range(20)])
    assert images.mean().item() == pytest.approx(0, abs=0.15)
    assert images.std().item() == pytest.approx(1, abs=0.1)


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


@pytest.mark.parametrize("shape", [(60, 5, 6), (60, 3, 5, 6)])
def test_images_of_yours(tmp_path: Path, shape: tuple[int, ...]) -> None:
    images = numpy.random.default_rng(0).integers(0, 256, shape).astype(numpy.uint8)
    numpy.savez(tmp_path / "own.npz", images=images, labels=numpy.arange(60) % 4)
    task = DigitsTask(tmp_path / "own.npz", width=4, batch_size=12)
    model = task.model(0)
    assert task.batch(0, 0)[0].shape == (12, *((1,) if len(shape) == 3 else ()), *shape[1:])
    assert model.head.out_features == 4
    assert set(task.evaluate(model)) == {"loss", "accuracy"}


def test_many_images_are_held_out_in_equal_batches(tmp_path: Path) -> None:
    numpy.savez(tmp_path / "many.npz", images=numpy.zeros((6015, 2, 2)), labels=numpy.arange(6015) % 2)
    assert [len(labels) for _, labels in DigitsTask(tmp_path / "many.npz").validation()] == [601, 601]


GOOD: dict[str, Any] = {"images": numpy.zeros((20, 4, 4)), "labels": numpy.zeros(20, dtype=int)}


@pytest.mark.parametrize(("arrays", "message"), [
    ({"images": GOOD["images"]}, r"arrays images and labels, but got path=.*labels.*; write one with numpy.savez"),
    (GOOD | {"labels": numpy.zeros(19, dtype=int)}, r"got images \(20, 1, 4, 4\) and labels \(19,\); reshape"),
    (GOOD | {"images": numpy.zeros((20, 16))}, r"images must be \(N, H, W\) .* got images \(20, 16\)"),
    (GOOD | {"labels": numpy.arange(20) - 1}, r"labels must be integers from 0 on, but they are torch.int64 from -1"),
    (GOOD | {"labels": numpy.arange(20) / 2}, r"integers from 0 on, but they are torch.float64 from 0.0 on; renumber"),
])  # fmt: skip
def test_refused_arrays(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    numpy.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ArgumentError, match=message):
        DigitsTask(tmp_path / "bad.npz")


def test_refused_files(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no arrays")
    numpy.save(tmp_path / "one.npy", GOOD["images"])
    for name in ("none.npz", "text.npz", "one.npy"):
        with pytest.raises(ArgumentError, match=rf"path must be an .npz file .*{name}"):
            DigitsTask(tmp_path / name)


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
