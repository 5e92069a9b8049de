"""The parts of tools/rehearse_release.py that decide something. It is run as a whole before a release."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.rehearse_release import commands_in, imports_of, left_behind

from tests.release.tree import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("script", [path for path in EXAMPLES if path.stem != "elastic"], ids=lambda path: path.stem)
def test_every_example_says_how_it_is_run(script: Path) -> None:
    commands = commands_in(script)
    assert commands
    assert all(f"examples/{script.name}" in command and "#" not in command for command in commands)


def test_the_lines_of_an_example_are_run_in_their_order() -> None:
    first, *_, last = commands_in(ROOT / "examples" / "ddp.py")
    assert first[:4] == ["torchrun", "--standalone", "--nproc-per-node", "4"]
    assert last == ["torchrun", "--standalone", "--nproc-per-node", "2", "examples/ddp.py", "--resume", "runs/ddp.pt"]
    assert commands_in(ROOT / "examples" / "jax_optax.py") == [["python", "examples/jax_optax.py"]]


def test_processes_that_need_each_other_are_left_out() -> None:
    assert commands_in(ROOT / "examples" / "elastic.py") == []


def test_what_an_example_needs_is_seen() -> None:
    assert {"torch", "hdet", "sklearn"} <= imports_of(ROOT / "examples" / "ddp.py")
    assert {"jax", "optax"} <= imports_of(ROOT / "examples" / "jax_optax.py")


def test_what_uninstalling_leaves_is_seen() -> None:
    before = {Path("site/torch/a.py")}
    caches = {Path("site/torch/__pycache__/a.pyc"), Path("site/hdet/__pycache__/b.pyc")}
    after = {*before, *caches, Path("site/hdet/left.json")}
    assert left_behind(before, after) == [Path("site/hdet/__pycache__/b.pyc"), Path("site/hdet/left.json")]
    assert left_behind(after, after) == []
