"""docs/make_flight.py draws what a journal says."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from tests.examples.launch import ROOT, output_of
from zoo import train
from zoo_problems import PROBLEMS, model_of

import hdet


@pytest.mark.parametrize("guess", [1e-3, 1e6])
def test_a_journal_becomes_a_picture(tmp_path: Path, guess: float) -> None:
    problem = PROBLEMS["line"]
    model = model_of(problem, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=guess)
    journal = tmp_path / "run.jsonl"
    scheduler = hdet.OneCycleLR(optimizer, "auto", 80, journal=journal)
    train(problem, optimizer, model, scheduler, 0)
    output_of(sys.executable, ROOT / "docs" / "make_flight.py", journal, tmp_path / "flight.svg")
    picture = (tmp_path / "flight.svg").read_text()
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert "what the gradients ask for" in picture
    assert ("restarted" in picture) == (guess > 1)
