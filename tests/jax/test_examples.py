"""The examples for optax, flax and equinox run, and end well."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

from tests.patience import PATIENCE

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("name", "needs"), [("optax", "optax"), ("flax", "flax"), ("equinox", "equinox")])
def test_an_example(name: str, needs: str) -> None:
    pytest.importorskip(needs)
    path = EXAMPLES / f"jax_{name}.py"
    if not path.exists():
        pytest.skip("examples/ is not part of a wheel")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    losses = re.match(r"loss (\S+) -> (\S+)\nfound (\S+) within .*, never rolled back", done.stdout)
    assert losses is not None, done.stdout
    assert float(losses[2]) < 0.3 * float(losses[1])
