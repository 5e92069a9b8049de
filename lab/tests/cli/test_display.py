"""What is shown while runs go on: live on a terminal, plain lines in a log."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from lab.cli.display import Lines, Screen, display_for, rows
from lab.runs.plan import Plan

START = {"kind": "start", "run": 0, "steps": 10, "replicas": 2, "groups": ["conv", "head"]}
STEP = {"kind": "step", "run": 0, "step": 5, "base": [0.1, 0.2], "loss": 1.25}
ROUND = {
    "kind": "round",
    "run": 0,
    "step": 4,
    "base": [0.1, 0.2],
    "learned": [1.0, 2.1],
    "event": None,
    "rows": [
        {"values": [0.09, 0.22], "loss": 1.5, "weight": 0.75},
        {"values": [0.11, 0.18], "loss": 1.6, "weight": None},
    ],
}
JOBS = [Plan("feed", 10, "a"), Plan("feed", 30, "b")]


def drawn(what: Any) -> str:
    text = io.StringIO()
    Console(file=text, width=100).print(what)
    return text.getvalue()


def test_one_line_per_replica() -> None:
    lines = drawn(rows(START | {"method": "replicas"}, STEP, ROUND)).splitlines()
    assert lines[0].split() == ["rate,", "conv", "rate,", "head", "loss", "weight"]
    assert lines[1].split() == ["replica", "0", "0.09", "0.22", "1.5", "0.75", "██████"]
    assert lines[2].split() == ["replica", "1", "0.11", "0.18", "1.6"]
    assert lines[3].split() == ["base", "0.1", "0.2", "1.25"]
    assert lines[4].split() == ["learned", "1×", "2.1×"]


def test_one_line_for_a_search() -> None:
    lines = drawn(rows(START | {"method": "search"}, STEP, ROUND)).splitlines()
    assert "weight" not in lines[0]
    assert lines[1].split() == ["last", "round", "0.09", "0.22", "1.5"]
    assert [line.split()[0] for line in lines[3:]] == ["now", "found"]


def test_before_the_first_round_and_without_rounds() -> None:
    lines = drawn(rows(START | {"method": "none"}, STEP, None)).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["base"]


def test_a_terminal_gets_a_bar_with_the_time_left() -> None:
    text = io.StringIO()
    console = Console(file=text, width=100, force_terminal=True)
    with display_for(console, JOBS) as display:
        assert isinstance(display, Screen)
        for message in (START | {"method": "replicas"}, ROUND, STEP, {"kind": "end", "run": 0, "outcome": "complete"}):
            display.show(message)
    assert "step 5 of 10" in text.getvalue()
    assert "(1 of 2)" in text.getvalue()
    assert "replica 1" in text.getvalue()


def test_a_log_gets_lines() -> None:
    text = io.StringIO()
    with display_for(Console(file=text, width=100), JOBS) as display:
        assert isinstance(display, Lines)
        for message in (
            START,
            ROUND,
            STEP,
            STEP | {"step": 6},
            ROUND | {"step": 7, "event": "ruined: rolled back to step 3"},
            {"kind": "end", "run": 0, "outcome": "complete"},
        ):
            display.show(message)
        display.show(START | {"run": 1})
    assert text.getvalue().splitlines() == [
        "[1/2] a: 10 steps, replicas: 2",
        "[1/2] a: step 5 of 10, rate 0.1, loss 1.25",  # the second one came too soon after it
        "[1/2] a: step 7, ruined: rolled back to step 3",
        "[1/2] a: complete",
        "[2/2] b: 30 steps, replicas: 2",
    ]
