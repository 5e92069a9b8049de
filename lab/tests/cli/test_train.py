"""python -m lab train, as processes: one replica and several, killed, stopped and resumed."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from tests.cli.command import run, said, started
from tests.examples.launch import TORCHRUN

import hdet
from hdet.report.data import load_run
from lab.runs.folder import Folder
from lab.tests.cli.command import DIGITS, LAB, lab_here, pids_with, processes_with, wait_until

TRAINED = ("train", *DIGITS, "--method", "replicas", "--lr", "0.01", "--sync-every", "5")


def step_of(folder: Folder) -> int:
    """The step of the checkpoint that is there; -1 without one."""
    if not folder.checkpoint.exists():
        return -1
    return int(torch.load(folder.checkpoint, weights_only=True)["values"]["step"])


def rounds_in(folder: Folder) -> int:
    """Lines of its journal, the cheap way."""
    return folder.journal.read_bytes().count(b"\n") if folder.journal.exists() else 0


def test_killed_and_resumed_equals_not_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, killed = Folder(tmp_path / "whole"), Folder(tmp_path / "killed")
    with started(*LAB, *TRAINED, "--steps", 150, "--out", killed.path) as process:
        wait_until(lambda: rounds_in(killed) > 4)
        process.send_signal(signal.SIGKILL)
        process.wait()
    rounds = len(hdet.read_journal(killed.journal).rounds)
    at = step_of(killed)
    assert 5 * (rounds - 1) <= at <= 5 * rounds < 150  # nothing but the unfinished round, at most, is lost
    resumed = lab_here(capsys, "train", "--out", killed.path, "--resume", "--json")
    assert resumed.code == 0
    assert f"going on at step {at}" in resumed.err
    untouched = lab_here(capsys, *TRAINED, "--steps", 150, "--out", whole.path, "--json")
    assert untouched.code == 0
    assert resumed.json["final"] == untouched.json["final"]
    one, other = (torch.load(f.checkpoint, weights_only=True)["states"]["model"] for f in (whole, killed))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_two_replicas_stopped_resumed_and_one_killed(tmp_path: Path) -> None:
    """SIGTERM to all processes leaves a checkpoint at a step, from which it goes on; a rank that dies is one line."""
    folder = Folder(tmp_path / "run")
    with started(*LAB, *TRAINED, "--replicas", 2, "--steps", 20_000, "--out", folder.path, "--json") as process:
        wait_until(lambda: rounds_in(folder) > 4)
        everybody = pids_with(folder.path)
        assert len(everybody) == 4  # the command, the launcher, two ranks
        for pid in everybody:
            os.kill(pid, signal.SIGTERM)
        stopped = said(process)
    assert stopped.code == 143, stopped.err
    assert f"stopped; go on with: python -m lab train --out {folder.path} --resume" in stopped.err
    assert stopped.json["outcome"] == "stopped"
    assert f"stopped at step {step_of(folder)}" in stopped.err
    assert "Traceback" not in stopped.err
    assert processes_with(folder.path) == 0
    assert len(load_run(folder.path).rounds) >= 2

    reached, rounds = step_of(folder), rounds_in(folder)
    with started(*LAB, "train", "--out", folder.path, "--resume", "--json") as process:
        wait_until(lambda: rounds_in(folder) > rounds + 4)
        os.kill(a_rank(folder.path), signal.SIGKILL)
        failed = said(process)
    assert failed.code == 1
    last = failed.err.splitlines()[-1]
    assert re.match(r"hdet: the replicas failed: rank [01] was ended by SIGKILL; ", last), last
    assert "ranks.log has details" in last
    assert f"python -m lab train --out {folder.path} --resume` goes on" in last
    assert "Traceback" not in failed.err
    assert failed.json["code"] == 1
    assert processes_with(folder.path) == 0
    journal = hdet.read_journal(folder.journal)
    assert [record["step"] for record in journal.resumes] == [reached]
    assert 0 <= journal.rounds[-1]["step"] - step_of(folder) <= 5
    weights = torch.load(folder.checkpoint, weights_only=True)["states"]["model"]
    assert all(torch.isfinite(weight).all() for weight in weights.values())


def a_rank(path: Path) -> int:
    """The process of one of a run's ranks."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"lab.runs.worker" in words and b"lab.runs.torchrun" not in words and str(path).encode() in words:
            return int(entry.name)
    raise AssertionError("no rank found")


def test_a_search_under_torchrun(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = (*TORCHRUN, "--nproc-per-node", 2, "-m", "lab", "train", *DIGITS, "--guess", "1e-7", "--steps", 60)
    done = run(*command, "--out", out, "--json")
    assert done.code == 0, done.err
    assert len(done.out.splitlines()) == 1  # one rank speaks
    assert done.json["arguments"]["replicas"] == 2
    assert done.json["rate"] > 1e-5  # the guess was far off
    assert load_run(out).searched
    assert not load_run(out).summary.crashed


# -- what needs no process of its own ----------------------------------------------------------------------------------


def test_says_what_came_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = lab_here(capsys, *TRAINED, "--steps", 10, "--out", tmp_path / "run")
    assert done.code == 0
    assert done.err == ""
    assert "complete at step 10" in done.out
    assert "final validation loss" in done.out
    assert f"hdet report {tmp_path / 'run'}" in done.out.replace("\n", "")


def test_json_is_the_only_line_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = lab_here(capsys, *TRAINED, "--steps", 10, "--out", tmp_path / "run", "--json")
    assert done.code == 0
    assert len(done.out.splitlines()) == 1
    assert done.json["outcome"] == "complete"
    assert done.json["arguments"]["steps"] == 10
    assert done.json["final"]["accuracy"] >= 0
    assert "complete at step 10" in done.err


def test_nothing_is_overwritten_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = lab_here(capsys, *TRAINED, "--steps", 5, "--out", tmp_path, "--json")
    again = lab_here(capsys, *TRAINED, "--steps", 5, "--out", tmp_path)
    assert again.code == 2
    assert "has a run already" in again.complaint
    assert Folder(tmp_path).read()["final"]["loss"] == first.json["final"]["loss"]
    forced = lab_here(capsys, *TRAINED, "--steps", 6, "--out", tmp_path, "--force", "--json")
    assert forced.json["steps"] == 6


def test_resume_remembers_the_options_and_refuses_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab_here(capsys, *TRAINED, "--steps", 5, "--out", tmp_path)
    same = lab_here(capsys, "train", "--out", tmp_path, "--resume", "--lr", "0.01", "--steps", 5, "--json")
    assert same.code == 0
    assert "is complete" in same.err
    for option, value, words in (
        ("--lr", "0.02", "--lr is 0.02 here, but the run in"),
        ("--steps", "6", "--steps is 6 here"),
        ("--method", "none", "--method is none here"),
        ("--no-auto-lr", None, "--auto-lr is none here"),
    ):
        other = lab_here(capsys, "train", "--out", tmp_path, "--resume", option, *([value] if value else []))
        assert other.code == 2
        assert words in other.complaint
    nothing = lab_here(capsys, "train", "--out", tmp_path / "nowhere", "--resume")
    assert nothing.code == 2
    assert "has no run to go on with" in nothing.complaint


def test_a_run_that_diverges_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--method", "none", "--optimizer", "sgd", "--lr", "1e30", "--steps", 30, "--out", tmp_path, "--json")
    done = lab_here(capsys, "train", *DIGITS, *arguments)
    assert done.code == 1
    assert done.json["outcome"] == "crashed"
    assert "try a lower --lr" in done.err
