"""Signals to the commands, in this process: a checkpoint, an exit code that tells which, and how to go on."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.runs.folder import Folder
from lab.runs.run import Run
from lab.tests.cli.command import DIGITS, lab_here

TRAINED = ("train", *DIGITS, "--method", "replicas", "--lr", "0.01", "--sync-every", "5", "--steps", "30")


@pytest.fixture(autouse=True)
def _ctrl_c_counts() -> Iterator[None]:
    """Whoever starts the tests in the background of a shell starts them with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def signalled(patch: pytest.MonkeyPatch, step: int, signals: Sequence[signal.Signals]) -> None:
    """Send signals to this process in the middle of a step."""
    original = Run._step

    def stepped(run: Run, number: int) -> Any:
        if number == step:
            for which in signals:
                signal.raise_signal(which)  # in this thread: two of a kind that are under way count once
        return original(run, number)

    patch.setattr(Run, "_step", stepped)


def step_in(folder: Folder) -> int:
    return int(torch.load(folder.checkpoint, weights_only=True)["values"]["step"])


def test_sigterm_stops_with_a_checkpoint_of_this_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Folder(tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        signalled(patch, 12, [signal.SIGTERM])
        stopped = lab_here(capsys, *TRAINED, "--out", folder.path, "--json")
    assert stopped.code == 143
    assert stopped.json == {"outcome": "stopped", "out": str(folder.path)}
    assert stopped.err.splitlines()[-1] == f"stopped; go on with: python -m lab train --out {folder.path} --resume"
    assert step_in(folder) == 13
    assert lab_here(capsys, "train", "--out", folder.path, "--resume").code == 0


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, second: signal.Signals
) -> None:
    folder = Folder(tmp_path / "run")
    signalled(monkeypatch, 12, [signal.SIGINT, second])
    stopped = lab_here(capsys, *TRAINED, "--out", folder.path)
    assert stopped.code == 128 + second
    assert (
        stopped.out.splitlines()[-1] == f"stopped at once; go on with: python -m lab train --out {folder.path} --resume"
    )
    assert step_in(folder) == 10  # the end of the last round


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
    signalled(monkeypatch, 3, [which])
    stopped = lab_here(capsys, *command, "--out", tmp_path / "study", "--json")
    assert stopped.code == 128 + which
    assert stopped.json["outcome"] == "stopped"
    assert f"stopped; {how}" in stopped.err
