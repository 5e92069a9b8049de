"""README.md is short, leads with what counts, and links to what is there. That its blocks run: test_docs.py."""

from __future__ import annotations

import re
from pathlib import Path

from tests.code_blocks import blocks

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def text() -> str:
    return README.read_text(encoding="utf-8")


def test_there_are_blocks() -> None:
    assert len(blocks(README)) >= 2


def test_it_is_short() -> None:
    assert len(text().splitlines()) <= 250


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


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text())
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert links
    assert not missing


def test_the_results_can_be_found_by_the_documentation() -> None:
    assert re.search(r"^<!-- table: results -->\n+\|.*?^<!-- end -->$", text(), re.MULTILINE | re.DOTALL)
