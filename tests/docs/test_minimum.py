"""The stated minimum: the same on every page and in every setting, and what ``make test-oldest`` tries."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STATED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PYTHON = STATED["project"]["requires-python"].removeprefix(">=")
TORCH = STATED["project"]["dependencies"][0].removeprefix("torch>=")
NAMED = [line.rpartition(" ")[2] for line in STATED["project"]["classifiers"] if "Python :: 3." in line]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Of its own: what an outer make was given does not count."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=settings, capture_output=True, text=True)


def test_pages_and_settings_say_the_same() -> None:
    for page in ("README.md", "docs/getting-started.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert f"Python {PYTHON} or later and torch {TORCH} or later" in text, page
    for page in ("CONTRIBUTING.md", "Makefile", "constraints.txt"):
        stated = re.findall(r"Python (3\.\d+) (?:or|and) later", (ROOT / page).read_text(encoding="utf-8"))
        assert stated == [PYTHON], page
    assert NAMED[0] == PYTHON
    assert STATED["tool"]["mypy"]["python_version"] == PYTHON
    assert STATED["tool"]["ruff"]["target-version"] == "py" + PYTHON.replace(".", "")


@pytest.mark.parametrize(
    ("target", "python", "torch"),
    [("test-oldest", f"python{PYTHON}", f"'torch=={TORCH}.0'"), ("test-newest", f"python{NAMED[-1]}", "'torch'")],
)
def test_the_ends_of_what_is_stated_are_tried(target: str, python: str, torch: str) -> None:
    commands = make("-n", target).stdout
    assert f"\n{python} -m venv" in commands
    assert f"pip install {torch} " in commands


@pytest.mark.parametrize("target", ["test-oldest", "test-newest"])
def test_an_interpreter_that_is_not_there_is_an_error_that_says_so(target: str) -> None:
    done = make(target, "PYTHON=no-such-python")
    assert done.returncode == 2
    assert f"make {target}: no-such-python does not run" in done.stderr
    assert f"make {target} PYTHON=" in done.stderr
    assert not done.stdout
