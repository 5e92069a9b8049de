"""lab/experiments/again.py in miniature: a second run begins where the first has ended, and the page has the table."""

from __future__ import annotations

import json
from pathlib import Path

import again
import pytest
import sklearn.datasets  # noqa: F401 - here, because its import sets environment variables, and tests must not
import torch
from torch import nn


def test_turned_images_are_turned() -> None:
    images = torch.arange(16.0).view(1, 1, 4, 4)
    assert again.Turned(nn.Identity())(images).tolist() == torch.rot90(images, 1, (2, 3)).tolist()


def test_a_small_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(again, "RESULTS", tmp_path / "again.json")
    monkeypatch.setitem(again.MODELS, "layers", again.MODELS["layers"]._replace(rates=(1e-3, 0.01)))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    again.main(["--models", "layers", "--seeds", "1", "--steps", "60", "--write"])
    content = json.loads(again.RESULTS.read_text())
    fresh, second, turned = content["rows"]
    assert [row["run"] for row in content["rows"]] == list(again.RUNS)
    assert second["before"] == fresh["loss"] < fresh["before"]
    assert turned["before"] > second["before"]
    assert set(fresh["sweep"]) == {"0.001", "0.01"}
    again.main(["--table"])
    assert capsys.readouterr().out.count("| layers | again |") == 2
