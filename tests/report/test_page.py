"""The page as text: everything inside, everything escaped. What it looks like is test_browser's matter."""

from __future__ import annotations

import base64
import html
import json
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import hdet
from hdet.errors import ArgumentError
from hdet.report.data import load_run
from hdet.report.figures import painted
from hdet.report.page import write_report
from hdet.report.series import comparison_figures, run_figures
from hdet.report.verdict import Table, advice, verdict
from tests.patience import PATIENCE
from tests.report.made_up import a_header, a_round, searched_folder, trained_journal, write_folder, write_journal

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\u2028'\""


class Tags(HTMLParser):
    """The tags of a page, and the text outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: dict[str | None, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts.setdefault(self.tags[-1][1].get("id"), data)
        elif not self.tags or self.tags[-1][0] != "style":
            self.text += data

    def script(self, key: str) -> str:
        """The text that is packed in the script with that id."""
        return zlib.decompress(base64.b64decode(self.scripts[key])).decode()


def test_the_figures_of_a_run_are_painted(tmp_path: Path) -> None:
    """plotly checks them itself: an unknown property or a wrong value raises."""
    searched, trained = load_run(searched_folder(tmp_path / "a")), load_run(trained_journal(tmp_path / "b.jsonl"))
    figures = {"searched": run_figures(searched), "trained": run_figures(trained)}
    assert [one.title for one in figures["searched"]] == ["Learning rate", "Loss", "Where the time went"]
    assert [one.title for one in figures["trained"]] == [
        "Learning rate",
        "Loss",
        "Hypergradient",
        "Replica divergence",
        "Where the time went",
    ]
    for figure in [*figures["searched"], *figures["trained"], *comparison_figures([searched, trained])]:
        assert painted(figure).data
    rate = painted(figures["searched"][0])
    assert rate.layout.yaxis.type == "log"
    names = [trace.name for trace in rate.data if trace.showlegend]
    assert names == ["lr[embedding]", "lr[transformer]", "lr[head]", "plain schedule", "estimated rate"]
    assert [shape.line.dash for shape in rate.layout.shapes] == ["dot", "dash", "dot"]  # one of them is a setback


def test_curves_that_coincide_are_told_apart(tmp_path: Path) -> None:
    runs = [load_run(searched_folder(tmp_path / name)) for name in ("one", "two", "three")]
    for figure in comparison_figures(runs):
        assert len({trace.line.dash for trace in painted(figure).data}) == 3


def test_one_file_that_needs_no_network(tmp_path: Path) -> None:
    out = write_report([load_run(searched_folder(tmp_path / "a"))], tmp_path / "deep" / "report.html")
    text = out.read_text()
    page = Tags(text)
    assert len(text) <= 2_100_000
    assert "plotly.js v" in page.script("plotly")[:200]
    assert not [tag for tag, found in page.tags if {"src", "href"} & set(found)]
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    policy = next(found["content"] for tag, found in page.tags if found.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    labels = [found.get("aria-label") for tag, found in page.tags if found.get("role") == "img"]
    assert len(labels) == 3
    assert all(labels)


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    run = load_run(trained_journal(tmp_path / "b.jsonl"))
    first = write_report([run], tmp_path / "1.html").read_bytes()
    assert write_report([run], tmp_path / "2.html").read_bytes() == first


def test_names_from_files_are_escaped_everywhere(tmp_path: Path) -> None:
    knob, folder = f"lr[{NASTY}]", tmp_path / "<script>alert(3)<"
    record = {**a_round(0, delta=[1.0], learned=[2.0]), "event": NASTY}
    nasty = write_folder(folder, a_header([knob], note=NASTY), record, name=NASTY)
    table = Table([NASTY], [[NASTY]], NASTY)
    page = write_report([load_run(nasty), load_run(nasty)], tmp_path / "r.html", title=NASTY, table=table).read_text()
    for part in ("<script>alert", "<img", "</script><script>a", "\u2028'"):
        assert part not in page, part
    tags = Tags(page)
    assert [tag for tag, _ in tags.tags].count("script") == 3
    assert not [tag for tag, _ in tags.tags if tag == "img"]
    assert NASTY in tags.text
    plots = json.loads(tags.script("plots"))
    texts = [trace.get("name", "") for plot in plots for trace in plot["data"]]
    assert any("&lt;script" in text for text in texts)  # plotly reads a little HTML: there too it is text
    assert not any("<script" in text or "<img" in text for text in texts)


def test_several_runs_have_a_table_and_each_its_own_folded_section(tmp_path: Path) -> None:
    folders = searched_folder(tmp_path / "a"), searched_folder(tmp_path / "b", 5, 3.3)
    runs = [load_run(folder) for folder in folders]
    page = Tags(write_report(runs, tmp_path / "r.html", table=Table(["x"], [["7"]], "Mine")).read_text())
    assert page.text.index("Mine") < page.text.index("the lowest loss first") < page.text.index("Peak rate moved")
    runs_shown = [found for tag, found in page.tags if tag == "details" and found.get("class") == "run"]
    assert runs_shown == [{"class": "run"}, {"class": "run"}]  # none of them open


def test_a_headline_and_a_title_of_ones_own(tmp_path: Path) -> None:
    runs = [load_run(searched_folder(tmp_path / name)) for name in ("one", "two")]
    page = Tags(write_report(runs, tmp_path / "r.html", title="Both", headline="It works.").read_text())
    assert page.text.index("Both") < page.text.index("It works.") < page.text.index("the lowest loss first")
    assert "ended lowest" not in page.text
    plots = json.loads(page.script("plots"))
    assert [trace["name"] for trace in plots[0]["data"]] == ["one", "two"]
    assert len(plots) == len([found for _, found in page.tags if found.get("class") == "plot"]) == 8  # in this order


def test_an_alarm_is_a_banner(tmp_path: Path) -> None:
    words = "steps do not follow the rate"
    well = load_run(write_journal(tmp_path / "well", a_header(max_lr=0.1), a_round(0)))
    blind = load_run(write_journal(tmp_path / "blind", a_header(max_lr=0.1), a_round(0, event="stopped", why=words)))
    one = Tags(write_report([blind], tmp_path / "1.html").read_text())
    assert ("section", {"class": "card alarm", "role": "alert"}) in one.tags
    assert f"step 10: {words}." in one.text
    assert "Do not use the rate of this run" in one.text
    assert "Use again" not in one.text
    both = Tags(write_report([well, blind], tmp_path / "2.html").read_text())
    assert f"blind, step 10: {words}." in both.text
    assert "alert" not in [
        found.get("role") for _, found in Tags(write_report([well], tmp_path / "3").read_text()).tags
    ]


@pytest.mark.parametrize("record", [None, a_round(0, [None, None], base=[0.0], base_before=[0.0], seconds={})])
def test_a_run_with_nothing_to_show_has_a_page_all_the_same(tmp_path: Path, record: dict[str, Any] | None) -> None:
    run = load_run(write_journal(tmp_path / "x", a_header(), *([record] if record else [])))
    assert "hdet report" in write_report([run], tmp_path / "r.html").read_text()
    assert [one.title for one in run_figures(run)] == (["Learning rate", "Replica divergence"] if record else [])


def test_no_runs_and_missing_packages_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="at least one run"):
        write_report([], tmp_path / "r.html")
    run = load_run(write_journal(tmp_path / "x", a_header()))
    for missing in ("jinja2", "plotly.offline"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)
            says = f"{missing.partition('.')[0]} is not installed; run `pip install jinja2 plotly"
            with pytest.raises(ArgumentError, match=says):
                write_report([run], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_show_says_in_a_terminal_what_the_page_says(tmp_path: Path) -> None:
    folder = searched_folder(tmp_path / "auto")
    run, shown = load_run(folder), hdet.show(folder)
    found = advice(run)
    assert found is not None
    assert repr(shown) == f"{verdict(run)} {found}"
    assert html.escape(verdict(run)) in shown._repr_html_().split("<iframe")[0]


def test_show_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = write_journal(tmp_path / "x", a_header())
    with pytest.raises(ArgumentError, match="journal must be a path, but got 3"):
        hdet.show(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="does not exist"):
        hdet.show(tmp_path / "nothing")
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ArgumentError, match=r"plotly is not installed; run `pip install jinja2 plotly"):
        hdet.show(journal)


def test_the_library_alone_imports_nothing_of_the_report() -> None:
    code = "import sys, hdet; sys.exit(any(n in sys.modules for n in ('jinja2', 'plotly', 'hdet.report.figures')))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
