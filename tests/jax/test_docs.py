"""The blocks of docs/jax.md run, one after another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.code_blocks import blocks, failures

pytest.importorskip("jax")
pytest.importorskip("optax")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "jax.md"


def test_the_blocks_of_the_page_run(tmp_path: Path) -> None:
    if not PAGE.exists():
        pytest.skip("docs/ is not part of a wheel")
    assert len(blocks(PAGE)) >= 3
    assert failures({"jax": blocks(PAGE)}, tmp_path) == {}
