"""examples/ultralytics_autolr.py: AutoLR in real trainers of ultralytics, on the CPU, with images made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from tests.integrations import operators  # noqa: F401  # torchvision can be imported from here on
from tests.problems import Records

pytest.importorskip("ultralytics")
pytest.importorskip("polars")  # imported here, not in a test: it sets a variable of the environment

import ultralytics
from PIL import Image

from examples.ultralytics_autolr import AutoLR

EPOCHS, IMAGES, BATCH = 8, 64, 8


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes: red and blue."""
    folder, g = tmp_path_factory.mktemp("images"), torch.Generator().manual_seed(0)
    for part, count in (("train", IMAGES), ("val", 16)):
        for i in range(count):
            colour = i % 2
            pixels = torch.randint(0, 120, (32, 32, 3), generator=g)
            pixels[..., 2 * colour] += 100
            (folder / part / str(colour)).mkdir(parents=True, exist_ok=True)
            image = Image.frombytes("RGB", (32, 32), pixels.to(torch.uint8).numpy().tobytes())
            image.save(folder / part / str(colour) / f"{i}.png")
    return folder


def train(auto: AutoLR | None, images: Path, folder: Path, **more: Any) -> Any:
    torch.manual_seed(0)
    model = ultralytics.YOLO("yolov8n-cls.yaml")
    if auto is not None:
        auto.attach(model)
    settings = {"epochs": EPOCHS, "imgsz": 32, "batch": BATCH, "nbs": BATCH, "lr0": 1e-6, "optimizer": "AdamW"}
    quiet = {"device": "cpu", "workers": 0, "plots": False, "verbose": False, "project": str(folder), "amp": False}
    quiet["deterministic"] = False  # else it sets variables of the environment
    plain = {"fliplr": 0.0, "erasing": 0.0, "auto_augment": None, "hsv_h": 0.0, "val": False}
    model.train(data=str(images), **{**settings, **quiet, **plain, **more})
    return model.trainer


@pytest.mark.covers("frameworks", "ultralytics, search", "one process", "fp32")
def test_a_guess_that_is_far_too_low_is_left_behind(images: Path, tmp_path: Path) -> None:
    records = Records()
    found, plain = train(AutoLR(journal=records), images, tmp_path), train(None, images, tmp_path)
    assert records.rounds[-1]["step"] == EPOCHS * IMAGES // BATCH
    assert max(record["base"][0] for record in records.rounds) > 1e-5
    losses = [float(next(iter(trainer.tloss.values()))) for trainer in (found, plain)]
    assert losses[0] < 0.8 * losses[1]


def test_steps_of_an_accumulation_count_once(images: Path, tmp_path: Path) -> None:
    auto = AutoLR()
    trainer = train(auto, images, tmp_path, epochs=2, nbs=2 * BATCH)
    assert trainer.accumulate == 2
    assert auto.scheduler is not None
    assert auto.scheduler.state_dict()["step"] == auto.scheduler.state_dict()["total_steps"] == IMAGES // BATCH


def test_mistakes_are_refused_with_a_cure(images: Path, tmp_path: Path) -> None:
    with pytest.raises(hdet.ArgumentError, match="takes a model of ultralytics"):
        AutoLR().attach(3)
    with pytest.raises(hdet.ArgumentError, match="give epochs= in its place"):
        train(AutoLR(), images, tmp_path, time=0.1)
