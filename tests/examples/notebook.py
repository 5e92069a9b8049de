"""Runs a notebook from start to end, as Jupyter does, with nothing of Jupyter installed.

    python -m tests.examples.notebook                              # run examples/getting_started.ipynb, keep outputs
    python -m tests.examples.notebook examples/jax_autolr.ipynb    # another one

An output too large for a repository is kept as a picture of what chromium shows of it.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.examples.launch import EXAMPLES

NOTEBOOK = EXAMPLES / "getting_started.ipynb"
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")
_LARGE = 100_000
"""Characters of HTML."""


def cells_of(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text(encoding="utf-8"))["cells"])


def bundle(thing: object) -> dict[str, str]:
    """What Jupyter keeps of an object that is shown; of a figure of matplotlib, a picture."""
    if hasattr(thing, "savefig"):
        thing.savefig(file := io.BytesIO(), bbox_inches="tight", dpi=72)
        return {"text/plain": repr(thing), "image/png": base64.b64encode(file.getvalue()).decode()}
    html = thing._repr_html_() if hasattr(thing, "_repr_html_") else None
    return {"text/plain": repr(thing)} | ({} if html is None else {"text/html": html})


class Handle:
    """What ``display(thing, display_id=True)`` returns."""

    def __init__(self, data: dict[str, str]) -> None:
        self._data = data

    def update(self, thing: object) -> None:
        self._data.clear()
        self._data |= bundle(thing)


class Kernel:
    """One namespace in which cells are run."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {"__name__": "__main__", "display": self._display}
        self._outputs: list[dict[str, Any]] = []
        self._count = 0

    def run(self, source: str) -> list[dict[str, Any]]:
        """The outputs of a cell, in the notebook's format. Raises what the cell raises."""
        self._outputs, self._count, printed = [], self._count + 1, io.StringIO()
        tree = ast.parse(source)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, f"<cell {self._count}>", "exec"), self._names)
            value = None
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), f"<cell {self._count}>", "eval"), self._names)
        if printed.getvalue():
            self._outputs.append({"name": "stdout", "output_type": "stream", "text": printed.getvalue()})
        if value is not None:
            self._keep(bundle(value), execution_count=self._count, output_type="execute_result")
        return self._outputs

    def _display(self, thing: object, *, display_id: bool = False) -> Handle | None:
        data = bundle(thing)
        self._keep(data, output_type="display_data")
        return Handle(data) if display_id else None

    def _keep(self, data: dict[str, str], **rest: Any) -> None:
        self._outputs.append({"data": data, "metadata": {}, **rest})


def run_all(path: Path, folder: Path) -> list[list[dict[str, Any]]]:
    """The outputs of every code cell, in order; what they write goes to the folder."""
    kernel, here = Kernel(), Path.cwd()
    os.chdir(folder)
    try:
        return [kernel.run("".join(cell["source"])) for cell in cells_of(path) if cell["cell_type"] == "code"]
    finally:
        os.chdir(here)


def picture(html: str) -> str:
    """What chromium shows of a large output, as base64."""
    from tests.report.test_browser import opened_browser, wait_until_drawn

    with tempfile.TemporaryDirectory() as folder, opened_browser("normal") as browser:
        page = Path(folder) / "output.html"
        page.write_text(f"<!doctype html><meta charset=utf-8><body>{html}</body>", encoding="utf-8")
        metrics = {"width": 900, "height": 790, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get(page.as_uri())
        browser.switch_to.frame(browser.find_element("tag name", "iframe"))
        wait_until_drawn(browser, ".plot")
        browser.switch_to.default_content()
        return str(browser.get_screenshot_as_base64())


def kept(data: Mapping[str, str]) -> dict[str, Any]:
    """Lines, as Jupyter writes them, and a picture in place of what is large."""
    found: dict[str, Any] = {}
    for kind, text in data.items():
        if kind == "image/png":
            found[kind] = text
        elif len(text) >= _LARGE:
            found["image/png"] = picture(text)
        else:
            found[kind] = text.splitlines(keepends=True)
    return found


def rewrite(path: Path) -> None:
    """Run the notebook and keep its outputs in it."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        outputs = iter(run_all(path, Path(folder)))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, start=1):
        cell["execution_count"], cell["outputs"] = number, []
        for one in next(outputs):
            lines = {"data": kept(one["data"])} if "data" in one else {"text": one["text"].splitlines(keepends=True)}
            cell["outputs"].append(one | lines)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def text_of(output: dict[str, Any]) -> str:
    """What an output says: as printed, or of an object in HTML if that is short, or else in words."""
    if "text" in output:
        return "".join(output["text"])
    data = {kind: "".join(lines) for kind, lines in output["data"].items()}
    html = data.get("text/html", "")
    text = html if 0 < len(html) < 1000 else data["text/plain"]
    return re.sub(r"0x[0-9a-f]+", "", text)  # where an object is


def same(kept: str, new: str) -> bool:
    """The same words, and numbers that are alike: another version of torch or jax rounds differently."""
    pairs = zip(_NUMBER.findall(kept), _NUMBER.findall(new), strict=False)
    alike = all(float(a) == pytest.approx(float(b), rel=0.5) for a, b in pairs)
    return _NUMBER.sub("#", kept) == _NUMBER.sub("#", new) and alike


def assert_kept(path: Path, folder: Path) -> None:
    """Run the notebook; its outputs are those that are kept in it."""
    code = [cell for cell in cells_of(path) if cell["cell_type"] == "code"]
    new = run_all(path, folder)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for cell, outputs in zip(code, new, strict=True):
        assert len(cell["outputs"]) == len(outputs) <= 1, "a flood of outputs"
        for kept, output in zip(cell["outputs"], outputs, strict=True):
            assert kept["output_type"] == output["output_type"]
            assert same(text_of(kept), text_of(output)), (text_of(kept), text_of(output))


def is_png(text: str) -> bool:
    return base64.b64decode(text).startswith(b"\x89PNG")


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else NOTEBOOK)
