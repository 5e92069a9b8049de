"""The blocks of docs/jax.md run, one after another; so do the others that need jax, each by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.code_blocks import blocks, failures

pytest.importorskip("jax")
pytest.importorskip("optax")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "jax.md"
OTHERS = (PAGE.with_name("reference.md"), PAGE.parent / "questions" / "optax.md")


def test_the_blocks_of_the_page_run(tmp_path: Path) -> None:
    if not PAGE.exists():
        pytest.skip("docs/ is not part of a wheel")
    assert len(blocks(PAGE)) >= 3
    assert failures({"jax": blocks(PAGE)}, tmp_path) == {}


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.stem)
def test_the_other_blocks_that_need_jax_run(page: Path, tmp_path: Path) -> None:
    if not page.exists():
        pytest.skip("docs/ is not part of a wheel")
    scripts = {f"line-{block.line}": [block] for block in blocks(page) if "import jax" in block.source}
    assert scripts
    assert failures(scripts, tmp_path) == {}
