"""CITATION.cff names this version, and the same paper as docs/the-paper.md."""

from __future__ import annotations

import re
from pathlib import Path

import hdet

ROOT = Path(__file__).resolve().parents[2]
CITATION = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
PAPER = (ROOT / "docs" / "the-paper.md").read_text(encoding="utf-8")


def test_the_version_is_that_of_the_library() -> None:
    assert re.findall(r"^version: (.+)$", CITATION, re.MULTILINE) == [hdet.__version__]


def test_the_paper_is_that_of_the_page() -> None:
    entry = dict(re.findall(r"^ +(\w+) += \{(.+)\},?$", PAPER, re.MULTILINE))
    assert entry["title"] in CITATION
    names = re.findall(r"given-names: (.+)\n +family-names: (.+)\n", CITATION)
    assert entry["author"] == " and ".join(f"{family}, {given}" for given, family in names)
    assert f"arXiv:{re.findall(r'eprint = {(.+?)}', PAPER)[0]}" in CITATION
