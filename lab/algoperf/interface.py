"""Holds the submission against the benchmark's own runner: training, a kill, going on from the checkpoint, the target.

    git clone https://github.com/mlcommons/algorithmic-efficiency
    # beside torch and hdet:
    pip install absl-py clu flax gputil jax pandas psutil sentencepiece tensorboard tensorflow-cpu
    make bench-data                                     # the images of mnist
    python lab/algoperf/interface.py algorithmic-efficiency

The clone pins torch 2.5.1; this is checked with the torch that hdet is developed with, so the runner's
`--torch_compile` is off. Prints what the benchmark's scoring reads: time and steps to the target, and the time that
its rules allow. `--workload cifar` has fake images: it shows the interface and the logs alone.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from score import time_to_target

HERE = Path(__file__).resolve().parent
SUBMISSION = "lab/algoperf/submission.py"
PATIENCE = 600.0
"""Seconds for each of the two runs."""
TARGETS = {"mnist": 0.97, "cifar": 0.85}
KILLED_AFTER = {"mnist": 2, "cifar": 1}
"""The earliest step whose checkpoint will do. On a CPU cifar's next one may be that of the end."""
BUDGETS = {"mnist": 1.5 * 60, "cifar": 1.5 * 3600}
"""Seconds of training that the self-tuning ruleset allows."""


def started(benchmark: Path, folder: Path, words: list[str]) -> subprocess.Popen[bytes]:
    """The runner in a process of its own; its log goes to the folder."""
    flags = {
        "framework": "pytorch",
        "tuning_ruleset": "self",
        "submission_path": SUBMISSION,
        "experiment_dir": folder,
        "experiment_name": "interface",
        "torch_compile": False,
        "resume_last_run": True,
        "rng_seed": 1,
    }
    command = [
        sys.executable,
        HERE / "runner.py",
        benchmark,
        *(f"--{key}={value}" for key, value in flags.items()),
        *words,
    ]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            command, cwd=HERE.parents[1], stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )


def saved(log: str) -> list[int]:
    """The steps of the checkpoints. A file that is there may still be being written."""
    return [int(step) for step in re.findall(r"Saved checkpoint to .*checkpoint_(\d+)\.", log)]


def killed_after(runner: subprocess.Popen[bytes], log: Path, step: int) -> int:
    """Kill the runner once it has saved a step as late as this, and return that step."""
    until = time.monotonic() + PATIENCE
    while not (steps := [one for one in saved(log.read_text()) if one >= step]):
        if runner.poll() is not None or time.monotonic() > until:
            runner.kill()
            raise SystemExit(f"{log.read_text()[-3000:]}\nthe runner saved no checkpoint from step {step} on")
        time.sleep(0.1)
    runner.kill()
    runner.wait()
    return steps[-1]


def evaluations(trial: Path) -> list[dict[str, str]]:
    with (trial / "eval_measurements.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", type=Path, help="a clone of mlcommons/algorithmic-efficiency")
    parser.add_argument("--workload", choices=tuple(TARGETS), default="mnist")
    parser.add_argument("--steps", type=int, help="stop after so many steps; cifar: 40 on a CPU")
    given = parser.parse_args()
    benchmark, workload = given.benchmark.resolve(), given.workload
    words = [f"--workload={workload}", *([f"--max_global_steps={given.steps}"] if given.steps else [])]
    with TemporaryDirectory() as name:
        folder = Path(name)
        trial = folder / "interface" / f"{workload}_pytorch" / "trial_1"
        step = killed_after(started(benchmark, folder, words), folder / "log", KILLED_AFTER[workload])
        print(f"killed after the checkpoint of step {step}")
        if started(benchmark, folder, words).wait(PATIENCE) != 0:
            raise SystemExit((folder / "log").read_text()[-3000:])
        rows = evaluations(trial)
        log = (folder / "log").read_text()
    if not re.search(rf"Loaded checkpoint from .*checkpoint_{step}\b", log) or rows[-1]["preemption_count"] != "1":
        raise SystemExit("the second run did not go on from the checkpoint of the first")
    times, steps, accuracies = (
        [float(row[column]) for row in rows] for column in ("score", "global_step", "validation/accuracy")
    )
    for at, second, accuracy in zip(steps, times, accuracies, strict=True):
        print(f"step {at:6.0f} {second:7.1f} s  validation accuracy {accuracy:.4f}")
    seconds = time_to_target(times, accuracies, TARGETS[workload], is_minimized=False)
    needed = time_to_target(steps, accuracies, TARGETS[workload], is_minimized=False)
    reached = f"after {needed:.0f} steps and {seconds:.1f} s" if math.isfinite(seconds) else "not reached"
    print(f"target {TARGETS[workload]}: {reached}; {BUDGETS[workload]:.0f} s are allowed")


if __name__ == "__main__":
    main()
