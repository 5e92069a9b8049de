"""docs/make_results.py with made-up numbers: tables, pictures, and the same bytes every time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.examples.launch import ROOT, output_of

FACTORS = [0.001, 0.01, 0.1, 1.0, 10.0, 100.0]
PAGE = "# Results\n\nby hand\n\n<!-- made by docs/make_results.py -->\n\nold\n\n<!-- end -->\n\nmore by hand\n"


def row(label: str, ratios: list[float | None], starts: list[float | None]) -> dict[str, Any]:
    cells = [{"start": s, "ratio": r, "ratio_se": 0.01 if r else None} for s, r in zip(starts, ratios, strict=True)]
    worst = None if None in ratios else max(r for r in ratios if r is not None)
    return {"label": label, "starts": cells, "worst": worst, "time_ratio": 1.25}


def table(length: str, steps: int) -> dict[str, Any]:
    return {
        "task": "text",
        "optimizer": "adam",
        "length": length,
        "steps": steps,
        "seeds": [0, 1, 2],
        "factors": FACTORS,
        "versions": {"torch": "9.9"},
        "arguments": {"options": {"batch_size": 32}},
        "best": {"schedule": "cosine", "rate": 5e-3, "on_edge": False},
        "reference": [1.0, 1.1, 1.2],
        "rows": {
            "onecycle": row("fixed rate, OneCycle", [2.5, 1.5, 1.1, 1.01, 1.4, None], FACTORS),
            "auto": row("auto, one rate", [1.02, 1.01, 1.0, 0.99, 1.0, 1.03], FACTORS),
            "auto-groups": row("auto, per group", [1.01] * 6, FACTORS),
            "prodigy": row("Prodigy", [1.07], [None]),
        },
        "skipped": {"dog": "dog is not installed"},
    }


@pytest.fixture
def page(tmp_path: Path) -> Path:
    content = {"experiment": "misset_lr", "tables": [table("short", 100), table("full", 1000)]}
    (tmp_path / "misset_text.json").write_text(json.dumps(content))
    (tmp_path / "results.md").write_text(PAGE)
    return tmp_path / "results.md"


def make(page: Path) -> tuple[str, str]:
    output_of(sys.executable, ROOT / "docs" / "make_results.py", page.parent, page)
    return page.read_text(), (page.parent / "images" / "misset-text-adam.svg").read_text()


def test_page(page: Path) -> None:
    text, _ = make(page)
    assert "by hand" in text
    assert "more by hand" in text
    assert "old" not in text
    assert "| fixed rate, OneCycle | 2.500 ± 0.010 |" in text
    assert "failed | failed | 1.25 |" in text
    assert "Auto, one rate: 0.990 to 1.030" in text
    assert "A byte-level GPT on Python source; batch_size 32." in text
    assert "Not run: dog (dog is not installed)." in text
    assert text.index("1000 steps") < text.index("100 steps,")
    assert "per group" not in text  # a row that no longer exists


def test_worst_cases(page: Path) -> None:
    text, _ = make(page)
    table = text[text.index("## Worst case") :]
    assert "| | text, Adam, 1000 steps |" in table
    assert "| fixed rate, OneCycle | failed |" in table
    assert "| auto, one rate | 1.030 ± 0.010 |" in table
    assert "| Prodigy | 1.070 ± 0.010 |" in table


def test_what_is_reached(page: Path) -> None:
    text, _ = make(page)
    table = text[text.index("## What is reached") : text.index("## Worst case")]
    assert "| text, Adam | 1000 | -1.0 to 3.0 % | 6 of 6 | none |" in table


def test_picture_is_small_and_well_formed(page: Path) -> None:
    _, picture = make(page)
    assert len(picture) < 20_000
    assert ElementTree.fromstring(picture).tag.endswith("svg")


def test_same_bytes_again(page: Path) -> None:
    assert make(page) == make(page)


def test_page_of_the_repository_has_the_marks() -> None:
    text = (ROOT / "docs" / "results.md").read_text()
    assert text.count("<!-- made by docs/make_results.py -->") == text.count("<!-- end -->") == 1


def test_the_librarys_own_runs_and_the_zoo_stand_first(page: Path) -> None:
    run = {"highest": [0.02, 0.005], "ratio": 1.25}
    common = {"task": "text", "optimizer": "adam", "steps": 1000, "best_rate": 5e-3, "ratio": 1.25, "runs": [run]}
    old = {**common, "per_group": True, "standard_error": None, "ratio": 9.0}
    rows = [{**common, "standard_error": None}, old]
    (page.parent / "product.json").write_text(json.dumps(rows))
    scores = {
        f"{problem}/sgd/{length}": {"best_rate": 0.1, "seeds": [{"ratio": ratio}, {"ratio": ratio}]}
        for problem, ratio in (("line", 1.0), ("softmax", 4.0))
        for length in (100, 400)
    }
    (page.parent / "zoo.json").write_text(json.dumps({"scores": scores}))
    text, _ = make(page)
    assert "| text, Adam | 1000 | 1 | 1.250 | 2.00 |" in text
    assert "9.000" not in text
    assert "**400 steps.** Geometric mean 2.00, median 4.00, worst 4.00; 1 of 2 at or below 1.05." in text
    assert "| softmax | 4.00 |" in text
    assert text.index("The library itself") < text.index("Small problems") < text.index("## Text, Adam")
