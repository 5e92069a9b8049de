"""Bad input on the command line, generated: every option with values that it did not ask for.

``HDET_INPUTS=10000`` tries a tenth as many of these.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import typer.main
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hdet.cli import app as command_line

EXAMPLES = max(100, int(os.environ.get("HDET_INPUTS", "0")) // 10)
ODD = [
    *("", " ", "0", "-1", "1", "2", "1.5", "-0.5", "nan", "inf", "-inf", "1e9", "1e400", "abc", "é", "true", "None"),
    *(
        "10^21",
        str(10**10),
        str(10**21),
        str(10**400),
        "9" * 5000,
        "x" * 300,
        ".",
        "..",
        "/dev/null",
        "/no/such",
        "a/b",
    ),
    *("-", "--", "--steps", "auto", "feed", "digits", "[1]", "'", "a b", "\t"),
]

spoilt = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)


@contextlib.contextmanager
def in_folder(path: Path) -> Iterator[None]:
    """Inside, the current folder is another one."""
    before = Path.cwd()
    os.chdir(path)
    yield
    os.chdir(before)


@pytest.fixture(scope="module", autouse=True)
def folder_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with in_folder(tmp_path_factory.mktemp("inputs")):
        yield


@st.composite
def command_lines(draw: st.DrawFn, app: typer.Typer) -> list[str]:
    """A command and its words, one or two of them spoilt."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    name = draw(st.sampled_from(sorted(commands)))
    parameters = [p for p in commands[name].params if p.name != "help"]
    chosen = draw(st.lists(st.sampled_from(parameters), min_size=1, max_size=2, unique=True))
    words: list[str] = []
    for parameter in chosen:
        value = draw(st.sampled_from(ODD) | st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0")))
        if getattr(parameter, "is_flag", False):
            words.append(parameter.opts[0])
        elif parameter.param_type_name == "argument":
            words.append(value)
        else:
            words += [parameter.opts[0], value]
    for parameter in parameters:
        if parameter.required and parameter.param_type_name == "option" and parameter.opts[0] not in words:
            words += [parameter.opts[0], "new"]
    return [name, *words]


def is_accepted_or_one_line(run: Callable[[Sequence[str]], int], words: list[str]) -> None:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = run(words)
    text = said.getvalue()
    assert "bug in hdet" not in text, (words, text)
    assert "Traceback" not in text, (words, text)
    if code:
        assert text.startswith("hdet: "), (words, text)


@pytest.mark.timeout(1800)
@spoilt
@given(command_lines(command_line.app))
def test_whatever_stands_there_is_accepted_or_one_line(words: list[str]) -> None:
    is_accepted_or_one_line(command_line.run, words)
