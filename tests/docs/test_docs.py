"""docs/ tells the truth: its blocks run, its commands parse, its reference has every public name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hdet
from tests.code_blocks import blocks, commands, failures, missing_package

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return failures({page.stem: blocks(page) for page in PAGES if blocks(page)}, tmp_path_factory.mktemp("docs"))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_one_after_another(page: Path, failed: dict[str, str]) -> None:
    package = missing_package(blocks(page))
    if package is not None:
        pytest.skip(f"needs {package}")
    assert page.stem not in failed, failed[page.stem]


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_commands_parse(page: Path) -> None:
    typer = pytest.importorskip("typer")
    from hdet.cli.app import app

    known = typer.main.get_command(app).commands
    for name, *arguments in commands(page, "hdet"):
        known[name].make_context(name, arguments)  # raises for what the command does not know


def test_the_command_line_has_a_section_for_every_command() -> None:
    typer = pytest.importorskip("typer")
    from hdet.cli.app import app

    sections = re.findall(r"^## hdet (\w+)\n+<!-- fill: command (\w+) -->$", _text("command-line.md"), re.MULTILINE)
    assert sections == [(name, name) for name in typer.main.get_command(app).commands]


def test_the_reference_has_every_public_name() -> None:
    described = set(re.findall(r"^::: hdet\.(\w+)", _text("reference.md"), re.MULTILINE))
    assert set(hdet.__all__) - {"__version__"} <= described
    functions = set(re.findall(r"^::: hdet\.knobs\.(\w+)$", _text("reference.md"), re.MULTILINE))
    assert set(hdet.knobs.__all__) - {"Knob"} == functions


def test_the_drawings_are_those_of_the_script(tmp_path: Path) -> None:
    subprocess.run([sys.executable, DOCS / "make_cycle.py", tmp_path], check=True, timeout=60)
    for drawn in sorted(tmp_path.glob("*.svg")):
        assert drawn.read_text(encoding="utf-8") == (DOCS / "images" / drawn.name).read_text(encoding="utf-8")


def test_pictures_and_pages_that_are_linked_exist() -> None:
    for page in PAGES:
        links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        assert not [link for link in links if "://" not in link and not (DOCS / link).exists()], page.name


def _text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")
