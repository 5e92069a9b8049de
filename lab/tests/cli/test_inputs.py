"""Bad input for ``python -m lab``, generated as for the library's command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

import pytest
from hypothesis import given
from tests.cli.test_inputs import command_lines, in_folder, is_accepted_or_one_line, spoilt

from lab.cli import app as command_line


class Accepted(BaseException):
    """A run would begin now."""


@pytest.fixture(scope="module", autouse=True)
def nothing_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Inside a folder of its own, where a command stops as soon as it would train."""

    def execute(*_: object, **__: object) -> NoReturn:
        raise Accepted

    with pytest.MonkeyPatch.context() as patch, in_folder(tmp_path_factory.mktemp("inputs")):
        patch.setattr("lab.cli.training.execute", execute)
        yield


@pytest.mark.timeout(1800)
@spoilt
@given(command_lines(command_line.app))
def test_whatever_stands_there_is_accepted_or_one_line(words: list[str]) -> None:
    with contextlib.suppress(Accepted):
        is_accepted_or_one_line(command_line.run, words)


@pytest.mark.parametrize(
    ("command", "words"),
    [
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
