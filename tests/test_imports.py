"""What an import brings with it: ``hdet``, ``hdet.jax`` and the command line need no torch."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import hdet
from tests.patience import PATIENCE

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
