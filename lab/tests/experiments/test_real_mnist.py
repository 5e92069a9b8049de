"""lab/experiments/schedule_free_mnist.py: its rows train the same network on the same number of batches."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import schedule_free_mnist as mnist
import torch

CPU = torch.device("cpu")


def test_the_network_of_the_example() -> None:
    assert sum(p.numel() for p in mnist.Net().parameters()) == 1_199_882
    assert mnist.Net()(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_an_epoch_is_every_image_once() -> None:
    training, _ = mnist.images_of(True, CPU)
    numbered = mnist.Images(torch.arange(100.0)[:, None], torch.arange(100))
    batches = list(numbered.epoch(torch.Generator().manual_seed(0)))
    assert [len(labels) for _, labels in batches] == [64, 36]
    assert sorted(torch.cat([labels for _, labels in batches]).tolist()) == list(range(100))
    assert all(torch.equal(images[:, 0], labels.float()) for images, labels in batches)
    assert training.images.shape[1:] == (1, 28, 28)


@pytest.mark.filterwarnings("ignore::UserWarning")  # four steps are few for auto
def test_rows_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, all_images = tmp_path / "mnist.json", mnist.images_of
    few = [mnist.Images(part.images[:16], part.labels[:16]) for part in all_images(True, CPU)]
    monkeypatch.setattr(mnist, "BATCH", 8)
    monkeypatch.setattr(mnist, "images_of", lambda synthetic, device: few)
    for rows in ("default", "auto"):
        mnist.main(["--rows", rows, "--synthetic", "--epochs", "2", "--seeds", "1", "--json", str(path)])
    found = json.loads(path.read_text())
    assert set(found["rows"]) == {"default", "auto"}
    assert not found["as_published"]
    run = found["rows"]["auto"]["runs"][0]
    assert len(run["accuracy"]) == 2
    assert all(0 <= accuracy <= 100 for accuracy in run["accuracy"])
    assert math.isfinite(run["highest_rate"])
    assert found["rows"]["default"]["published"] == 99.22
