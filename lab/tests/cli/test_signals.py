"""Signals to the commands: an exit code that tells which, how to go on, and no rank that is left."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.cli.command import said, started
from tests.patience import PATIENCE

from lab.runs.folder import Folder
from lab.runs.run import Run
from lab.tests.cli.command import LAB, lab_here


@pytest.fixture(autouse=True)
def _ctrl_c_counts() -> Iterator[None]:
    """Whoever starts the tests in the background of a shell starts them with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("command", "how"),
    [
        (("demo", "--steps", 20, "--ensemble-steps", 4), "begin again with: python -m lab demo --out"),
        (("ablate", "--quick", "--replicas", 1), "the same command goes on"),
    ],
)
def test_studies_say_how_to_go_on(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: Sequence[object],
    how: str,
    which: signal.Signals,
) -> None:
    monkeypatch.setattr(Run, "_step", lambda run, number: signal.raise_signal(which))
    before = signal.getsignal(signal.SIGTERM)
    stopped = lab_here(capsys, *command, "--out", tmp_path / "study", "--json")
    assert stopped.code == 128 + which
    assert stopped.json["outcome"] == "stopped"
    assert f"stopped; {how}" in stopped.err
    assert signal.getsignal(signal.SIGTERM) == before


def test_no_rank_is_left(tmp_path: Path) -> None:
    out = tmp_path / "study"
    with started(*LAB, "ablate", "--quick", "--steps", 100_000, "--out", out, "--json") as process:
        _wait_until(lambda: Folder(out / "warm-start-0").complete)
        children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        assert len(children) >= 2  # the ranks, and what Python itself starts with them
        process.send_signal(signal.SIGTERM)
        stopped = said(process)
    assert stopped.code == 128 + signal.SIGTERM
    assert json.loads((out / "ablation.json").read_text())["complete"] is False
    _wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


def _wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)
