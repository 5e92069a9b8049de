"""README.md is short, leads with what counts, and links to what is there. That its blocks run: test_docs.py."""

from __future__ import annotations

import re
from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest

import hdet
from tests.code_blocks import blocks

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def text() -> str:
    return README.read_text(encoding="utf-8")


def test_there_are_blocks() -> None:
    assert len(blocks(README)) >= 2


def test_the_first_loop_finds_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # it writes a journal
    known: dict[str, Any] = {}
    exec(blocks(README)[0].source, known)
    assert known["loss"] < 1.5  # 4 before training, and still 4 after 300 steps at the rate that is given


def test_it_is_short() -> None:
    assert len(text().splitlines()) <= 200


def test_the_first_screen_has_what_counts_in_this_order() -> None:
    parts = (
        "```diff",
        "+scheduler = hdet.auto(optimizer",
        "+scheduler = hdet.OneCycleLR(optimizer",
        "docs/images/front.svg",
        "<!-- table: results -->",
        "make demo",
        "make test",
        "\n## ",
    )
    places = [text().index(part) for part in parts]
    assert places == sorted(places)


def test_a_table_can_be_read_at_once() -> None:
    tables = re.findall(r"(?:^\|.*\n)+", text(), re.MULTILINE)
    assert max(len(table.splitlines()) for table in tables) <= 2 + 10


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text())
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert links
    assert not missing


def test_the_results_can_be_found_by_the_documentation() -> None:
    assert re.search(r"^<!-- table: results -->\n+\|.*?^<!-- end -->$", text(), re.MULTILINE | re.DOTALL)


def test_every_public_function_is_on_a_page_that_links_lead_to() -> None:
    """Beside the reference, from README on: nobody finds what only an alphabetical list has."""
    found, ahead = {README: text()}, [README]
    while ahead:
        page = ahead.pop()
        for link in re.findall(r"\]\(([^)#:\s]+\.md)(?:#[^)]*)?\)", found[page]):
            linked = (page.parent / link).resolve()
            if linked not in found and linked.name != "reference.md":
                found[linked] = linked.read_text(encoding="utf-8")
                ahead.append(linked)
    explained = {name for page in found.values() for name in re.findall(r"\w+", page)}
    functions = {name for name in hdet.__all__ if isfunction(getattr(hdet, name))}
    assert "perturb_" in functions
    assert not functions - explained
