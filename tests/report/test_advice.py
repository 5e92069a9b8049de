"""What to do next, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hdet.report.data import Event, load_run
from hdet.report.verdict import advice
from hdet.rule.enums import Reason
from tests.report.made_up import a_header, a_round, write_folder, write_journal


def test_what_was_found_and_how_to_use_it_again(tmp_path: Path) -> None:
    record = a_round(0, learned=[0.67], base=[0.067])
    folder = write_folder(tmp_path / "run", a_header(max_lr=0.1), record)
    again = f'hdet.schedule_from("{folder / "journal.jsonl"}", optimizer)'
    assert str(advice(load_run(folder))) == (
        f"Found 0.067. Use again: `max_lr=0.067` begins a new OneCycle with that peak; `{again}` replays the rates "
        "of the run step by step."
    )
    assert advice(load_run(folder / "journal.jsonl")) == advice(load_run(folder))


@pytest.mark.parametrize(
    ("arguments", "learned", "found", "code"),
    [
        ({"max_lr": [0.1, 0.1]}, [2.0, 4.0], "Found [0.2, 0.4].", "max_lr=[0.2, 0.4]"),
        ({"max_lr": 0.1}, [1.0, 1.0], "Stayed at 0.1.", "max_lr=0.1"),
        ({"guess": [0.1, 0.1]}, [3.0, 3.0], "Found 0.3.", "max_lr=0.3"),
        ({"guess": [0.1] * 2, "schedule": "trapezoid"}, [3.0, 3.0], "Found 0.3.", "max_lr=0.3"),
        ({"max_lr": 0.1, "total_steps": 90}, [2.0, 2.0], "Found 0.2 so far.", "max_lr=0.2"),
    ],
)
def test_other_findings(tmp_path: Path, arguments: dict[str, Any], learned: list[float], found: str, code: str) -> None:
    record = a_round(0, knobs=2, learned=learned, base=[0.1 * m for m in learned])
    said = advice(load_run(write_journal(tmp_path / "x", a_header(("lr[0]", "lr[1]"), **arguments), record)))
    assert said is not None
    assert (said.found, said.uses[0][0]) == (found, code)


def test_without_max_lr_only_the_schedule_can_be_used(tmp_path: Path) -> None:
    own = {"guess": [0.1], "schedule": "CosineAnnealingLR"}
    for i, arguments in enumerate(({}, {"decay": "exponential", "max_lr": 0.1}, own)):
        said = advice(load_run(write_journal(tmp_path / str(i), a_header(**arguments), a_round(0))))
        assert said is not None
        assert len(said.uses) == 1


def test_nothing_is_said_where_nothing_was_learned(tmp_path: Path) -> None:
    begun = write_folder(tmp_path / "begun", a_header(max_lr=0.1))
    blind = write_folder(tmp_path / "blind", a_header(max_lr=0.1), a_round(0, event="stopped", why="rate_ignored"))
    assert [advice(load_run(path)) for path in (begun, blind)] == [None] * 2
    assert load_run(blind).alarms == (Event(10, "update size does not scale with the learning rate"),)


def test_alarms_are_told_once_at_the_step_at_which_they_were_noticed(tmp_path: Path) -> None:
    moved, ignored = ({"event": "stopped", "why": why} for why in ("never_moved", "rate_ignored"))
    records = [a_round(k, **more) for k, more in enumerate([{}, moved, moved, ignored])]
    run = load_run(write_journal(tmp_path / "x", a_header(), *records))
    assert [(one.step, one.text) for one in run.alarms] == [
        (20, Reason.NEVER_MOVED.text),
        (40, Reason.RATE_IGNORED.text),
    ]
    assert run.events == tuple(
        Event(step, f"search stopped: {why.text}; using the given rate", is_setback=True)
        for step, why in ((20, Reason.NEVER_MOVED), (40, Reason.RATE_IGNORED))
    )
    well = load_run(write_journal(tmp_path / "well", a_header(), a_round(0, event="first_step")))
    assert well.alarms == ()
