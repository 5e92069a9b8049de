"""The found schedule is what hdet.schedule_from replays."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from tests.cli.command import hdet_here
from tests.report.made_up import a_header, a_round, searched_folder, trained_journal, write_journal

Export = Callable[..., dict[str, Any]]


@pytest.fixture
def export(capsys: pytest.CaptureFixture[str]) -> Export:
    """What ``hdet export --json`` prints of a journal."""
    return lambda journal, *options: hdet_here(capsys, "export", journal, "--json", *options).json


def of(found: dict[str, Any]) -> tuple[list[int], list[float]]:
    """The steps of a journal with one knob, and its values there."""
    (values,) = found["values"].values()
    return found["steps"], values


def test_every_step_is_what_schedule_from_gives(tmp_path: Path, export: Export) -> None:
    journal = trained_journal(tmp_path / "run.jsonl")
    table = export(journal, "--every-step")
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in table["values"]]
    replay = hdet.schedule_from(journal, torch.optim.SGD(groups, lr=1.0))
    assert list(table["values"]) == ["lr[0]", "lr[1]"]
    assert table["steps"] == list(range(table["steps"][0], 800))
    for values, rate in zip(table["values"].values(), replay.lr_lambdas, strict=True):
        assert values == pytest.approx([rate(step) for step in table["steps"]])


def test_a_row_for_every_end_of_a_round(tmp_path: Path, export: Export) -> None:
    journal = write_journal(tmp_path / "j.jsonl", a_header(("lr[0]",), 2, total_steps=20), a_round(0), a_round(1))
    assert of(export(journal)) == ([9, 10, 19], [0.1, 0.1, 0.1])


def test_every_knob_has_a_column(tmp_path: Path, export: Export) -> None:
    table = export(searched_folder(tmp_path / "run"))
    assert list(table["values"]) == ["lr[embedding]", "lr[transformer]", "lr[head]"]
    assert table["steps"] == sorted(set(table["steps"]))


def searched(k: int, before: float, after: float, **more: object) -> dict[str, object]:
    return a_round(k, [1.0], base_before=[before], base=[after], **more)


def test_the_first_steps_of_a_search_are_not_replayed(tmp_path: Path, export: Export) -> None:
    """Nobody knew how long they were: the rate climbs from where the search began."""
    again = "restarted"
    records = [searched(0, 7.0, 8.0, event=again), searched(1, 8.0, 0.1, event="first_step"), searched(2, 0.2, 0.3)]
    table = of(export(write_journal(tmp_path / "j", a_header(), *records)))
    assert table == ([0, 20, 29], [0.1, 0.1, 0.2])


def test_what_was_gone_back_from_is_not_replayed(tmp_path: Path, export: Export) -> None:
    hot = {"event": "too hot: went back to step 20", "rolled_back_to": 20}
    rates = [(9.0, 0.1), (0.1, 0.2), (0.2, 0.4), (0.4, 0.8), (0.8, 0.3), (0.3, 0.3)]
    told = [{"event": "first_step"}, {}, {}, {}, hot, {}]
    records = [searched(k, *pair, **more) for k, (pair, more) in enumerate(zip(rates, told, strict=True))]
    table = of(export(write_journal(tmp_path / "j", a_header(), *records)))
    assert table == ([0, 10, 19, 50, 59], [0.1, 0.1, 0.1, 0.3, 0.3])


def test_a_search_that_has_only_begun_or_lost_everything(tmp_path: Path, export: Export) -> None:
    begun = searched(0, 9.0, 0.1, event="first_step")
    lost = searched(1, 0.1, 0.03, event="too hot: went back to step 10", rolled_back_to=10)
    for i, (records, rate) in enumerate((([begun], 0.1), ([begun, lost], 0.03))):
        table = of(export(write_journal(tmp_path / str(i), a_header(), *records)))
        assert table == ([0], [rate])


def test_csv_and_json_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str], export: Export) -> None:
    journal = trained_journal(tmp_path / "run.jsonl", rounds=3)
    table = export(journal)
    rows = list(csv.reader(hdet_here(capsys, "export", journal).out.splitlines()))
    assert rows[0] == ["step", "lr[0]", "lr[1]"]
    assert [int(row[0]) for row in rows[1:]] == table["steps"]
    assert [float(row[2]) for row in rows[1:]] == table["values"]["lr[1]"]


def test_where_nothing_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist" in hdet_here(capsys, "export", tmp_path / "nowhere").complaint
    assert "there is none at" in hdet_here(capsys, "export", tmp_path).complaint
    begun = write_journal(tmp_path / "j.jsonl", a_header())
    assert "no round yet" in hdet_here(capsys, "export", begun).complaint


def test_a_group_that_was_added_later_has_no_value_before(tmp_path: Path, export: Export) -> None:
    later = {**a_round(1, knobs=2), "knobs": ["lr[0]", "lr[1]"], "added": {"lr[1]": 10}}
    table = export(write_journal(tmp_path / "j", a_header(("lr[0]",)), a_round(0), later))
    assert table["values"]["lr[1]"][0] is None
    assert table["values"]["lr[1]"][-1] == 0.1
