"""docs/make_results.py with made-up numbers: the table of small problems, and the same bytes every time."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from tests.examples.launch import ROOT, output_of

PAGE = "# Results\n\nby hand\n\n<!-- made by docs/make_results.py -->\n\nold\n\n<!-- end -->\n\nmore by hand\n"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    scores = {
        f"{problem}/sgd/{length}": {"best_rate": 0.1, "seeds": [{"ratio": ratio}, {"ratio": ratio}]}
        for problem, ratio in (("line", 1.0), ("softmax", 4.0))
        for length in (100, 400)
    }
    (tmp_path / "zoo.json").write_text(json.dumps({"scores": scores}))
    (tmp_path / "results.md").write_text(PAGE)
    return tmp_path / "results.md"


def make(page: Path) -> str:
    output_of(sys.executable, ROOT / "docs" / "make_results.py", page.parent, page)
    return page.read_text()


def test_page(page: Path) -> None:
    text = make(page)
    assert "by hand" in text
    assert "more by hand" in text
    assert "old" not in text
    assert "**400 steps.** Geometric mean 2.00, median 4.00, worst 4.00; 1 of 2 at or below 1.05." in text
    assert "| 100 / 400 steps | sgd |" in text
    assert "| softmax | 4.00/4.00 |" in text


def test_same_bytes_again(page: Path) -> None:
    assert make(page) == make(page)


def test_page_of_the_repository_has_the_marks() -> None:
    text = (ROOT / "docs" / "results.md").read_text()
    begins = [text.index(mark) for mark in ("<!-- made by docs/make_results.py -->", "<!-- table: ablation -->")]
    ends = [found.start() for found in re.finditer("<!-- end -->", text)]
    assert sorted(begins + ends) == [begins[0], ends[0], begins[1], ends[1]]
