"""examples/jax_ensemble.py as a user would run it, on one device and on eight."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE

pytest.importorskip("optax")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "jax_ensemble.py"


@pytest.mark.parametrize(("devices", "more"), [(1, []), (8, ["--mesh"])], ids=["one device", "mesh"])
def test_a_weight_decay_that_is_too_high_comes_down(devices: int, more: list[str]) -> None:
    command = [sys.executable, str(SCRIPT), "--steps", "150", *more]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    decays = [float(value) for value in re.findall(r"decay ([0-9.e+-]+)", ended.stdout)]
    assert len(decays) == 5
    assert decays[-1] < 5.0  # from 10
    assert float(re.findall(r"test loss ([0-9.]+)", ended.stdout)[0]) < 1.2
