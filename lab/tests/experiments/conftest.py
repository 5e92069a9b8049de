"""The scripts of lab/experiments import each other by name, as when one of them is run."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import sklearn.datasets  # noqa: F401 - here, because its import sets environment variables, and tests must not
import torch
from tests.examples.launch import ROOT

sys.path.append(str(ROOT / "lab" / "experiments"))


@pytest.fixture(autouse=True)
def same_products() -> Iterator[None]:
    """torch gives up oneDNN for the whole process where a CPU cannot multiply bf16 (Muon): later sums would differ."""
    enabled = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.set_flags(enabled)
