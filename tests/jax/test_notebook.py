"""examples/jax_autolr.ipynb runs from start to end, and the outputs that are kept in it are what it gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.launch import EXAMPLES
from tests.examples.notebook import assert_kept, cells_of, is_png, text_of

pytest.importorskip("jax")
pytest.importorskip("optax")
NOTEBOOK = EXAMPLES / "jax_autolr.ipynb"


def test_it_runs_from_start_to_end_and_its_outputs_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert_kept(NOTEBOOK, tmp_path)


def test_the_rate_that_was_found_is_printed_and_drawn() -> None:
    outputs = {cell["id"]: cell["outputs"] for cell in cells_of(NOTEBOOK) if cell["cell_type"] == "code"}
    assert "settled, never rolled back" in text_of(outputs["find"][0])
    assert "settled" in text_of(outputs["unknown"][0])
    (shown,) = outputs["look"]
    assert is_png(shown["data"]["image/png"])
    assert NOTEBOOK.stat().st_size < 300_000
    assert "/tmp" not in NOTEBOOK.read_text(encoding="utf-8")
