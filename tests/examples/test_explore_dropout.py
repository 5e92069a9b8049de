"""examples/explore_dropout.py, short: arms, knobs in the loss, a probe."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest

import hdet
from tests.examples.launch import EXAMPLES, TORCHRUN, output_of

pytest.importorskip("sklearn")
SCRIPT = EXAMPLES / "explore_dropout.py"
BASE = re.compile(r"^step (\d+): Dropout\.p ([\d.]+), label_smoothing ([\d.]+)$", re.MULTILINE)
END = re.compile(r"^test loss [\d.]+, accuracy ([\d.]+)%$", re.MULTILINE)


def logit(value: float) -> float:
    return math.log(value / (1 - value))


def test_replicas_of_two_ranks_explore_loss_knobs(tmp_path: Path) -> None:
    path, ranks, arms = tmp_path / "run.jsonl", 4, 2
    options = ("--steps=120", "--sync-every=20", "--dropout=0.5", f"--arms={arms}", f"--journal={path}")
    output = output_of(*TORCHRUN, f"--nproc-per-node={ranks}", SCRIPT, *options)
    steps = [int(step) for step, _, _ in BASE.findall(output)]
    assert steps == [12 * i for i in range(1, 11)]  # by one rank alone
    [accuracy] = END.findall(output)
    assert float(accuracy) > 50

    journal = hdet.read_journal(path)
    assert journal.header["replicas"] == arms
    assert journal.header["knobs"] == ["Dropout.p", "label_smoothing"]
    for record in journal.rounds:
        per_knob = zip(*(replica["values"] for replica in record["replicas"]), strict=True)
        for values, base in zip(per_knob, record["base_before"], strict=True):
            assert 0 < min(values) < base < max(values) < 1
            assert sum(map(logit, values)) / arms == pytest.approx(logit(base))
        signals = [replica["signal"] for replica in record["replicas"]]
        assert len(set(signals)) == arms  # isolated gradients: the replicas really differ


def test_one_process_trains_at_the_base_values() -> None:
    output = output_of(sys.executable, SCRIPT, "--steps=40", "--dropout=0.3", "--smoothing=0.2")
    assert {(p, s) for _, p, s in BASE.findall(output)} == {("0.300", "0.200")}
    assert END.search(output)
