"""Which runs have crashed, how sure the counts are, where the border of stability lies, and the table of it all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

__all__ = ["CRASH", "border", "constant_loss", "has_crashed", "interval", "summary", "table"]

CRASH = (
    "crashed: at the end of the run the validation loss of the mean of the replicas is not finite, or not even 1 % "
    "below that of the best constant prediction (base rates of the feed's labels, frequencies of bytes)"
)
LEAST_GAIN = 0.01
Z = 1.959964
"""Of a normal distribution, two-sided 95 %."""


def constant_loss(targets: Sequence[Tensor]) -> float:
    """The loss of the best constant prediction: labels of several tasks (zeros and ones), or classes (integers).

    >>> round(constant_loss([torch.tensor([[0.0, 1.0], [1.0, 1.0]])]), 4)
    0.6931
    >>> round(constant_loss([torch.tensor([3, 7])]), 4)
    0.6931
    """
    whole = torch.cat([part.cpu() for part in targets])
    if whole.is_floating_point():
        yes = whole.double().mean(0)
        chances = torch.stack([yes, 1 - yes])
    else:
        chances = torch.bincount(whole.flatten()).double() / whole.numel()
    return float(-torch.special.xlogy(chances, chances).sum())


def has_crashed(loss: float, reference: float) -> bool:
    """Whether a run came to nothing; ``reference``: the loss of the best constant prediction.

    >>> has_crashed(0.90, 0.93), has_crashed(0.925, 0.93), has_crashed(math.nan, 0.93)
    (False, True, True)
    """
    return not loss <= (1 - LEAST_GAIN) * reference


def interval(count: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share.

    >>> [round(end, 2) for end in interval(0, 5)], [round(end, 2) for end in interval(10, 20)]
    ([0.0, 0.43], [0.3, 0.7])
    """
    share, more = count / of, Z * Z / of
    middle = (share + more / 2) / (1 + more)
    half = Z / (1 + more) * math.sqrt(share * (1 - share) / of + more / (4 * of))
    return max(0.0, middle - half), min(1.0, middle + half)


def summary(crashed: Sequence[bool], losses: Sequence[float]) -> dict[str, Any]:
    """Crashes with their interval; mean and standard deviation of the losses of the runs that did not crash.

    >>> summary([True, False, False], [math.nan, 1.0, 3.0])["loss"]
    {'mean': 2.0, 'deviation': 1.4142135623730951, 'runs': 2}
    """
    sound = [loss for loss, crash in zip(losses, crashed, strict=True) if not crash]
    return {
        "crashed": sum(crashed),
        "of": len(crashed),
        "interval": list(interval(sum(crashed), len(crashed))),
        "loss": {
            "mean": fmean(sound) if sound else None,
            "deviation": stdev(sound) if len(sound) > 1 else None,
            "runs": len(sound),
        },
    }


def border(rates: Sequence[float], shares: Sequence[float]) -> tuple[float, float]:
    """Two neighbouring rates: below half of the runs crash at the lower one, half or more at the other.

    If several pairs are such, the lowest; if all rates are sound (or none is), the two highest (lowest).

    >>> border([1.0, 2.0, 4.0], [0.0, 0.3, 1.0]), border([1.0, 2.0, 4.0], [1.0] * 3), border([1.0, 2.0, 4.0], [0.0] * 3)
    ((2.0, 4.0), (1.0, 2.0), (2.0, 4.0))
    """
    first = next((place for place, share in enumerate(shares) if share >= 0.5), len(rates) - 1)
    upper = max(first, 1)
    return rates[upper - 1], rates[upper]


def table(content: Mapping[str, Any]) -> str:
    """Markdown: a line for every row, T and rate; crashes over all T and rates; and what plain training reaches at each
    rate of the scan, so that no row is read without the loss at a good rate."""
    metrics = [name for name in content["rows"][0] if name.startswith(("auc_", "ne_"))] if "rows" in content else []
    lines = [f"\n**{content['task']}**, {_about(content)}\n"]
    heads = ["row", "T", "rate", "crashed", "95 %", "loss of the others", *(name.replace("_", " ") for name in metrics)]
    lines += [f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * (len(heads) - 1)]
    rows = content.get("rows") or content["scan"]["rows"]
    for row in rows:
        cells = [row["label"], _shown(row["T"]), f"{row['rate']:.4g}", *_cells(row["summary"])]
        cells += [_mean(row[name], row["crashed"]) for name in metrics]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| row | crashed at all T and rates | 95 % |", "| --- | ---: | ---: |"]
    for label in dict.fromkeys(row["label"] for row in rows):
        crashed = [crash for row in rows if row["label"] == label for crash in row["crashed"]]
        low, high = interval(sum(crashed), len(crashed))
        lines.append(f"| {label} | {sum(crashed)} of {len(crashed)} | {low:.2f} to {high:.2f} |")
    if content.get("rows") and "scan" in content:
        lines += ["", "| scan, plain data-parallel: rate | crashed | 95 % | loss of the others |"]
        lines += ["| ---: | ---: | ---: | ---: |"]
        scanned = content["scan"]["rows"]
        lines += [f"| {row['rate']:.4g} | {' | '.join(_cells(row['summary']))} |" for row in scanned]
    return "\n".join(lines)


def _about(content: Mapping[str, Any]) -> str:
    arguments = content["arguments"]
    steps = content.get("steps", content["scan"]["steps"] if "scan" in content else 0)
    words = [f"N = {arguments['replicas']}", f"{steps} steps", f"{content.get('parameters', '?')} weights"]
    words += [f"{content.get('ms_a_step') or math.nan:.1f} ms a step of all runs", content["versions"]["device"]]
    return ", ".join(words) + f"; the best constant prediction: {content['reference']:.4f}"


def _cells(found: Mapping[str, Any]) -> list[str]:
    low, high = found["interval"]
    mean, deviation = found["loss"]["mean"], found["loss"]["deviation"]
    loss = "-" if mean is None else f"{mean:.4f}" + ("" if deviation is None else f" ± {deviation:.4f}")
    return [f"{found['crashed']} of {found['of']}", f"{low:.2f} to {high:.2f}", loss]


def _mean(values: Sequence[float | None], crashed: Sequence[bool]) -> str:
    sound = [value for value, crash in zip(values, crashed, strict=True) if not crash and value is not None]
    return f"{fmean(sound):.4f}" if sound else "-"


def _shown(value: int | None) -> str:
    return "-" if value is None else str(value)
