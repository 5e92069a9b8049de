"""The examples in the modules of lab/experiments/."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest
from tests.examples.launch import ROOT

FOLDER = ROOT / "lab" / "experiments"
MODULES = [
    ".".join(path.relative_to(FOLDER).with_suffix("").parts)
    for path in sorted(FOLDER.rglob("*.py"))
    if ">>>" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    found = doctest.testmod(import_module(name))
    assert found.attempted > 0
    assert found.failed == 0
