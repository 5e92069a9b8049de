"""What docs/frameworks.md tells people to write: in every framework one line at most beside the constructor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.code_blocks import Block, blocks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"


@pytest.mark.parametrize("block", blocks(PAGE, "diff"), ids=lambda block: f"line {block.line}")
def test_one_line_beside_the_constructor(block: Block) -> None:
    added = [line[1:].strip() for line in block.source.splitlines() if line.startswith("+")]
    lines = [line for line in added if line and not line.startswith(("from ", "import "))]
    assert 1 <= len(lines) <= 2, lines
