"""A rank that hdet has started, and its parent."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from lab.runs.launch import _reason
from lab.runs.stop import Stop, Terminated, on_signals, terminating
from lab.runs.teller import Teller
from lab.runs.worker import Pipe


def test_messages_are_lines(capfd: pytest.CaptureFixture[str]) -> None:
    Teller(Pipe(Stop()), run=3).say("step", loss=float("nan"))
    assert json.loads(capfd.readouterr().out) == {"kind": "step", "run": 3, "loss": None}


def test_a_parent_that_is_gone_has_asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed without a chance to stop its ranks: they notice at the next word to it, save, and end."""

    def gone(*_: object) -> int:
        raise BrokenPipeError

    stop = Stop()
    monkeypatch.setattr(os, "write", gone)
    Pipe(stop)({"kind": "step"})
    assert stop.asked


def test_the_first_rank_that_failed_is_named_with_its_own_words() -> None:
    own = [{"kind": "failed", "rank": rank, "error": f"ValueError: {rank}\nmore"} for rank in range(3)]
    lost: dict[str, Any] = {"kind": "lost", "rank": 2, "signal": None}
    assert _reason([*own, lost], 1) == "rank 2: ValueError: 2"
    assert _reason([*own, lost | {"signal": "SIGKILL"}], 1) == "rank 2 was ended by SIGKILL"
    assert _reason([own[1], own[0]], 1) == "rank 1: ValueError: 1"
    assert _reason([lost], 3) == "rank 2 ended without a word, exit code 3"
    assert _reason([], 3) == "exit code 3"


def test_a_rank_is_asked_only_once() -> None:
    """The launcher passes on what the rank has got already."""
    stop = Stop()
    with on_signals(stop.ask, only_once=True):
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
    assert stop.asked
    assert stop.code == 128 + 15


def test_sigterm_raises_where_a_command_says_so() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated):
        with terminating(), on_signals(Stop().ask):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)  # the second one
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_asks_once_and_is_put_back() -> None:
    before, stop = signal.getsignal(signal.SIGTERM), Stop()
    with on_signals(stop.ask):
        assert not stop.asked
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked
        assert signal.getsignal(signal.SIGTERM) == before  # the second one is final
    assert signal.getsignal(signal.SIGTERM) == before
