"""examples/getting_started.ipynb runs from start to end, and the outputs that are kept in it are what it gives."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from tests.examples.launch import EXAMPLES
from tests.examples.notebook import NOTEBOOK, assert_kept, cells_of, is_png, same, text_of

pytest.importorskip("plotly", reason="plotly is not installed: pip install -e '.[report]'")


def test_it_runs_from_start_to_end_and_its_outputs_are_kept(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert_kept(NOTEBOOK, tmp_path)
    assert [str(one.message) for one in recwarn] == []


def test_the_scheduler_is_shown_and_the_report_is_a_picture() -> None:
    outputs = {cell["id"]: cell["outputs"] for cell in cells_of(NOTEBOOK) if cell["cell_type"] == "code"}
    assert "step 300 of 300: found" in text_of(outputs["train"][0])
    assert "found" in text_of(outputs["any"][0])
    (shown,) = outputs["look"]
    assert is_png(shown["data"]["image/png"])
    assert NOTEBOOK.stat().st_size < 300_000
    assert "/tmp" not in NOTEBOOK.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["getting_started", "jax_autolr"])
def test_the_first_cell_installs_hdet_only_where_it_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an extra that pyproject.toml has. A kernel of Colab does not have hdet."""
    stated = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text(encoding="utf-8"))
    source = "".join(
        next(cell["source"] for cell in cells_of(EXAMPLES / f"{name}.ipynb") if cell["cell_type"] == "code")
    )
    called: list[list[str]] = []
    monkeypatch.setattr("subprocess.run", lambda command, check: called.append(command))
    exec(source, {})
    assert called == []
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    exec(source, {})
    [[*pip, what]] = called
    assert pip == [sys.executable, "-m", "pip", "install", "--quiet"]
    assert what.removeprefix("hdet[").removesuffix("]") in stated["project"]["optional-dependencies"]


def test_a_number_that_is_far_off_or_another_word_is_noticed() -> None:
    assert same("found 0.067, settled", "found 0.07, settled")
    assert not same("found 0.067, settled", "found 0.67, settled")
    assert not same("found 0.067, settled", "found 0.067, still searching")
