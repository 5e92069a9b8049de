"""tools/walk.py counts what it says."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE

SCRIPT = Path(__file__).resolve().parents[1] / "tools" / "walk.py"
CALLER = """
from called import ask, twice

def begin(answer):
    own()
    return [twice(answer) for _ in range(3)] + sorted([2, 1], key=ask)

def own():
    "Called, and in the same file."
"""
CALLED = '''
"""Two functions."""

def twice(answer):  # one calls back
    return answer() + answer()

def ask(value):
    """What sorted, which is not of these files, calls."""

    return (
        value
    )
'''


@pytest.fixture
def walk() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.mark.quick
def test_calls_and_changes_of_file(walk: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "caller.py").write_text(CALLER)
    (tmp_path / "called.py").write_text(CALLED)
    monkeypatch.syspath_prepend(tmp_path)
    import caller  # type: ignore[import-not-found]

    seen = walk["walk_of"](lambda: caller.begin(lambda: 1), tmp_path)
    assert seen.calls == {"caller.py": 2, "called.py": 5}  # begin, own; three times twice, and ask of 2 and of 1
    assert seen.changes == 5
    assert str(seen) == "  2 files     7 calls    5 changes of file"
    assert walk["rooms"](tmp_path) == {"caller.py": 5, "called.py": 6}
    for name in ("caller", "called"):
        del sys.modules[name]


@pytest.mark.quick
def test_a_call_that_raises_is_left(walk: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raising.py").write_text(
        "def fail():\n    raise KeyError\n\ndef f():\n    try:\n        fail()\n    except KeyError:\n        pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import raising  # type: ignore[import-not-found]

    assert walk["walk_of"](raising.f, tmp_path) == ({"raising.py": 2}, 0)
    assert sys.getprofile() is None
    del sys.modules["raising"]


def test_the_script_runs() -> None:
    def lines(*arguments: str) -> list[str]:
        command = [sys.executable, str(SCRIPT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        return done.stdout.splitlines()

    assert [line[:15].strip() for line in lines()] == ["hdet.auto(...)", "a round's end", "a plain step"]
    *rooms, total = [line.split() for line in lines("--lines")]
    assert int(total[0]) == sum(int(count) for count, _ in rooms)
