"""README.md tells the truth: its Python blocks run as they stand, its table of arguments is the signature."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import hdet

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"


class Block(NamedTuple):
    """A fenced block of Python."""

    line: int
    """Where it begins in README.md."""
    source: str


def blocks() -> list[Block]:
    """All Python blocks of the README."""
    text = README.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


def imported(source: str) -> set[str]:
    """The top-level packages that a block imports."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("block", blocks(), ids=lambda block: f"line {block.line}")
def test_block_runs(block: Block, tmp_path: Path) -> None:
    for package in sorted(imported(block.source)):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    script = tmp_path / "README.py"
    script.write_text("\n" * (block.line - 1) + block.source)  # so that a traceback names the README's own lines
    run = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr


def test_there_are_blocks() -> None:
    assert len(blocks()) >= 4


def test_table_of_arguments_is_the_signature() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", README.read_text(encoding="utf-8"), re.MULTILINE)
    parameters = inspect.signature(hdet.OneCycleLR).parameters.values()
    ours = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert {name: eval(default) for name, default in rows} == ours


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert links
    assert not missing
