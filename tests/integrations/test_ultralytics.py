"""AutoLR in real trainers of ultralytics, on the CPU: a model from a configuration, and images made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from tests.setups.problems import Records

ultralytics = pytest.importorskip("ultralytics")

from PIL import Image

from hdet.integrations.ultralytics import AutoLR

EPOCHS, IMAGES, BATCH = 10, 64, 8


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes: bright on the left, bright on the right."""
    folder, g = tmp_path_factory.mktemp("images"), torch.Generator().manual_seed(0)
    for part, count in (("train", IMAGES), ("val", 16)):
        for i in range(count):
            side = i % 2
            pixels = torch.randint(0, 120, (32, 32, 3), generator=g)
            pixels[:, 16 * side : 16 * side + 16] += 100
            (folder / part / str(side)).mkdir(parents=True, exist_ok=True)
            image = Image.frombytes("RGB", (32, 32), pixels.to(torch.uint8).numpy().tobytes())
            image.save(folder / part / str(side) / f"{i}.png")
    return folder


def train(auto: AutoLR | None, images: Path, folder: Path, **more: Any) -> Any:
    torch.manual_seed(0)
    model = ultralytics.YOLO("yolov8n-cls.yaml")
    if auto is not None:
        auto.attach(model)
    settings = {"epochs": EPOCHS, "imgsz": 32, "batch": BATCH, "nbs": BATCH, "lr0": 1e-6, "optimizer": "AdamW"}
    quiet = {"device": "cpu", "workers": 0, "plots": False, "verbose": False, "project": str(folder), "amp": False}
    model.train(data=str(images), **{**settings, **quiet, **more})
    return model.trainer


@pytest.mark.covers("frameworks", "ultralytics, search", "one process", "fp32")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_guess_that_is_far_too_low_is_left_behind(accumulate: int, images: Path, tmp_path: Path) -> None:
    records = Records()
    auto = AutoLR(journal=records)
    found = train(auto, images, tmp_path, nbs=accumulate * BATCH)
    plain = train(None, images, tmp_path, nbs=accumulate * BATCH)
    assert records.rounds[-1]["step"] == EPOCHS * IMAGES // BATCH // accumulate
    assert max(record["base"][0] for record in records.rounds) > 1e-5
    losses = [next(iter(trainer.tloss.values())) for trainer in (found, plain)]
    assert losses[0] < 0.8 * losses[1]


def test_mistakes_are_refused_with_a_cure(images: Path, tmp_path: Path) -> None:
    with pytest.raises(hdet.ArgumentError, match="takes a model of ultralytics"):
        AutoLR().attach(3)
    with pytest.raises(hdet.ArgumentError, match="give epochs= in its place"):
        train(AutoLR(), images, tmp_path, time=0.1)
