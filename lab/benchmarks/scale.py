"""What ``auto``, and replicas that train apart, would cost large models on many GPUs: a table from measured parts.

    python lab/benchmarks/auto_cost.py --write lab/benchmarks/results/auto_cost.json     # on a GPU, first
    python lab/benchmarks/scale.py          # prints the measured rows, the error of the fit, and the table
    python lab/benchmarks/scale.py --gpus 64 --docs docs/cost.md --plot docs/images/cost.svg

lab/benchmarks/cost_model.py has the formulas. Every assumption is an argument; launch time and memory bandwidth are
fitted unless they are given.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from os.path import relpath
from pathlib import Path
from typing import Any

import scale_picture
from cost_fit import Errors, Row, errors, fit
from cost_model import Machine, Pass, Passes, added, fan_out
from harness import parser
from scale_page import Entry, Held, page

HERE = Path(__file__).resolve().parent
MEASURED = HERE / "results" / "auto_cost.json"
BEGIN, END = "<!-- made by lab/benchmarks/scale.py -->", "<!-- end -->"
PICTURED_GPUS = 64
GRADIENT_BYTES = 4
"""Per parameter."""


# Computing ------------------------------------------------------------------------------------------------------------


def read(path: Path) -> tuple[list[Row], list[Held], float]:
    """Measured rows, memory, and bytes per second of a copy to pinned host memory."""
    if not path.exists():
        raise ValueError(f"{path} does not exist; run lab/benchmarks/auto_cost.py on a GPU first, or give --measured")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        pinned = 1e9 * float(found["copy_gb_per_s"]["pinned"])
        return [Row.read(row) for row in found["rows"]], [Held.read(row) for row in found.get("memory", ())], pinned
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{path} is no JSON file of lab/benchmarks/auto_cost.py: {error}") from error
    except KeyError as error:
        raise ValueError(f"{path} has no entry {error}; write it anew with lab/benchmarks/auto_cost.py") from error


def machine_of(given: argparse.Namespace, fitted: Passes, pinned: float) -> Machine:
    """The assumptions: the fit, unless something else was given."""
    passes = [
        Pass(
            one.launch if given.launch_us is None else 1e-6 * given.launch_us,
            one.bandwidth if given.memory_gb_per_s is None else 1e9 * given.memory_gb_per_s,
        )
        for one in fitted
    ]
    return Machine(
        passes=Passes(*passes),
        tokens=given.tokens,
        flops=1e12 * given.tflops,
        utilisation=given.utilisation,
        gpus_per_node=given.gpus_per_node,
        inside=1e9 * given.inside_gb_per_s,
        between=1e9 * given.between_gb_per_s,
        latency=1e-6 * given.latency_us,
        weight_bytes=given.weight_bytes,
        moment_bytes=given.moment_bytes,
        sync_every=given.sync_every,
        keep=given.keep,
        pinned=pinned,
    )


def entries(machine: Machine, sizes: Sequence[float], gpus: Sequence[int], steps: Sequence[int]) -> list[Entry]:
    """All of them, whole before sharded."""
    return [
        Entry(
            parameters,
            n,
            length,
            sharded,
            machine.step(parameters),
            (machine.weight_bytes + machine.moment_bytes + GRADIENT_BYTES) * parameters / (n if sharded else 1),
            added(machine, parameters, n, length, sharded=sharded),
            fan_out(machine, parameters, n, length, sharded=sharded),
        )
        for parameters in sizes
        for n in gpus
        for sharded in (False, True)
        for length in steps
    ]


def as_json(rows: Sequence[Row], machine: Machine, error: Errors, found: Sequence[Entry]) -> dict[str, Any]:
    """Everything, in seconds and bytes."""
    passes = {name: one._asdict() for name, one in machine.passes._asdict().items()}
    return {
        "fit": {"largest_relative_error": error._asdict(), "rows": len(rows)},
        "assumptions": {**vars(machine), "passes": passes},
        "entries": [{**e._asdict(), "auto": e.auto._asdict(), "fan_out": e.fan_out._asdict()} for e in found],
    }


def fill(path: Path, made: str) -> None:
    """Replace what a page has between the marks."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{path} must have the lines {BEGIN} and {END}; what stands between them is replaced")
    path.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}", encoding="utf-8")


# Command --------------------------------------------------------------------------------------------------------------


def positive(text: str) -> float:
    """A number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, but got {text}")
    return value


def count(text: str) -> int:
    """A whole number, at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but got {text}")
    return value


ASSUMED: Mapping[str, tuple[Any, Any, str]] = {
    "tokens": (count, 8192, "per GPU and step"),
    "tflops": (positive, 989.0, "of a GPU: bf16 of an H100 or H200, dense"),
    "utilisation": (positive, 0.4, "the part of them that training uses"),
    "launch-us": (positive, None, "microseconds of a pass over memory whatever its size (default: as measured)"),
    "memory-gb-per-s": (positive, None, "of a pass over memory (default: as measured)"),
    "gpus-per-node": (count, 8, "GPUs of a node"),
    "inside-gb-per-s": (positive, 300.0, "bus bandwidth of an all-reduce inside a node: NVLink"),
    "between-gb-per-s": (positive, 50.0, "the same between nodes: one card of 400 Gb/s in use"),
    "latency-us": (positive, 20.0, "microseconds of a small message"),
    "weight-bytes": (positive, 4.0, "per parameter: fp32"),
    "moment-bytes": (positive, 8.0, "per parameter: two of Adam in fp32"),
    "gpu-gb": (positive, 141.0, "memory of a GPU: an H200"),
    "sync-every": (count, 1000, "T of replicas that train apart"),
}
"""Type, default and meaning."""


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    made = parser(__doc__)
    made.add_argument("--measured", type=Path, default=MEASURED, help="JSON file of lab/benchmarks/auto_cost.py")
    made.add_argument("--docs", type=Path, help=f"page whose block {BEGIN} is filled, instead of printing")
    made.add_argument("--plot", type=Path, help="SVG file: percent added against steps")
    made.add_argument("--billions", type=positive, nargs="+", default=[1.0, 8.0, 70.0], help="of parameters")
    made.add_argument("--gpus", type=count, nargs="+", default=[8, 64, 512], help="numbers of GPUs")
    made.add_argument("--steps", type=count, nargs="+", default=[10_000, 100_000], help="lengths of runs")
    made.add_argument(
        "--keep",
        choices=("device", "host"),
        default="device",
        help="where one snapshot is kept; the other is on the host",
    )
    for name, (kind, default, meaning) in ASSUMED.items():
        words = meaning if default is None else f"{meaning} (default: {default:g})"
        made.add_argument(f"--{name}", type=kind, default=default, help=words)
    return made


def main() -> None:
    line = arguments()
    given = line.parse_args()
    if given.utilisation > 1:
        line.error(f"--utilisation must be a part of 1, but got {given.utilisation:g}")
    uneven = [n for n in given.gpus if n > given.gpus_per_node and n % given.gpus_per_node]
    if uneven:
        line.error(f"--gpus must be whole nodes of {given.gpus_per_node} (--gpus-per-node), but got {uneven[0]}")
    try:
        report(given)
    except ValueError as error:
        line.error(str(error))


def report(given: argparse.Namespace) -> None:
    """Print, fill the page, draw."""
    rows, held, pinned = read(given.measured)
    fitted = fit(rows)
    machine, error = machine_of(given, fitted, pinned), errors(rows, fitted)
    sizes = [1e9 * billions for billions in given.billions]
    found = entries(machine, sizes, given.gpus, given.steps)
    if given.plot is not None:
        scale_picture.draw(rows, fitted, machine, sizes, PICTURED_GPUS).write(given.plot)
    if given.json:
        print(json.dumps(as_json(rows, machine, error, found)))
    made = page(rows, held, machine, error, found, 1e9 * given.gpu_gb)
    if given.docs is not None:
        link = f"![{scale_picture.TITLE}]({_relative(given.plot, given.docs)})\n\n" if given.plot is not None else ""
        fill(given.docs, link + made)
    elif not given.json:
        print(made)


def _relative(picture: Path, document: Path) -> str:
    return Path(relpath(picture, document.parent)).as_posix()


if __name__ == "__main__":
    main()
