"""lab/benchmarks/scale.py with a made-up file: table, JSON, page, picture, and errors that say what to do."""

from __future__ import annotations

import doctest
import json
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import scale
import scale_page
from tests.examples.launch import ROOT, output_of

from lab.tests.benchmarks.made_up import document

PAGE = "# Cost\n\nby hand\n\n<!-- made by lab/benchmarks/scale.py -->\n\nold\n\n<!-- end -->\n\nmore by hand\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "auto_cost.json"
    path.write_text(json.dumps(document()), encoding="utf-8")
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["scale.py", *map(str, arguments)])
    scale.main()


def test_numbers_are_written_shortly() -> None:
    failed, tried = doctest.testmod(scale_page)
    assert tried
    assert not failed


def test_it_runs_as_a_script(file: Path) -> None:
    printed = output_of(sys.executable, ROOT / "lab" / "benchmarks" / "scale.py", "--measured", file)
    assert printed.count("\n| 70 B | ") == 6
    assert "| 70 B | 512 | sharded |" in printed
    assert "| 70 B | 8 | whole † |" in printed
    assert "| made-up-10M | 10 M | 1000 | yes |" in printed
    assert "at most 0 % in a sample" in printed or "at most < 0.001 % in a sample" in printed
    assert "8192 tokens per GPU" in printed
    assert "| made-up-1M | 1 M | 5.1 | 3.1 | 3.0 | 2.1 | 0.1 |" in printed


def test_json_has_every_combination(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--measured", file, "--json")
    found = json.loads(capsys.readouterr().out)
    assert len(found["entries"]) == 3 * 3 * 2 * 2
    assert max(found["fit"]["largest_relative_error"].values()) < 1e-9
    assert found["assumptions"]["passes"]["look"]["bandwidth"] == pytest.approx(2e12)
    eight = next(e for e in found["entries"] if e["parameters"] == 8e9 and e["gpus"] == 8 and not e["sharded"])
    assert eight["auto"]["searching"] == 64e9
    assert (eight["auto"]["kept"], eight["auto"]["on_host"]) == (96e9, 96e9)


def test_an_assumption_that_is_given_replaces_the_fit(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--measured", file, "--json", "--memory-gb-per-s", 1000, "--launch-us", 5, "--tokens", 4096)
    assumed = json.loads(capsys.readouterr().out)["assumptions"]
    for one in assumed["passes"].values():
        assert one == pytest.approx({"launch": 5e-6, "bandwidth": 1e12})
    assert assumed["tokens"] == 4096


def test_the_block_of_a_page_is_filled(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, picture = tmp_path / "cost.md", tmp_path / "images" / "cost.svg"
    page.write_text(PAGE, encoding="utf-8")
    for _ in range(2):  # the second time what the first one wrote is replaced
        run(monkeypatch, "--measured", file, "--docs", page, "--plot", picture)
        written = page.read_text(encoding="utf-8")
    assert written.startswith("# Cost\n\nby hand\n\n<!-- made by lab/benchmarks/scale.py -->\n\n![")
    assert written.endswith("in addition.\n\n<!-- end -->\n\nmore by hand\n")
    assert written.count("### On paper") == 1
    assert "](images/cost.svg)" in written
    assert "old" not in written


def test_the_picture_has_a_curve_for_every_model(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--measured", file, "--plot", tmp_path / "cost.svg")
    root = ElementTree.fromstring((tmp_path / "cost.svg").read_text(encoding="utf-8"))
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    for label in ("made-up-1M", "made-up-10M", "made-up-10M, compiled", "made-up-100M", "1 B", "8 B", "70 B"):
        assert label in words
    assert sum(element.tag.endswith("circle") for element in root.iter()) == len(document()["rows"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--utilisation", 40], "--utilisation must be a part of 1, but got 40"),
        (["--tflops", 0], "--tflops: must be a number above 0, but got 0"),
        (["--gpus", 0], "--gpus: must be at least 1, but got 0"),
        (["--gpus", 12], "--gpus must be whole nodes of 8"),
        (["--docs", ROOT / "LICENSE"], "must have the lines <!-- made by lab/benchmarks/scale.py -->"),
        (["--measured", "nowhere.json"], "nowhere.json does not exist; run lab/benchmarks/auto_cost.py on a GPU first"),
    ],
)
def test_bad_arguments_are_refused(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[object],
    message: str,
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "--measured", file, *arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [("no JSON", "is no JSON file of lab/benchmarks/auto_cost.py"), ('{"rows": []}', "has no entry 'copy_gb_per_s'")],
)
def test_a_bad_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "bad.json").write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "--measured", tmp_path / "bad.json")
    assert message in capsys.readouterr().err


def test_the_page_is_that_of_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a GPU has measured, the page says that its tables are of earlier code."""
    page = (ROOT / "docs" / "cost.md").read_text(encoding="utf-8")
    if not scale.MEASURED.exists():
        assert "The figures below were measured with the search that had a probe" in page
        return
    shutil.copy(ROOT / "docs" / "cost.md", tmp_path)
    run(monkeypatch, "--gpus", 64, "--docs", tmp_path / "cost.md", "--plot", tmp_path / "images" / "cost.svg")
    assert (tmp_path / "cost.md").read_text(encoding="utf-8") == page
    drawn = (tmp_path / "images" / "cost.svg").read_text(encoding="utf-8")
    assert drawn == (ROOT / "docs" / "images" / "cost.svg").read_text(encoding="utf-8")
