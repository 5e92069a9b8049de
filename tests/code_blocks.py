"""Fenced blocks of Markdown pages, and whether those of Python run as they stand."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.patience import PATIENCE

__all__ = ["Block", "blocks", "commands", "failures", "missing_package"]

_DRIVER = """
import json, os, runpy, sys, traceback

failed = {}
for script in sys.argv[1:]:
    os.chdir(os.path.dirname(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        failed[os.path.basename(os.path.dirname(script))] = traceback.format_exc()
print()
print(json.dumps(failed))
"""


class Block(NamedTuple):
    """A fenced block."""

    line: int
    """Where it begins in its page."""
    source: str


def blocks(page: Path, language: str = "python") -> list[Block]:
    """All blocks of a language in a page, outside of lists and quotes."""
    text = page.read_text(encoding="utf-8")
    fences = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(text.count("\n", 0, fence.start(2)) + 1, fence[2]) for fence in fences if fence[1] == language]


def commands(page: Path, program: str) -> list[list[str]]:
    """The lines of a page's blocks without a language that call ``program``: their words after its name."""
    lines = [line.partition("#")[0].split() for block in blocks(page, "") for line in block.source.splitlines()]
    return [words[1:] for words in lines if words[:1] == [program]]


def missing_package(parts: Iterable[Block]) -> str | None:
    """A package that blocks import and that is not installed."""
    return next((name for name in sorted(_packages(parts)) if importlib.util.find_spec(name) is None), None)


def failures(scripts: Mapping[str, Sequence[Block]], folder: Path) -> dict[str, str]:
    """Run blocks as scripts, each in a folder of its own, and give the tracebacks of those that fail.

    One process runs all that need only torch and hdet: importing those takes longer than most scripts. A framework's
    has a process of its own. Scripts with a missing package are left out.
    """
    together: list[Path] = []
    alone: list[Path] = []
    for name, parts in scripts.items():
        if missing_package(parts) is None:
            path = folder / name / "script.py"
            path.parent.mkdir()
            path.write_text(_in_place(parts), encoding="utf-8")
            (together if _packages(parts) <= {"hdet", "torch"} else alone).append(path)
    return {name: text for paths in (together, *([path] for path in alone)) for name, text in _run(paths).items()}


def _run(scripts: Sequence[Path]) -> dict[str, str]:
    """One process for all of them; tracebacks by the name of the folder."""
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # the models are small, and others use the machine too
    command = [sys.executable, "-c", _DRIVER, *map(str, scripts)]
    done = subprocess.run(command, env=one_thread, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _in_place(parts: Iterable[Block]) -> str:
    """The blocks at the lines where they stand in their page, so that a traceback names these."""
    text = ""
    for block in parts:
        text += "\n" * (block.line - 1 - text.count("\n")) + block.source
    return text


def _packages(parts: Iterable[Block]) -> set[str]:
    """The top-level packages that are imported, without those of Python itself."""
    names = set()
    for node in (node for block in parts for node in ast.walk(ast.parse(block.source))):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names
