"""What is shown while runs go on: live on a terminal, plain lines in a log."""

from __future__ import annotations

import io

from rich.console import Console

from lab.cli.display import display_for
from lab.runs.plan import Plan
from lab.runs.teller import Teller

PLANS = [Plan("feed", 10, "a", replicas=2), Plan("feed", 30, "b[bold]")]


def shown(terminal: bool) -> str:
    text = io.StringIO()
    console = Console(file=text, width=120, force_terminal=terminal)
    with display_for(console, PLANS) as show:
        one, two = Teller(show), Teller(show, run=1)
        one.say("start")
        one.step(5, [0.1, 0.2], 1.25, last=True)
        one.step(6, [0.1, 0.2], 1.25, last=True)
        one.write({"kind": "round", "step": 6, "event": "first_step"})
        one.write({"kind": "round", "step": 7, "event": "rolled_back", "rolled_back_to": 3})
        one.say("end", outcome="complete")
        two.say("start")
        two.step(30, [0.1], float("nan"), last=True)
    return text.getvalue()


def test_a_terminal_gets_a_bar_with_the_time_left() -> None:
    text = shown(terminal=True)
    assert "b[bold] (2 of 2)" in text
    assert "step 30" in text
    assert "diverged: rolled back to step 3" in text


def test_a_log_gets_lines() -> None:
    assert shown(terminal=False).splitlines() == [
        "[1/2] a: 10 steps, replicas: 2",
        "[1/2] a: rate 0.1, loss 1.25, step 5 of 10",  # the second one came too soon after it
        "[1/2] a: step 7, diverged: rolled back to step 3",
        "[1/2] a: complete",
        "[2/2] b[bold]: 30 steps, replicas: 1",
    ]
