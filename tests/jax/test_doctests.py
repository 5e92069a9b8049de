"""The examples in the docstrings of ``hdet.jax``, which the library's own tests leave out: they have no jax."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import hdet.jax

MODULES = sorted(path.stem for path in Path(hdet.jax.__file__).parent.glob("*.py") if ">>> " in path.read_text())


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(f"hdet.jax.{name}"))
    assert tried > 0
    assert failed == 0
