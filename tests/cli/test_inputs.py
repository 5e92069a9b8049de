"""Bad input on the command line, generated: every option with values that it did not ask for.

``HDET_INPUTS=10000`` tries a tenth as many of these.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer.main
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hdet.cli import app as command_line

EXAMPLES = max(100, int(os.environ.get("HDET_INPUTS", "0")) // 10)
COMMANDS: dict[str, Any] = typer.main.get_command(command_line.app).commands  # type: ignore[attr-defined]
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


class Accepted(BaseException):
    """A run would begin now."""


@pytest.fixture(scope="module", autouse=True)
def nothing_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Inside a folder of its own, where a command stops as soon as it would train."""

    def execute(*_: object, **__: object) -> NoReturn:
        raise Accepted

    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("inputs"))
    with pytest.MonkeyPatch.context() as patch:
        for command in ("train", "ablate", "demo"):
            patch.setattr(f"hdet.cli.{command}.execute", execute)
        yield
    os.chdir(before)


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[str, list[str], list[str]]:
    """A command, its words, and the names of what was spoilt."""
    name = draw(st.sampled_from(sorted(COMMANDS)))
    parameters = [p for p in COMMANDS[name].params if p.name != "help"]
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
    if name in ("train", "ablate") and "--out" not in words:
        words += ["--out", "new"]
    return name, words, [parameter.name for parameter in chosen]


@pytest.mark.timeout(1800)
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
@given(command_lines())
def test_whatever_stands_there_is_accepted_or_one_line(line: tuple[str, list[str], list[str]]) -> None:
    name, words, _ = line
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = command_line.run([name, *words])
    except Accepted:
        return
    text = said.getvalue()
    assert "mistake in hdet" not in text, (name, words, text)
    assert "Traceback" not in text, (name, words, text)
    if code:
        assert text.startswith("hdet: "), (name, words, text)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (f"train --out x --{option} {10**21}", f"{option.replace('-', '_')} must be at most")
        for option in ("steps", "replicas", "batch-size", "eval-every", "sync-every")
    ]
    + [
        (f"train --out x --seed {10**21}", "seed must be an integer of 64 bits"),
        (f"ablate --out x --seeds {10**21}", "seeds must be at most"),
        (f"ablate --out x --steps {10**21}", "steps must be at most"),
        (f"ablate --out x --replicas {10**21}", "replicas must be at most"),
        ("ablate --out x --high inf", "high"),
        (f"demo --steps {10**21}", "steps must be at most"),
        (f"demo --replicas {10**21}", "replicas must be at most"),
    ],
)
def test_numbers_without_end_are_refused_at_once(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.run(command.split()) == 2
    assert words in capsys.readouterr().err
