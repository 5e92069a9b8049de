"""lab/benchmarks/trained_gpu.py: the whole on a CPU with gloo, and what it says without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from tests.examples.launch import ROOT, output_of
from tests.patience import PATIENCE
from trained_gpu import percent

SCRIPT = ROOT / "lab" / "benchmarks" / "trained_gpu.py"
TINY = (
    *("--layers", "1", "--width", "16", "--batch", "2", "--context", "8"),
    *("--blocks", "2", "--steps", "10", "--timeout", "60"),
)


def test_percent_by_hand() -> None:
    """1000 steps of 10 ms, each 1 us dearer, and an end of 9 ms: 10 ms of 10 s."""
    assert percent(1000, 1e-6, 9e-3, 1e-2) == pytest.approx(0.1)


def test_it_runs_on_a_cpu_with_gloo() -> None:
    figures = json.loads(output_of(sys.executable, SCRIPT, "--device", "cpu", *TINY, "--json").splitlines()[-1])
    assert figures["percent_T_50"] > figures["percent_T_1000"]
    for name in ("step_over_torch", "converge_over_flat_gloo", "average_over_flat_gloo", "end_gloo_ms"):
        assert figures[name] > 0
    assert not [name for name in figures if "nccl" in name]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_runs_on_a_gpu_with_nccl_and_gloo() -> None:
    figures = json.loads(output_of(sys.executable, SCRIPT, *TINY, "--json").splitlines()[-1])
    assert figures["converge_over_flat_nccl"] > 0
    assert figures["converge_over_flat_gloo"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "trained_gpu.py needs a CUDA device and found none; --device cpu runs the same on gloo"
    ]


def test_sizes_below_one_are_refused() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--blocks", "0"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert "must be at least 1" in done.stderr
