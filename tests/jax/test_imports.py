"""hdet.jax needs no torch: tests/test_imports.py reads the imports in the source, and here they are made."""

from __future__ import annotations

import pytest

from tests.test_imports import without_torch

pytest.importorskip("jax")
pytest.importorskip("optax")


def test_hdet_jax_imports_no_torch() -> None:
    without_torch("import hdet.jax\nhdet.jax.auto, hdet.jax.found\nimport hdet.jax.ensemble")
