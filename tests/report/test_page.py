"""The page as text: everything inside, everything escaped. What it looks like is test_browser's matter."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from hdet.errors import ArgumentError
from hdet.report.comparison import compare
from hdet.report.data import load_run
from hdet.report.figures import Figure, comparison_figures, run_figures
from hdet.report.page import Table, write_report
from tests.report.made_up import a_header, a_round, probed_folder, trained_journal, write_folder, write_journal

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\u2028'\""


class Tags(HTMLParser):
    """The tags of a page, and the text outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts.append(data)
        elif not self.tags or self.tags[-1][0] != "style":
            self.text += data


def valid(figure: Figure) -> go.Figure:
    """Checked by plotly itself: an unknown property or a wrong value raises. Roles stand for colours."""
    text = re.sub(r'"--\w+(/[\d.]+)?"', '"#123456"', json.dumps(figure.plot, allow_nan=False))
    return go.Figure(json.loads(text))


def test_the_figures_of_a_run_and_plotly_accepts_them(tmp_path: Path) -> None:
    probed, trained = load_run(probed_folder(tmp_path / "a")), load_run(trained_journal(tmp_path / "b.jsonl"))
    figures = {"probed": run_figures(probed), "trained": run_figures(trained)}
    assert [one.title for one in figures["probed"]] == [
        "Learning rate",
        "weight_decay",
        "Loss",
        "Hypergradient",
        "Where the time went",
    ]
    assert "Replica divergence" in [one.title for one in figures["trained"]]
    for figure in [*figures["probed"], *figures["trained"], *comparison_figures(compare([probed, trained]))]:
        assert valid(figure).data
    rate = valid(figures["probed"][0])
    assert rate.layout.yaxis.type == "log"
    names = [trace.name for trace in rate.data if trace.name]
    assert names == ["plain schedule", "lr[embedding]", "lr[transformer]", "lr[head]", "up", "no signal"]
    assert len({trace.marker.symbol for trace in rate.data if trace.mode == "markers"}) == 2


def test_groups_with_schedules_of_their_own_have_dashes_of_their_own(tmp_path: Path) -> None:
    record = a_round(0, knobs=2, base=[0.1, 0.2])
    run = load_run(write_journal(tmp_path / "x", a_header(("lr[a]", "lr[b]")), record))
    names = [trace["name"] for trace in run_figures(run)[0].plot["data"] if trace.get("line", {}).get("dash") == "dash"]
    assert names == ["plain lr[a]", "plain lr[b]"]


def test_many_knobs_leave_room_for_the_figure(tmp_path: Path) -> None:
    record = a_round(0, knobs=30, delta=[0.1] * 30)
    run = load_run(write_journal(tmp_path / "x", a_header([f"lr[{g}]" for g in range(30)]), record))
    figures = {one.title: one for one in run_figures(run)}
    assert "18 more knobs are not drawn" in figures["Hypergradient"].caption
    shown = [t for t in figures["Learning rate"].plot["data"] if t["mode"] == "lines" and t.get("showlegend", True)]
    assert [trace["name"] for trace in shown] == ["plain schedule"]


def test_one_file_that_needs_no_network(tmp_path: Path) -> None:
    out = write_report([load_run(probed_folder(tmp_path / "a"))], tmp_path / "deep" / "report.html")
    text = out.read_text()
    page = Tags(text)
    assert text.count("plotly.js v") == 1
    assert not [tag for tag, found in page.tags if {"src", "href"} & set(found)]
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    policy = next(found["content"] for tag, found in page.tags if found.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    labels = [found.get("aria-label") for tag, found in page.tags if found.get("role") == "img"]
    assert len(labels) == 5
    assert all(labels)


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    run = load_run(trained_journal(tmp_path / "b.jsonl"))
    first = write_report([run], tmp_path / "1.html").read_bytes()
    assert write_report([run], tmp_path / "2.html").read_bytes() == first


def test_names_from_files_are_escaped_everywhere(tmp_path: Path) -> None:
    knob, folder = f"lr[{NASTY}]", tmp_path / "<script>alert(3)<"
    record = {**a_round(0, delta=[1.0], learned=[2.0]), "event": NASTY}
    nasty = write_folder(folder, a_header([knob], note=NASTY), record, name=NASTY, task=NASTY, final={NASTY: 1.0})
    table = Table([NASTY], [[NASTY]], NASTY)
    page = write_report([load_run(nasty), load_run(nasty)], tmp_path / "r.html", title=NASTY, table=table).read_text()
    for part in ("<script>alert", "<img", "</script><script>a", "\u2028'"):
        assert part not in page.split("plotly.js v")[0], part
        assert part not in page.rsplit('id="plots">')[1], part
    tags = Tags(page)
    assert [tag for tag, _ in tags.tags].count("script") == 3
    assert not [tag for tag, _ in tags.tags if tag == "img"]
    assert NASTY in tags.text
    plots = json.loads(next(text for text in tags.scripts if text.startswith('{"all-')))
    texts = [text for plot in plots.values() for trace in plot["data"] for text in [trace.get("name", "")]]
    assert any("&lt;script" in text for text in texts)  # plotly reads a little HTML: there too it is text
    assert not any("<script" in text or "<img" in text for text in texts)


def test_several_runs_have_a_table_and_each_its_own_folded_section(tmp_path: Path) -> None:
    runs = [load_run(probed_folder(tmp_path / "a", "auto")), load_run(probed_folder(tmp_path / "b", "tuned", 5, 3.3))]
    page = Tags(write_report(runs, tmp_path / "r.html", table=Table(["x"], [["7"]], "Mine")).read_text())
    assert page.text.index("Mine") < page.text.index("the lowest loss first") < page.text.index("Base rate moved")
    runs_shown = [found for tag, found in page.tags if tag == "details" and found.get("class") == "run"]
    assert runs_shown == [{"class": "run"}, {"class": "run"}]  # none of them open


@pytest.mark.parametrize("record", [None, a_round(0, [None, None], base=[0.0], base_before=[0.0], seconds={})])
def test_a_run_with_nothing_to_show_has_a_page_all_the_same(tmp_path: Path, record: dict[str, Any] | None) -> None:
    run = load_run(write_journal(tmp_path / "x", a_header(), *([record] if record else [])))
    assert "hdet report" in write_report([run], tmp_path / "r.html").read_text()
    for figure in run_figures(run):
        valid(figure)


def test_no_runs_and_missing_packages_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="at least one run"):
        write_report([], tmp_path / "r.html")
    run = load_run(write_journal(tmp_path / "x", a_header()))
    for missing in ("jinja2", "plotly.offline"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)
            with pytest.raises(ArgumentError, match=rf"{missing}.*pip install 'hdet\[report\]'"):
                write_report([run], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()
