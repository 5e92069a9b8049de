"""Bad input is one line with a cure and exit code 2, in every command of the laboratory; help is there for all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.cli.command import run

from hdet.errors import INSTALL
from lab.tests.cli.command import LAB, lab_here

COMMANDS = ("demo", "ablate")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("ablate", "Missing option '--out'. See `python -m lab ablate --help`."),
        ("ablate --out x --steps many", "--steps"),
        ("ablate --out x --steps 0", "steps must be an integer, at least 1"),
        ("ablate --out x --colour red", "No such option"),
        ("ablat", "Did you mean 'ablate'"),
        ("ablate --out x --low 1 --high 0.1", "low must be above 0 and below high"),
        ("ablate --out x --like /no/such", "--like needs the ablation.json"),
        ("demo --replicas 0", "replicas must be an integer, at least 1"),
    ],
)
def test_bad_input_is_one_line(
    arguments: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = lab_here(capsys, *arguments.split(), "--json")
    assert said.code == 2
    assert words in said.complaint
    assert "hdet: " + said.json["error"] == said.complaint
    assert "Traceback" not in said.err
    assert list(tmp_path.iterdir()) == []  # nothing was begun


def test_through_the_real_entry_point(tmp_path: Path) -> None:
    said = run(*LAB, "ablate", "--out", tmp_path / "run", "--steps", "-3")
    assert (said.code, said.out) == (2, "")
    assert said.complaint == "hdet: steps must be an integer, at least 1, but got steps=-3"


def test_help_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("--help",), ("-h",)):
        said = lab_here(capsys, *arguments)
        assert said.code == 0
        assert all(command in said.out for command in COMMANDS)
    for command in COMMANDS:
        said = lab_here(capsys, command, "--help")
        assert said.code == 0
        assert "--json" in said.out
        assert "--force" in said.out


def test_without_plotly_the_demo_says_so_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    for command in COMMANDS:
        said = lab_here(capsys, command, "--out", tmp_path / "x")
        assert said.code == 2
        assert said.complaint.endswith(f"plotly is not installed; {INSTALL}")
    assert not (tmp_path / "x").exists()


def test_commands_that_start_ranks_refuse_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for command in COMMANDS:
        said = lab_here(capsys, command, "--out", tmp_path / "x")
        assert said.code == 2
        assert "starts its ranks itself" in said.complaint
