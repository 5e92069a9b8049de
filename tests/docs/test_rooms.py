"""The page of each room: it is short, and the names of code in it exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "hdet"
PAGES = sorted(PACKAGE.glob("*/README.md"))
_BLOCK = re.compile(r"```.*?```", re.DOTALL)
_QUOTED = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"[\w./-]+\.(?:py|md|toml)|[\w./-]+/[\w/-]+")
_NAME = re.compile(r"[A-Za-z_]\w*")


@cache
def words_in(folder: Path) -> frozenset[str]:
    """Every name and word in the Python files of a folder."""
    return frozenset(word for file in folder.rglob("*.py") for word in _NAME.findall(file.read_text(encoding="utf-8")))


def is_there(quoted: str, room: Path) -> bool:
    """Whether a file exists, or whether the room has the names. Dotted names may be those of a neighbour or a test."""
    tests = ROOT / "tests" / room.name
    if _FILE.fullmatch(quoted):
        return any((folder / quoted).exists() for folder in (room, tests, PACKAGE, PACKAGE.parent, ROOT))
    near = words_in(room) | words_in(PACKAGE / "rule")  # the rule is explained on the pages of those that obey it
    own = words_in(PACKAGE) | words_in(tests) | {"hdet"} if "." in quoted else near
    return all(name in own or (PACKAGE / name).is_dir() for name in _NAME.findall(quoted))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_page_of_a_room_fits_its_code(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert text.count("```") >= 2, "one picture of the flow"
    quoted = dict.fromkeys(_QUOTED.findall(_BLOCK.sub("", text)))
    assert [one for one in quoted if not is_there(one, page.parent)] == []


def test_each_product_has_a_page() -> None:
    assert {page.parent.name for page in PAGES} == {"search", "ensemble", "rollback"}


@pytest.mark.parametrize("name", ["Steering.decide", "tests/ensemble/twin.py", "knob.py", "hdet.Ensemble"])
def test_a_name_that_is_there_is_found(name: str) -> None:
    assert is_there(name, PACKAGE / "ensemble")


@pytest.mark.parametrize("name", ["Steering.decided_once", "tests/ensemble/gone.py", "gone.py", "Gone"])
def test_a_name_that_is_gone_is_noticed(name: str) -> None:
    assert not is_there(name, PACKAGE / "ensemble")
