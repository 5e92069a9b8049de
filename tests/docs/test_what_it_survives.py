"""docs/what-it-survives.md says what was found, and its loop starts a run again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.code_blocks import blocks
from tests.faults.matrix import PAGE, filled, read
from tests.faults.training import Plan
from tests.faults.trial import undisturbed
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_the_tables_of_the_results() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert filled(text, read()) == text, "python -m tests.faults.matrix --page"


def test_nothing_was_lost() -> None:
    assert not [result for result in read() if result.lost]


def test_the_loop_of_the_page_starts_a_killed_run_again(tmp_path: Path) -> None:
    loop = blocks(PAGE, "bash")[0].source
    script = f"{ROOT / 'tests' / 'faults' / 'restarted.py'} {tmp_path} --dies"
    for theirs, ours in {
        "torchrun": f"{sys.executable} -m torch.distributed.run",
        "--nproc-per-node 4": "--nproc-per-node 2",
        "train.py": script,
    }.items():
        assert theirs in loop
        loop = loop.replace(theirs, ours)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with (tmp_path / "log").open("w") as log:
        subprocess.run(["bash", "-c", loop], env=settings, stdout=log, stderr=log, timeout=PATIENCE, check=True)
    text = (tmp_path / "log").read_text()
    assert (tmp_path / "killed").exists(), text
    assert (tmp_path / "began").read_text() == "18", text  # the last checkpoint before step 20
    whole, _ = undisturbed(Plan("search", 2, save_every=3))
    assert (tmp_path / "end").read_text() == whole.ends[0].digest, text
