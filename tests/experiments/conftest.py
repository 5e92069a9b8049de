"""The scripts of experiments/ import each other by name, as when one of them is run."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.examples.launch import ROOT

sys.path.append(str(ROOT / "experiments"))


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: a second thread on a busy core only slows them down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
