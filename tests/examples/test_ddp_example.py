"""examples/ddp.py, started by torchrun as its first lines say."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

import hdet
from tests.examples.launch import EXAMPLES, TORCHRUN, output_of

pytest.importorskip("sklearn")
STEPS, STOP, T = 200, 102, 4  # stops inside a round

DDP = EXAMPLES / "ddp.py"
ON_TWO = (*TORCHRUN, "--nproc-per-node=2", DDP, f"--steps={STEPS}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two processes that was stopped half-way: its checkpoint, its journal, its output."""
    path = tmp_path_factory.mktemp("ddp")
    files = (f"--save={path / 'half.pt'}", f"--journal={path / 'journal.jsonl'}")
    (path / "output.txt").write_text(output_of(*ON_TWO, f"--stop-at={STOP}", *files))
    return path


def last_evaluation(output: str) -> tuple[int, float, float]:
    """(step, loss, accuracy) of the last evaluation printed."""
    found = re.findall(r"^step (\d+): validation loss ([\d.]+), accuracy ([\d.]+)%$", output, re.MULTILINE)
    assert found, output
    step, loss, accuracy = found[-1]
    return int(step), float(loss), float(accuracy) / 100


def test_evaluates_and_saves_the_consensus_on_one_rank(folder: Path) -> None:
    output = (folder / "output.txt").read_text()
    step, _, accuracy = last_evaluation(output)
    assert step == STOP
    assert accuracy > 0.9
    assert output.count("validation loss") == 2  # at step 100 and at the stop, by rank 0 alone
    assert (folder / "half.pt").exists()


def test_journal_has_every_round(folder: Path) -> None:
    journal = hdet.read_journal(folder / "journal.jsonl")
    assert journal.header["replicas"] == 2
    assert [record["step"] for record in journal.rounds] == list(range(T, STOP, T))
    for record in journal.rounds:
        assert sorted(replica["multipliers"][0] for replica in record["replicas"]) == pytest.approx([8 / 9, 10 / 9])
        assert all(replica["loss"] > 0 for replica in record["replicas"])


def test_resumes_and_ends_well(folder: Path, tmp_path: Path) -> None:
    path = shutil.copy(folder / "journal.jsonl", tmp_path)
    output = output_of(*ON_TWO, f"--resume={folder / 'half.pt'}", f"--journal={path}")
    step, loss, accuracy = last_evaluation(output)
    assert step == STEPS
    assert loss < 0.15
    assert accuracy > 0.95
    assert "resumed inside round" in output
    journal = hdet.read_journal(path)
    assert [record["step"] for record in journal.resumes] == [STOP]
    assert [record["step"] for record in journal.rounds] == [*range(T, STEPS, T), STEPS - 1, STEPS]


def test_checkpoint_of_two_processes_goes_on_in_one_without_a_launcher(folder: Path) -> None:
    output = output_of(sys.executable, DDP, f"--resume={folder / 'half.pt'}")
    assert last_evaluation(output)[0] == STEPS  # the checkpoint's, not the script's default
