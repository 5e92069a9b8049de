"""README.md tells the truth: its Python blocks run as they stand, its tables are the code's."""

from __future__ import annotations

import inspect
import re
from importlib import metadata
from pathlib import Path

import pytest

import hdet
from tests.code_blocks import Block, blocks, failures, missing_package

ROOT = Path(__file__).resolve().parents[1]
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
    assert len(blocks(README)) >= 4


def test_table_of_arguments_is_the_signature() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", text(), re.MULTILINE)
    parameters = inspect.signature(hdet.OneCycleLR).parameters.values()
    ours = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert {name: eval(default) for name, default in rows} == ours


def test_table_of_commands_has_all_of_them() -> None:
    typer = pytest.importorskip("typer")
    from hdet.cli.app import app

    rows = re.findall(r"^\| `hdet (\w+)[^`]*` \|", text(), re.MULTILINE)
    assert rows == list(typer.main.get_command(app).commands)


def test_table_of_extras_has_all_of_them() -> None:
    rows = re.findall(r"^\| (`hdet\[\w+\]`(?:, `hdet\[\w+\]`)*) \|", text(), re.MULTILINE)
    named = set(re.findall(r"\[(\w+)\]", " ".join(rows)))
    installed = set(metadata.metadata("hdet").get_all("Provides-Extra") or ())
    assert installed <= named  # an older installation may not know the newest
    assert named <= set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE))


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text())
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert links
    assert not missing


def test_the_results_can_be_found_by_the_documentation() -> None:
    assert re.search(r"^<!-- table: results -->\n+\|.*?^<!-- end -->$", text(), re.MULTILINE | re.DOTALL)
