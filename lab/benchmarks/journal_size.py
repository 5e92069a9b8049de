"""What a large journal costs its reader: seconds and memory of ``hdet report``, each figure from a process of its own.

python lab/benchmarks/journal_size.py --megabytes 100
python lab/benchmarks/journal_size.py --megabytes 100 --replicas 1    # many short rounds
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hdet.journal import SCHEMA, Journal

KNOBS = 4


def write(path: Path, megabytes: float, replicas: int) -> int:
    """A journal of that size, of so many replicas and four parameter groups. Its number of rounds."""
    journal, k = Journal(path), 0
    names = [f"lr[{g}]" for g in range(KNOBS)]
    journal.write({"kind": "header", "schema": SCHEMA, "replicas": replicas, "knobs": names, "arguments": {}})
    while path.stat().st_size < megabytes * 1e6:
        base = [0.1 * (1 + 0.1 * math.sin(k / 100 + g)) for g in range(KNOBS)]
        rows = [
            {
                "loss": 1 / 3 + 1 / (k + 1) + 0.01 * math.sin(r + k),
                "signal": 1 / 3 + 1 / (k + 1) + 0.01 * math.sin(r + k),
                "values": [value * (1 + 0.01 * r / 3) for value in base],
                "multipliers": [1 + 0.01 * r / 3] * KNOBS,
                "divergence": 0.01 / 3 * math.cos(r + k) ** 2,
            }
            for r in range(replicas)
        ]
        told = {"weights": [1 / replicas] * replicas, "delta": [math.sin(k + g) for g in range(KNOBS)]}
        told |= {"velocity": [0.1 / 3] * KNOBS, "error": None, "learned": [1 + math.sin(k) / 10] * KNOBS}
        seconds = {"train": 7 / 3, "probe": 1 / 3, "gather": 1 / 30, "controller": 1 / 30, "converge": 1 / 30}
        record = {"kind": "round", "round": k, "step": 10 * (k + 1), "replicas": rows, "excluded": [], **told}
        journal.write({**record, "base_before": base, "base": base, "seconds": seconds})
        k += 1
    journal.close()
    return k


def cost(code: str, *arguments: str) -> dict[str, float]:
    """Seconds and megabytes of a process."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, time.perf_counter()
    subprocess.run([sys.executable, "-c", f"{code}\n{_TELL}", *arguments], check=True)
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    return {"seconds": round(time.perf_counter() - began, 1), "cpu_seconds": round(cpu, 1)}


_TELL = "import resource; print('  MB', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, flush=True)"
_REPORT = (
    "import sys; from pathlib import Path; from hdet.report.data import load_run; "
    "from hdet.report.page import write_report; write_report([load_run(sys.argv[1])], Path(sys.argv[2]))"
)
_READ = "import sys; import hdet; hdet.read_journal(sys.argv[1])"
_IMPORT = "import hdet, hdet.report.page"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--replicas", type=int, default=8)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        rounds = write(path, given.megabytes, given.replicas)
        print(json.dumps({"megabytes": path.stat().st_size / 1e6, "rounds": rounds, "cores": os.cpu_count()}))
        for name, code in (("import", _IMPORT), ("read_journal", _READ), ("report", _REPORT)):
            print(json.dumps({"what": name, **cost(code, str(path), str(path.with_suffix(".html")))}), flush=True)


if __name__ == "__main__":
    main()
