"""States of ``hdet.jax.auto`` that earlier versions of hdet have written, in ``tests/fixtures``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import numpy as np

import hdet
from hdet.jax.state import rule_id
from tests.jax.versions import resumed

FILES = sorted(
    (Path(__file__).parents[1] / "fixtures").glob("*/jax.npz"), key=lambda one: [*map(int, one.parent.name.split("."))]
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_a_state_goes_on_or_is_refused(file: Path) -> None:
    """Its constants are in the program: a version with others refuses it, and does not go on with its own."""
    with np.load(file) as saved:
        is_of_now = any(f"numbers-{rule_id()}" in name for name in saved)
    if not is_of_now:
        with pytest.raises(hdet.ArgumentError, match="its run began with other constants; go on with the hdet that"):
            resumed(file)
        return
    told, expected = resumed(file), json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
    assert told.pop("status") == expected.pop("status")
    assert told == pytest.approx(expected, rel=1e-3)  # in float32


def test_this_version_reads_the_newest() -> None:
    """If not, ``python -m tests.versions.make --jax`` is due."""
    with np.load(FILES[-1]) as saved:
        assert any(f"numbers-{rule_id()}" in name for name in saved)
