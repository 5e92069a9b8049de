"""The README's picture, from a real journal: what each replica's rate was, and what its loss said.

    make demo
    python docs/make_picture.py            # reads runs/demo/seed-0.jsonl, writes docs/images/fan-out.svg

Needs matplotlib (in the extra dev).
"""

import argparse
import itertools
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import hdet

ROOT = Path(__file__).resolve().parents[1]
COLOURS = ("#0072b2", "#56b4e9", "#e69f00", "#d55e00")  # blue to red, told apart by colour-blind people too
INK, PALE = "#24292f", "#8c959f"
OF_TORCH = ("max_lr", "total_steps", "pct_start", "anneal_strategy", "div_factor", "final_div_factor", "three_phase")


class Round(NamedTuple):
    """One round of one parameter group."""

    steps: list[int]
    """The steps of the round, the first of the next round included: lines then meet at the boundary."""
    base: list[float]
    """Base rate at these steps."""
    multipliers: list[float]
    losses: list[float]


def read(path: Path, group: int) -> list[Round]:
    """The rounds of a journal. Rates between its lines follow from the schedule, which the header describes."""
    journal = hdet.read_journal(path)
    plain = schedule({key: journal.header["arguments"][key] for key in OF_TORCH}, group)
    rounds, begin, factor = [], 0, 1.0
    for record in journal.rounds:
        if record["step"] == journal.header["arguments"]["total_steps"]:
            break  # the last round is a single step after the schedule's end
        steps = list(range(begin, record["step"] + 1))
        base = [factor * plain[t] for t in steps]
        assert abs(base[-2] / record["base_before"][group] - 1) < 1e-9, "the journal has another schedule"
        replicas = record["replicas"]
        rounds.append(Round(steps, base, [r["multipliers"][group] for r in replicas], [r["loss"] for r in replicas]))
        begin, factor = record["step"], record["learned"][group]
    return rounds


def schedule(arguments: dict[str, object], group: int) -> list[float]:
    """Torch's OneCycleLR at every step."""
    if isinstance(arguments["max_lr"], list):
        arguments["max_lr"] = arguments["max_lr"][group]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, cycle_momentum=False, **arguments)
    rates = []
    for _ in range(arguments["total_steps"]):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def draw(rounds: list[Round]) -> Figure:
    """Rates over losses, one colour per replica."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    draw_rates(above, rounds)
    above.set_ylim(bottom=0)
    above.legend(loc="upper right", frameon=False)
    title(above, "Learning rate: in every round each replica has its own multiple of the base rate")
    draw_zoom(above, rounds)
    draw_losses(below, rounds)
    title(below, "Mean train loss of the round: in each round from the lowest rate (left) to the highest (right)")
    below.set_xlabel("step; at each grey line the weights are averaged and the multipliers are dealt anew")
    below.set_xlim(0, rounds[-1].steps[-1])
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        for part in rounds[1:]:
            axes.axvline(part.steps[0], color=PALE, linewidth=0.4, alpha=0.6)
    return figure


def title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10)


def draw_rates(axes: Axes, rounds: list[Round], width: float = 1.2) -> None:
    """Every replica's rate, and the base rate between them."""
    for k, part in enumerate(rounds):
        for r, multiplier in enumerate(part.multipliers):
            label = f"replica {r}" if k == 0 else None
            axes.plot(part.steps, [multiplier * x for x in part.base], color=COLOURS[r], linewidth=width, label=label)
        label = "base" if k == 0 else None
        axes.plot(part.steps, part.base, color=INK, linewidth=width, linestyle=(0, (3, 2)), label=label)


def draw_zoom(axes: Axes, rounds: list[Round]) -> None:
    """Four rounds around the peak, large enough to see who changes places."""
    peak = max(range(len(rounds)), key=lambda k: max(rounds[k].base))
    shown = rounds[max(0, peak - 1) :][:4]
    zoom = axes.inset_axes((0.21, 0.09, 0.31, 0.46))
    draw_rates(zoom, shown, width=1.8)
    for old, new in itertools.pairwise(shown):
        for r, (before, after) in enumerate(zip(old.multipliers, new.multipliers, strict=True)):
            jump = [before * old.base[-1], after * new.base[0]]
            zoom.plot([new.steps[0]] * 2, jump, color=COLOURS[r], linewidth=1, linestyle=":")
    edges = [(part.base[i] * rho) for part in shown for i in range(len(part.base)) for rho in part.multipliers]
    zoom.set_ylim(0.98 * min(edges), 1.02 * max(edges))
    zoom.set_xlim(shown[0].steps[0], shown[-1].steps[-1])
    zoom.set(yticks=[], xticks=[part.steps[0] for part in shown] + [shown[-1].steps[-1]])
    zoom.tick_params(labelsize=8, color=PALE, length=2)
    for spine in zoom.spines.values():
        spine.set_edgecolor(PALE)
    axes.indicate_inset(bounds=(*_corner(zoom), *_size(zoom)), edgecolor=PALE, alpha=0.9)


def _corner(axes: Axes) -> tuple[float, float]:
    return axes.get_xlim()[0], axes.get_ylim()[0]


def _size(axes: Axes) -> tuple[float, float]:
    return axes.get_xlim()[1] - axes.get_xlim()[0], axes.get_ylim()[1] - axes.get_ylim()[0]


def draw_losses(axes: Axes, rounds: list[Round]) -> None:
    """A dot per replica and round, placed by its rate, and a line for their mean."""
    for part in rounds:
        begin, length = part.steps[0], part.steps[-1] - part.steps[0]
        order = sorted(range(len(part.losses)), key=part.multipliers.__getitem__)
        for place, r in enumerate(order):
            x = begin + length * (0.14 + 0.72 * place / max(1, len(order) - 1))
            axes.plot(x, part.losses[r], "o", color=COLOURS[r], markersize=4.5, markeredgewidth=0)
        mean = sum(part.losses) / len(part.losses)
        axes.plot([begin, begin + length], [mean, mean], color=INK, linewidth=0.8, zorder=1)
    axes.set_yscale("log")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journal", type=Path, nargs="?", default=ROOT / "runs" / "demo" / "seed-0.jsonl")
    parser.add_argument("picture", type=Path, nargs="?", default=ROOT / "docs" / "images" / "fan-out.svg")
    parser.add_argument("--group", type=int, default=0, help="which parameter group")
    args = parser.parse_args()
    style = {"font.size": 10, "axes.edgecolor": PALE, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK}
    with matplotlib.rc_context({**style, "ytick.color": INK, "svg.hashsalt": "hdet", "font.family": "sans-serif"}):
        figure = draw(read(args.journal, args.group))
        args.picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(args.picture, dpi=150, metadata={"Date": None} if args.picture.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
