"""The words and tables of lab/benchmarks/scale.py, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cost_fit import Errors, Row, share
from cost_model import Cost, Machine

from hdet.distributed.average import EXTRA_BYTES

__all__ = ["Entry", "Held", "page"]

LONG = 10_000
"""Steps of a run that is computed from the measured parts."""


class Entry(NamedTuple):
    """One size on some GPUs for some steps."""

    parameters: float
    gpus: int
    steps: int
    sharded: bool
    step_seconds: float
    training_bytes: float
    """Of weights, gradients and moments on one GPU, without hdet."""
    auto: Cost
    fan_out: Cost


class Held(NamedTuple):
    """Measured memory of one model, in units of the bytes of its weights."""

    model: str
    parameters: int
    searching: float
    descent: float
    searching_host: float
    searching_go_back_false: float
    descent_go_back_false: float

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Held:
        """From a row of the JSON file of lab/benchmarks/auto_cost.py."""
        return cls(str(row["model"]), int(row["parameters"]), *(float(row[name]) for name in cls._fields[2:]))


def page(
    rows: Sequence[Row],
    held: Sequence[Held],
    machine: Machine,
    error: Errors,
    found: Sequence[Entry],
    gpu_bytes: float,
) -> str:
    """Markdown: what was measured, how well the formulas fit, what they say, and what they assume."""
    return "\n\n".join(
        [
            "### Measured",
            measured_table(rows),
            f"The formulas of `lab/benchmarks/cost_model.py` fit these rows with a relative error of at most "
            f"{_percent(error.look)} in a sample, {_percent(error.end)} in the end of a round and "
            f"{_percent(error.ratio)} in the time of a whole run, compiling included.",
            *(["### Memory", memory_table(held)] if held else []),
            "### On paper",
            table(found, machine.sync_every, gpu_bytes),
            assumptions(machine, gpu_bytes),
        ]
    )


def measured_table(rows: Sequence[Row]) -> str:
    """One line per measured run, with what its parts would make of a long one."""
    head = ["model", "parameters", "steps", "compiled", "added", f"computed for {_number(LONG)} steps"]
    head += ["a step", "a sample", "the end of a round"]
    lines = [_line(head), "|" + " --- |" * len(head)]
    for row in rows:
        cells = [row.model, _number(row.parameters), str(row.steps), "yes" if row.compiled else "no"]
        cells += [_percent(row.ratio - 1), _percent(share(row, row.look, row.end, LONG))]
        cells += [_seconds(t) for t in (row.step, row.look, row.end)]
        lines.append(_line(cells))
    return "\n".join(lines)


def memory_table(held: Sequence[Held]) -> str:
    """What auto adds to the most that is allocated at once."""
    head = ["model", "parameters", "while searching", "in the descent", "on the host"]
    head += ["`go_back=False`, while searching", "in the descent"]
    lines = [_line(head), "|" + " --- |" * len(head)]
    for row in held:
        lines.append(_line([row.model, _number(row.parameters), *(f"{value:.1f}" for value in row[2:])]))
    lines += ["", "What auto adds to the peak of a run on one GPU, under AdamW, divided by the bytes of the weights."]
    return "\n".join(lines)


def table(found: Sequence[Entry], sync_every: int, gpu_bytes: float) -> str:
    """One line per size, GPUs and sharding; lengths are columns."""
    lengths = list(dict.fromkeys(entry.steps for entry in found))
    head = ["parameters", "GPUs", "weights", "a step", *(f"`auto`, {_number(steps)} steps" for steps in lengths)]
    head += [f"replicas, T = {sync_every}"]
    lines = [_line(head), "|" + " --- |" * len(head)]
    kinds: dict[tuple[float, int, bool], list[Entry]] = {}
    for entry in found:
        kinds.setdefault((entry.parameters, entry.gpus, entry.sharded), []).append(entry)
    for (parameters, gpus, sharded), same in kinds.items():
        first, apart = same[0], same[0].fan_out
        merged = f"{_percent(apart.percent / 100)}, {_seconds(apart.per_round)} a round" if apart.seconds else "–"
        kind = ("sharded" if sharded else "whole") + (" †" if first.training_bytes > gpu_bytes else "")
        cells = [_number(parameters), str(gpus), kind, _seconds(first.step_seconds)]
        cells += [f"{_percent(e.auto.percent / 100)}, {_seconds(e.auto.seconds)}" for e in same]
        lines.append(_line([*cells, merged]))
    return "\n".join(lines)


def assumptions(machine: Machine, gpu_bytes: float) -> str:
    """In words, with the name of the argument that changes each."""
    look, keep = machine.passes.look, machine.passes.keep
    where = "one snapshot on the device and one" if machine.keep == "device" else "both snapshots"
    parts = [
        f"{machine.tokens} tokens per GPU and step (`--tokens`)",
        f"{machine.flops / 1e12:g} TFLOP/s (`--tflops`), {_percent(machine.utilisation)} of them used "
        "(`--utilisation`)",
        f"a sample of {_seconds(look.launch)} and {look.bandwidth / 1e12:.3g} TB/s, a copy of {_seconds(keep.launch)} "
        f"and {keep.bandwidth / 1e12:.3g} TB/s (`--launch-us`, `--memory-gb-per-s`)",
        f"{machine.gpus_per_node} GPUs in a node (`--gpus-per-node`), {machine.inside / 1e9:g} GB/s inside "
        f"(`--inside-gb-per-s`) and {machine.between / 1e9:g} GB/s between nodes (`--between-gb-per-s`), "
        f"{1e6 * machine.latency:g} µs per message (`--latency-us`)",
        f"{machine.weight_bytes:g} bytes of weights and {machine.moment_bytes:g} of moments per parameter "
        "(`--weight-bytes`, `--moment-bytes`)",
        f"{where} in pinned host memory (`--keep`), {machine.pinned / 1e9:.3g} GB/s",
    ]
    return (
        f"Computed, not run. Assumed: {'; '.join(parts)}. Times are of a whole run. *Sharded*: "
        "over all GPUs for `auto`, inside each node for replicas, which are then the nodes. †: weights, "
        f"gradients and moments alone are more than the {_bytes(gpu_bytes)} of a GPU (`--gpu-gb`). A converge takes up "
        f"to {EXTRA_BYTES // 2**20} MiB in addition."
    )


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float) -> str:
    """Short.

    >>> _number(8e9), _number(10_646_784), _number(100_000), _number(64)
    ('8 B', '11 M', '100 k', '64')
    """
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{_digits(value / size)} {unit}"
    return _digits(value)


def _bytes(value: float) -> str:
    return f"{_digits(value / 1e9)} GB"


def _percent(part: float) -> str:
    return "< 0.001 %" if 0 < part < 1e-5 else f"{_digits(100 * part)} %"


def _seconds(value: float) -> str:
    """In the largest unit that leaves one or more.

    >>> _seconds(7300), _seconds(90), _seconds(0.25), _seconds(3e-5)
    ('2 h', '1.5 min', '250 ms', '30 µs')
    """
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{_digits(value / size)} {unit}"
    return f"{_digits(1e6 * value)} µs"


def _digits(value: float) -> str:
    """Two digits; all of those before the point."""
    return f"{value:.0f}" if abs(value) >= 99.5 else f"{float(f'{value:.2g}'):g}"
