"""The block of docs/reference.md that needs torchft runs against it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.code_blocks import blocks, failures

pytest.importorskip("torchft")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference.md"


def test_the_example_runs(tmp_path: Path) -> None:
    if not PAGE.exists():
        pytest.skip("docs/ is not part of a wheel")
    [block] = [block for block in blocks(PAGE) if "from torchft" in block.source]
    assert failures({"torchft": [block]}, tmp_path) == {}
