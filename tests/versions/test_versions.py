"""What every version of hdet since 0.1.0 has written is read for ever: the run goes on, and reaches the same values.

A failure here is a change that breaks somebody's run in silence. Numbers in ``Constants`` and ``Limits`` may change,
since a state brings its own. If anything else has to, raise ``STATE_VERSION`` and turn the states of earlier versions
as they are read. Never write the files of a published version anew.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from hdet.checkpoint import file as checkpoint_file
from hdet.rule.constants import all_numbers
from tests.cli.command import hdet_here
from tests.problems import quiet
from tests.versions.runs import FIXTURES, KINDS, Run, pinned, replayed, resumed

CLOSE = 1e-6
"""Other machines and versions of torch round differently."""
VERSIONS = sorted((folder for folder in FIXTURES.iterdir()), key=lambda one: [int(n) for n in one.name.split(".")])
RUNS = [
    pytest.param(folder, name, id=f"{folder.name}-{name}") for folder in VERSIONS for name in pinned(folder)["runs"]
]
JOURNALS = [
    pytest.param(folder, name, id=f"{folder.name}-{name}") for folder in VERSIONS for name in pinned(folder)["journals"]
]


def is_close(value: Any, expected: Any) -> bool:
    """Whether nested numbers are."""
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(is_close(value[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(value) == len(expected) and all(map(is_close, value, expected))
    return bool(value == (pytest.approx(expected, rel=CLOSE) if isinstance(expected, float) else expected))


@pytest.mark.parametrize(("folder", "name"), RUNS)
def test_a_run_of_an_earlier_version_goes_on(folder: Path, name: str) -> None:
    told = resumed(name, folder)
    assert is_close(told, pinned(folder)["runs"][name]), told


@pytest.mark.parametrize(("folder", "name"), [one for one in RUNS if KINDS[one.values[1]].replicas == 1])
def test_a_state_alone_is_loaded_too(folder: Path, name: str) -> None:
    """As frameworks load it: without the tensors of the search."""
    states = torch.load(folder / f"{name}.pt", weights_only=True)["states"]
    kind = KINDS[name]
    with quiet():
        run = Run(kind, seed=1)
        for part in ("model", "optimizer", "scheduler"):
            run.parts[part].load_state_dict(states[part])
        ours = run.parts["scheduler"].state_dict().get("hdet", {})
        run.go(kind.cut, kind.cut + 20)
    saved = states["scheduler"].get("hdet", {})  # a guard runs beside a scheduler of torch
    assert {key: repr(ours[key]) for key in saved} == {key: repr(saved[key]) for key in saved} | (
        {"hdet": repr(hdet.__version__)} if saved else {}
    )
    assert math.isfinite(run.told()["loss"])


@pytest.mark.parametrize(("folder", "name"), JOURNALS)
def test_a_journal_is_read_and_continued(folder: Path, name: str, tmp_path: Path) -> None:
    journal, expected = tmp_path / "run.jsonl", pinned(folder)["journals"][name]
    shutil.copy(folder / f"{name}.jsonl", journal)
    assert is_close(replayed(journal), expected["as it is"])
    resumed(name, folder, journal)
    assert is_close(replayed(journal), expected["continued"])


@pytest.mark.parametrize(("folder", "name"), JOURNALS)
def test_the_commands_take_it(folder: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal, page = folder / f"{name}.jsonl", tmp_path / "page.html"
    said = hdet_here(capsys, "export", journal, "--json")
    known = json.loads(said.out.splitlines()[-1])
    assert list(known["values"]) == list(pinned(folder)["journals"][name]["as it is"]["schedules"])
    if pytest.importorskip("jinja2") and pytest.importorskip("plotly"):
        assert hdet_here(capsys, "report", journal, "-o", page).code == 0
        assert page.stat().st_size > 10_000


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda one: one.name)
def test_numbers_that_no_state_brings_are_as_they_were(folder: Path) -> None:
    """A search that is resumed would go on with others. If one has to change, make it a field of ``Constants``."""
    brought = {"DEFAULT", "LIMITS", "ROUNDS", "LOOKS"}
    now = {name: value for name, value in all_numbers().items() if name not in brought}
    assert {name: value for name, value in pinned(folder)["numbers"].items() if name not in brought} == now


@pytest.mark.parametrize("name", KINDS)
def test_the_newest_files_are_of_the_formats_of_now(name: str) -> None:
    """If not, ``python -m tests.versions.make`` is due."""
    saved = torch.load(VERSIONS[-1] / f"{name}.pt", weights_only=True)["states"]
    with quiet():
        now = {part: one.state_dict() for part, one in Run(KINDS[name]).parts.items()}
    for part in saved:
        assert _ours(saved[part]) == _ours(now[part])
    for part in ("scheduler", "guard"):
        ours, own = (state[part].get("hdet", state[part]) if part in state else {} for state in (saved, now))
        if isinstance(ours, dict):  # a guard's names its version
            assert _ours(ours) == _ours(own)
            assert ours.get("version") == own.get("version")


def _ours(state: dict[str, Any]) -> list[str]:
    """Its keys, without those that torch's schedulers have had in some versions only."""
    return [key for key in state if not str(key).startswith("_") and key != "verbose"]


@pytest.mark.parametrize("name", ["searching", "onecycle", "ensemble", "guard"])
def test_a_state_of_a_later_version_says_what_to_do(name: str) -> None:
    part, changed = "guard" if name == "guard" else "scheduler", {"version": 99, "hdet": "9.0.0"}
    with quiet():
        own = Run(KINDS[name]).parts[part]
        state = own.state_dict()
    later = {**state, **changed} if name == "guard" else {**state, "hdet": {**state["hdet"], **changed}}
    with pytest.raises(
        hdet.ArgumentError, match=r"= 99 \(written by hdet 9\.0\.0\), but .* update hdet to 9\.0\.0 or l"
    ):
        own.load_state_dict(later)


def test_a_file_of_a_later_version_says_what_to_do(tmp_path: Path) -> None:
    content = {"hdet": 2, "written_by": "9.0.0", "states": {}, "values": {}, "searches": {}}
    checkpoint_file.write(tmp_path / "run.pt", content, 1)
    with pytest.raises(
        hdet.CheckpointError, match=r"version = 2 \(written by hdet 9\.0\.0\), but .* update hdet to 9\.0"
    ):
        hdet.load(tmp_path / "run.pt")


def test_a_journal_of_a_later_version_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"run":"a","kind":"header","schema":2,"hdet":"9.0.0"}\n')
    with pytest.raises(
        hdet.JournalError, match=r"schema of .* = 2 \(written by hdet 9\.0\.0\), .* update hdet to 9\.0\.0"
    ):
        hdet.read_journal(path)
