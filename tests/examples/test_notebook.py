"""examples/getting_started.ipynb runs from start to end, and the outputs that are kept in it are what it gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.examples.notebook import NOTEBOOK, cells_of, is_png, run_all

pytest.importorskip("plotly", reason="plotly is not installed: pip install -e '.[report]'")
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def text_of(output: dict[str, Any]) -> str:
    """What an output says: as printed, or of an object in HTML where that is short, or else in words."""
    if "text" in output:
        return "".join(output["text"])
    data = {kind: "".join(lines) for kind, lines in output["data"].items()}
    html = data.get("text/html", "")
    text = html if 0 < len(html) < 1000 else data["text/plain"]
    return re.sub(r"0x[0-9a-f]+", "", text)  # where an object is


def same(kept: str, new: str) -> bool:
    """The same words, and numbers that are alike: another torch rounds otherwise."""
    pairs = zip(NUMBER.findall(kept), NUMBER.findall(new), strict=False)
    alike = all(float(a) == pytest.approx(float(b), rel=0.5) for a, b in pairs)
    return NUMBER.sub("#", kept) == NUMBER.sub("#", new) and alike


def test_it_runs_from_start_to_end_and_its_outputs_are_kept(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    code = [cell for cell in cells_of(NOTEBOOK) if cell["cell_type"] == "code"]
    new = run_all(NOTEBOOK, tmp_path)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for cell, outputs in zip(code, new, strict=True):
        assert len(cell["outputs"]) == len(outputs) <= 1, "a flood of outputs"
        for kept, output in zip(cell["outputs"], outputs, strict=True):
            assert kept["output_type"] == output["output_type"]
            assert same(text_of(kept), text_of(output)), (text_of(kept), text_of(output))
    assert [str(one.message) for one in recwarn] == []


def test_the_scheduler_is_shown_and_the_report_is_a_picture() -> None:
    outputs = {cell["id"]: cell["outputs"] for cell in cells_of(NOTEBOOK) if cell["cell_type"] == "code"}
    assert "step 300 of 300: found" in text_of(outputs["train"][0])
    assert "settled" in text_of(outputs["any"][0])
    (shown,) = outputs["look"]
    assert is_png(shown["data"]["image/png"])
    assert NOTEBOOK.stat().st_size < 300_000
    assert "/tmp" not in NOTEBOOK.read_text(encoding="utf-8")


def test_a_number_that_is_far_off_or_another_word_is_noticed() -> None:
    assert same("found 0.067, settled", "found 0.07, settled")
    assert not same("found 0.067, settled", "found 0.67, settled")
    assert not same("found 0.067, settled", "found 0.067, still searching")
