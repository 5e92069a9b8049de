"""Fenced blocks of Markdown pages, and whether those of Python run as they stand."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

__all__ = ["Block", "blocks", "commands", "run"]


class Block(NamedTuple):
    """A fenced block."""

    line: int
    """Where it begins in its page."""
    source: str


def blocks(page: Path, language: str = "python") -> list[Block]:
    """All blocks of a language in a page, outside of lists and quotes."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


def commands(page: Path, program: str) -> list[list[str]]:
    """The lines of a page's blocks without a language that call ``program``: their words after its name."""
    lines = [line.partition("#")[0].split() for block in blocks(page, "") for line in block.source.splitlines()]
    return [words[1:] for words in lines if words[:1] == [program]]


def run(page: Path, parts: Sequence[Block], folder: Path) -> None:
    """Run blocks of a page as one script, in an empty folder. Skips where a package is missing."""
    for package in sorted(_imported(block.source for block in parts)):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    script = folder / f"{page.stem}.py"
    script.write_text(_in_place(parts), encoding="utf-8")
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # the models are small, and others use the machine too
    done = subprocess.run(
        [sys.executable, script], cwd=folder, env=one_thread, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def _in_place(parts: Iterable[Block]) -> str:
    """The blocks at the lines where they stand in their page, so that a traceback names these."""
    text = ""
    for block in parts:
        text += "\n" * (block.line - 1 - text.count("\n")) + block.source
    return text


def _imported(sources: Iterable[str]) -> set[str]:
    """The top-level packages that are imported."""
    names = set()
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names
