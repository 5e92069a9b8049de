"""Bad input is one line with a cure and exit code 2, in every command; help is there for all."""

from __future__ import annotations

import builtins
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hdet.cli import main
from hdet.errors import INSTALL
from tests.cli.command import HDET, hdet_here, run
from tests.report.made_up import a_header, a_round, write_journal

COMMANDS = ("compare", "report", "export", "doctor")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("reprot", "Did you mean 'report'"),
        ("report x --colour red", "No such option"),
        ("report /no/such", "does not exist"),
        ("report", "Missing argument"),
        ("compare /no/such", "compare needs two runs or more"),
        ("compare /no/such /neither", "does not exist"),
        ("export /no/such", "does not exist"),
        ("export /no/such -o schedule.csv", "does not exist"),
    ],
)
def test_bad_input_is_one_line(
    arguments: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = hdet_here(capsys, *arguments.split(), "--json")
    assert said.code == 2
    assert words in said.complaint
    assert "hdet: " + said.json["error"] == said.complaint
    assert "Traceback" not in said.err
    assert list(tmp_path.iterdir()) == []  # nothing was begun


@pytest.mark.parametrize("command", ["report", "compare", "export"])
def test_force_replaces_files_alone(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also as root, for whom the system would replace a device."""
    journal, pipe = write_journal(tmp_path / "x", a_header(), a_round(0)), tmp_path / "pipe"
    os.mkfifo(pipe)
    runs = [journal, journal] if command == "compare" else [journal]
    for out in (pipe, tmp_path):
        said = hdet_here(capsys, command, *runs, "-o", out, "--force")
        assert (said.code, "exists already; name another file" in said.complaint) == (2, True)
    assert pipe.is_fifo()


def test_through_the_real_entry_point(tmp_path: Path) -> None:
    said = run(*HDET, "compare", tmp_path)
    assert (said.code, said.out) == (2, "")
    assert said.complaint == "hdet: compare needs two runs or more, but got one; `hdet report` shows a single one"


def test_help_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("--help",), ("-h",)):
        said = hdet_here(capsys, *arguments)
        assert said.code == 0
        assert all(command in said.out for command in COMMANDS)
    for command in COMMANDS:
        said = hdet_here(capsys, command, "--help")
        assert said.code == 0
        assert "--json" in said.out
        assert ("--force" in said.out) is (command != "doctor")  # it writes nothing that stays
    assert hdet_here(capsys, "--version").out.startswith("hdet ")


def test_a_damaged_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "journal.jsonl").write_text("not a journal\n" * 3)
    for command in ("report", "export"):
        said = hdet_here(capsys, command, tmp_path)
        assert said.code == 2
        assert "journal" in said.complaint


def test_a_mistake_of_ours_is_one_line_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("hdet.cli.app.load_run", broken)
    said = hdet_here(capsys, "report", tmp_path)
    assert said.code == 1
    assert "ZeroDivisionError: oops; this is a bug in hdet" in said.complaint
    monkeypatch.setenv("HDET_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["report", str(tmp_path)])


def test_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hdet.cli.app.load_run", full)
    said = hdet_here(capsys, "report", tmp_path)
    assert said.code == 1
    assert "No space left on device; check the path" in said.complaint


def test_without_typer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "typer":
            raise ModuleNotFoundError("No module named 'typer'", name="typer")
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "hdet.cli.app")
    monkeypatch.setattr(builtins, "__import__", without)
    said = hdet_here(capsys, "--help")
    assert said.code == 2
    assert said.complaint == f"hdet: the command line needs typer; {INSTALL}"
