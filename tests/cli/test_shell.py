"""What people expect of a command in a shell: completion, colours that can be turned off, exit codes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.command import HDET, run, started
from tests.patience import PATIENCE
from tests.report.made_up import a_header, a_round, write_journal

COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3\d|4\d|9\d|10\d)[;m]")
"""A sequence that sets a colour; bold is none."""


def said_with(environment: dict[str, str], *arguments: object) -> str:
    """What is printed in this environment, on a terminal as far as the command knows."""
    command = [*HDET, *map(str, arguments)]
    unset = {"NO_COLOR", "FORCE_COLOR", "PY_COLORS", "TERM"}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        command, env={**kept, **environment}, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    return done.stdout


@pytest.mark.parametrize(
    ("word", "place", "expected"),
    [
        ("hdet ", 1, {"compare", "report", "export", "doctor"}),
        ("hdet re", 1, {"report"}),
        ("hdet export --ev", 2, {"--every-step"}),
    ],
)
def test_words_are_completed(word: str, place: int, expected: set[str]) -> None:
    asked = {"_HDET_COMPLETE": "complete_bash", "COMP_WORDS": word, "COMP_CWORD": str(place)}
    assert set(said_with(asked).split()) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_how(shell: str) -> None:
    said = said_with({"_HDET_COMPLETE": f"source_{shell}"})
    assert f"_HDET_COMPLETE=complete_{shell}" in said


def test_no_color_is_obeyed(tmp_path: Path) -> None:
    """In the help, and in the lines of a command that are red."""
    diverged = a_round(0) | {"event": "rolled_back"}
    journal = write_journal(tmp_path / "x", a_header(), *(diverged | {"round": i} for i in range(3)))
    for arguments in (("--help",), ("compare", journal, journal), ("doctor", "--checkpoints", "/proc/none")):
        loud = said_with({"FORCE_COLOR": "1", "TERM": "xterm-256color"}, *arguments)
        quiet = said_with({"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": "1"}, *arguments)
        assert loud.count("\x1b[") > 0, arguments
        assert not COLOUR.search(quiet), arguments
        if arguments[0] != "compare":  # its table has no colours, only bold text
            assert COLOUR.search(loud), arguments
    assert "\x1b[" not in said_with({}, "--help")  # no terminal


def test_exit_codes(tmp_path: Path) -> None:
    journal = write_journal(tmp_path / "x", a_header(), a_round(0))
    assert run(*HDET, "export", journal).code == 0
    assert run(*HDET, "export", journal, "-o", "/dev/full/x").code == 1
    assert run(*HDET, "export", tmp_path / "none").code == 2
    assert run(*HDET, "none").code == 2


def test_a_pipe_that_is_closed_is_no_error_to_read_about(tmp_path: Path) -> None:
    """As by ``| head -1``. Of a table that is longer than what a pipe holds the rest is not written."""
    journal = write_journal(tmp_path / "x", a_header(), *map(a_round, range(3000)))
    for arguments in (("export", journal, "--every-step"), ("export", journal, "--json"), ("--help",)):
        with started(*HDET, *arguments) as process:
            assert process.stdout is not None
            process.stdout.close()
            assert process.stderr is not None
            said = process.stderr.read()
            assert process.wait(PATIENCE) in (0, 1)
        assert said == "", arguments


def test_stdout_that_the_shell_has_closed(tmp_path: Path) -> None:
    journal = write_journal(tmp_path / "x", a_header(), a_round(0))
    said = run("sh", "-c", f"{shlex.join(map(str, (*HDET, 'export', journal)))} >&-")
    assert (said.code, said.complaint) == (1, "hdet: stdout is closed: redirect it to a file, or to /dev/null")


def test_ctrl_c_while_packages_are_imported() -> None:
    code = (
        "class Interrupts:\n    def find_spec(self, name, *_):\n        if name == 'typer': raise KeyboardInterrupt\n"
    )
    said = run(
        HDET[0], "-c", f"import sys\n{code}sys.meta_path.insert(0, Interrupts())\nfrom hdet.cli import main\nmain([])"
    )
    assert (said.code, said.out, said.complaint) == (130, "", "hdet: stopped")


@pytest.mark.slow
def test_ctrl_c_is_130() -> None:
    # A job in the background of a shell, as these tests may be, does not hear of Ctrl-C by itself.
    code = "import signal, time, hdet.cli.app as app\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "app.load_run = lambda _: print('on', flush=True) or time.sleep(3600)\n"
    with started(HDET[0], "-c", f"{code}from hdet.cli import main\nmain(['report', 'x'])") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "Traceback" not in err
