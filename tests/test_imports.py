"""What an import brings with it: ``hdet``, ``hdet.jax`` and the command line need no torch."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import hdet
from tests.patience import PATIENCE
from tests.report.made_up import a_header, a_round, write_journal

pytestmark = pytest.mark.quick
HELP = """
from hdet.cli import main
try:
    main(["--help"])
except SystemExit as end:
    assert not end.code
"""


def without_torch(code: str) -> None:
    """Run it in a process of its own, which must not import torch."""
    code += "\nimport sys\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", ["import hdet", HELP, "import hdet\nhdet.read_journal, hdet.AsPrinted"])
def test_these_import_no_torch(code: str) -> None:
    without_torch(code)


@pytest.mark.parametrize(
    ("command", "others"),
    [
        ("export run.jsonl", "numpy plotly jinja2"),
        ("export run.jsonl --every-step -o run.csv", "numpy plotly jinja2"),
        ("compare run.jsonl run.jsonl", "numpy plotly jinja2"),
        ("report run.jsonl", ""),
        ("--version", "numpy plotly jinja2"),
        ("none", "numpy plotly jinja2"),
    ],
)
def test_commands_import_no_torch(command: str, others: str, tmp_path: Path) -> None:
    """Nor anything else that takes long, before their first line."""
    if command.startswith("report"):
        pytest.importorskip("plotly")
        pytest.importorskip("jinja2")
    write_journal(tmp_path / "run.jsonl", a_header(), a_round(0), a_round(1))
    without_torch(
        f"""if True:
        import os, sys
        os.chdir({str(tmp_path)!r})
        from hdet.cli import main
        try:
            main({command.split()!r})
        except SystemExit as end:
            assert end.code == {2 if command == "none" else 0}
        assert not set(sys.modules) & set({others.split()!r})
        """
    )


def test_a_report_says_its_first_line_before_it_draws(tmp_path: Path) -> None:
    journal = write_journal(tmp_path / "run.jsonl", a_header(), a_round(0), a_round(1))
    without_torch(
        f"""if True:
        import sys
        sys.modules["plotly"] = None
        from hdet.cli import main
        import hdet.cli.output as output
        said = []
        output.Output.say = lambda self, text, style="": said.append(text)
        try:
            main(["report", {str(journal)!r}])
        except SystemExit as end:
            assert end.code == 2 and said, (end.code, said)
        """
    )


def test_hdet_jax_imports_no_torch_by_any_way() -> None:
    """Without jax: by the imports in the source, also those inside functions."""
    grimp = pytest.importorskip("grimp")  # it comes with import-linter
    graph = grimp.build_graph("hdet", include_external_packages=True, exclude_type_checking_imports=True)
    assert graph.find_shortest_chains("hdet.jax", "torch") == set()


def test_every_public_name_is_there() -> None:
    assert set(hdet.__all__) <= set(dir(hdet))
    for name in hdet.__all__:
        assert getattr(hdet, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        hdet.nothing  # noqa: B018


def test_no_module_hides_a_public_name() -> None:
    """A module hdet.auto would take the place of the function as soon as anyone imports it."""
    assert not {module.name for module in pkgutil.iter_modules(hdet.__path__)} & set(hdet.__all__)
