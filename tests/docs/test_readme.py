"""README.md tells the truth: its Python blocks run as they stand. And it is short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.code_blocks import Block, blocks, failures, missing_package

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def text() -> str:
    return README.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return failures({f"line-{block.line}": [block] for block in blocks(README)}, tmp_path_factory.mktemp("readme"))


@pytest.mark.parametrize("block", blocks(README), ids=lambda block: f"line-{block.line}")
def test_block_runs(block: Block, failed: dict[str, str]) -> None:
    package = missing_package([block])
    if package is not None:
        pytest.skip(f"needs {package}")
    assert f"line-{block.line}" not in failed, failed[f"line-{block.line}"]


def test_there_are_blocks() -> None:
    assert len(blocks(README)) >= 2


def test_it_is_short() -> None:
    assert len(text().splitlines()) <= 250


def test_the_first_screen_has_what_counts_in_this_order() -> None:
    parts = (
        "```diff",
        '+scheduler = hdet.OneCycleLR(optimizer, max_lr="auto"',
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
