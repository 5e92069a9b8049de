"""hdet compare, report and export: what is read, shown and written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import hdet_here
from tests.report.made_up import a_header, a_round, searched_folder, trained_journal, write_journal


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = searched_folder(tmp_path / "run")
    done = hdet_here(capsys, "report", folder, "--json")
    assert done.code == 0, done.err
    assert done.json["out"] == str(folder / "report.html")
    assert "<html" in (folder / "report.html").read_text()[:200]
    assert done.json["verdict"] in done.err
    assert f'hdet.schedule_from("{folder / "journal.jsonl"}", optimizer)' in done.err


def test_an_alarm_is_told_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blind = write_journal(
        tmp_path / "blind.jsonl", a_header(max_lr=0.1), a_round(0, event="stopped", why="rate_ignored")
    )
    for command in (("report", blind, "-o", tmp_path / "page.html"), ("compare", blind, blind)):
        done = hdet_here(capsys, *command)
        assert done.code == 0
        assert (
            "blind, step 10: update size does not scale with the learning rate. Do not use the rate of this run."
            in done.out
        )
        assert "Use again" not in done.out


def test_a_page_is_replaced_only_by_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal, page = trained_journal(tmp_path / "run.jsonl"), tmp_path / "x" / "page.html"
    assert hdet_here(capsys, "report", journal, "-o", page).code == 0
    refused = hdet_here(capsys, "report", journal, "-o", page)
    assert refused.code == 2
    assert "exists already" in refused.complaint
    assert hdet_here(capsys, "report", journal, "-o", page, "--force", "--title", "Again").code == 0
    assert "Again" in page.read_text()


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finals = {"a": 3.3, "b": 3.2}
    runs = [searched_folder(tmp_path / name, seed, end) for seed, (name, end) in enumerate(finals.items())]
    page = tmp_path / "compare.html"
    done = hdet_here(capsys, "compare", *runs, "-o", page)
    assert done.code == 0
    assert "b ended lowest" in done.out
    assert "last full round's train loss" in done.out
    assert page.exists()
    as_json = hdet_here(capsys, "compare", *runs, "--json")
    assert [one["loss"] for one in as_json.json["runs"]] == pytest.approx([3.3, 3.2], abs=0.1)
    assert hdet_here(capsys, "compare", *runs, "-o", page).code == 2


def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = searched_folder(tmp_path / "run")
    shown = hdet_here(capsys, "export", folder)
    assert shown.out.startswith("step,lr[embedding],lr[transformer],lr[head]\n")
    as_json = hdet_here(capsys, "export", folder, "--json")
    assert len(as_json.out.splitlines()) == 1
    assert len(as_json.json["steps"]) == len(shown.out.splitlines()) - 1
    whole = hdet_here(capsys, "export", folder, "--every-step")
    assert len(whole.out.splitlines()) > 10 * len(as_json.json["steps"])
    table = tmp_path / "schedule.csv"
    assert hdet_here(capsys, "export", folder, "-o", table).code == 0
    assert hdet_here(capsys, "export", folder, "-o", table).code == 2
    assert hdet_here(capsys, "export", folder, "-o", table, "--force", "--json").json["rows"] > 10
    assert table.read_text() == shown.out
