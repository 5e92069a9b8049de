"""Compares `score.py` with the benchmark's own scoring script, on the logs that it has released.

    git clone https://github.com/mlcommons/submissions_algorithms
    pip install absl-py pandas tabulate matplotlib
    python lab/algoperf/released.py submissions_algorithms

Prints both scores of each submission of the leaderboard of version 0.6, scored together. Theirs is a trapezoid rule on
100 points, so the times to target must be equal, and the scores within one part in a hundred.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from score import of_studies, ratios, score, time_to_target

TOLERANCE = 0.01
_MINIMIZED = ("loss", "error", "wer", "ppl")


def _target(targets: dict[str, Any], workload: str) -> tuple[str, float]:
    """The metric's column and the target of a workload; its name ends with the framework's."""
    target = targets["workloads"][workload.rsplit("_", 1)[0]]
    return f"validation/{target['target_metric_name']}", float(target["validation_target_value"])


def _trial(file: Path, metric: str, target: float) -> float:
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    times, values = ([float(row[column] or "nan") for row in rows] for column in ("score", metric))
    return time_to_target(times, values, target, is_minimized=metric.endswith(_MINIMIZED))


def times_of(folder: Path, targets: dict[str, Any]) -> dict[str, float]:
    """The time to target on each workload of the logs of a submission: studies, workloads, trials."""
    studies: dict[str, list[list[float]]] = defaultdict(list)
    for workload in sorted(folder.glob("study_*/*/")):
        files = sorted(workload.glob("trial_*/eval_measurements.csv"))
        if files:
            found = [_trial(file, *_target(targets, workload.name)) for file in files]
            studies[workload.name.rsplit("_", 1)[0]].append(found)
    return {workload: of_studies(trials) for workload, trials in studies.items()}


def theirs(
    repository: Path, folders: dict[str, Path], workloads: tuple[str, ...]
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Times to target and scores on these workloads by the benchmark's own script."""
    sys.path.insert(0, str(repository))
    import pandas
    from scoring import performance_profile, scoring_utils
    from scoring.config import DEFAULT_TARGETS_PATH, WorkloadConfig
    from scoring.score_submissions import compute_leaderboard_score

    frames = {name: scoring_utils.get_experiment_df(str(folder)) for name, folder in folders.items()}
    with TemporaryDirectory() as folder:
        profiles = performance_profile.compute_performance_profiles(
            frames,
            replace(WorkloadConfig.from_json(DEFAULT_TARGETS_PATH), base_workloads=workloads),
            time_col="score",
            max_tau=4.0,
            output_dir=folder,
            self_tuning_ruleset=True,
        )
        table = pandas.read_csv(f"{folder}/time_to_targets.csv", index_col="submission")
    times = {name: {workload: float(time) for workload, time in row.items()} for name, row in table.iterrows()}
    return times, compute_leaderboard_score(profiles)["score"].to_dict()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path, help="a clone of mlcommons/submissions_algorithms")
    repository = parser.parse_args().repository.resolve()
    targets = json.loads((repository / "scoring" / "workload_targets.json").read_text())
    logs = repository / "previous_leaderboards" / "algoperf_v06" / "logs"
    folders = {folder.name: folder for folder in sorted(logs.glob("*_tuning/*/"))}
    own = {name: times_of(folder, targets) for name, folder in folders.items()}
    workloads = tuple(name for name in targets["base_workloads"] if any(name in row for row in own.values()))
    rows = ratios(own, workloads)  # no logs are released of a workload that is new in this version
    their_times, their_scores = theirs(repository, folders, workloads)
    for name, row in rows.items():
        print(f"{name:30} {score(row):.4f} here, {their_scores[name]:.4f} by their script")
        for workload, time in own[name].items():
            other = their_times[name][workload]
            if time != other and not math.isclose(time, other):
                raise SystemExit(
                    f"{name} reaches the target of {workload} after {time} s here, {other} s by their script"
                )
        if abs(score(row) - their_scores[name]) > TOLERANCE:
            raise SystemExit(f"the scores of {name} differ by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
