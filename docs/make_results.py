"""Tables of README.md and of docs/results.md, real-data.md, the-paper.md, study.md and algoperf.md, from
lab/experiments/results; those of docs/cost.md from lab/benchmarks/results/scale.json; of docs/questions from both.

    python docs/make_results.py

Writes, in the pages, what stands between the two marks, and the profiles into docs/images; the rest of the pages is
written by hand. The same files give the same bytes.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab" / "experiments"))
import real_table
import rehearsal
import study_table
from real.score import geometric_mean

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- made by docs/make_results.py -->", "<!-- end -->"
README_BEGIN = "<!-- table: results -->"
ABLATION_BEGIN = "<!-- table: ablation -->"
REPLICAS_BEGIN = "<!-- table: replicas -->"
REHEARSAL_BEGIN = "<!-- table: rehearsal -->"
PEERS = {
    "prodigy": ("prodigy", "prodigyplus"),
    "schedule-free": ("schedulefree", "schedulefree-tuned"),
    "lr-finder": ("finder", "customary"),
}
"""Methods that people come from, by the page of docs/questions."""


def zoo(known: dict[str, Any]) -> str:
    """Many small problems: a line per length, and a table with problems down, optimizers across, lengths in a cell."""
    cells = {tuple(name.split("/")): entry for name, entry in known["scores"].items()}
    problems, optimizers, lengths = (list(dict.fromkeys(keys)) for keys in zip(*cells, strict=True))
    ratios = {key: geometric_mean([seed["ratio"] for seed in entry["seeds"]]) for key, entry in cells.items()}
    parts = ["## Small problems"]
    for length in lengths:
        here = sorted(ratio for key, ratio in ratios.items() if key[2] == length)
        parts.append(
            f"**{length} steps.** Geometric mean {geometric_mean(here):.2f}, median {here[len(here) // 2]:.2f}, worst "
            f"{here[-1]:.2f}; {sum(ratio <= 1.05 for ratio in here)} of {len(here)} at or below 1.05."
        )
    lines = [
        f"| {' / '.join(lengths)} steps | " + " | ".join(optimizers) + " |",
        "|" + " --- |" * (len(optimizers) + 1),
    ]
    for problem in problems:
        cells = [
            "/".join(f"{ratios[problem, optimizer, length]:.2f}" for length in lengths) for optimizer in optimizers
        ]
        lines.append(f"| {problem} | {' | '.join(cells)} |")
    return "\n\n".join([*parts, "\n".join(lines)])


def scale(known: dict[str, Any]) -> str:
    """What a round's end costs with many ranks: by the model, on the host, and over the loopback device."""
    weights = known["gloo"][0]["weights"]
    tables = (
        ("*Calculated*: a converge of 1e9 weights, each rank; in seconds shared gradients / arms with Adam", _model),
        ("*Measured*, median ms of the host: permutations / balanced design, `Corrected()` / `Normalised()`", _host),
        (
            "*Measured*, ms of the host for the whole end of a round under Adam with 4 knobs, median (95th percentile)",
            _ends,
        ),
        (f"*Measured*: {weights:,} weights; copies of them that went over the loopback device", _sent),
    )
    made = [f"{caption}:\n\n{_lines(rows_of(known))}" for caption, rows_of in tables]
    rows = [f"{row['replicas']} of {row['weights']:,} weights {row['ms']:.0f} ms" for row in known["stacked"]]
    made.append(
        f"*Measured*, replicas stacked as rows of one tensor, the mean written to all on one core: {', '.join(rows)}."
    )
    return "\n\n".join(made)


def _model(known: dict[str, Any]) -> list[list[Any]]:
    speeds = [f"s at {speed}" for speed in known["calculated"][0]["seconds"]]
    heads = ["ranks", "GB sent, shared gradients", "arms", *speeds, "of it hops", "gathered"]
    table = [heads, ["---:"] * len(heads)]
    for row in known["calculated"]:
        times = [f"{own['shared']:.2g} / {own['arms']:.2g}" for own in (*row["seconds"].values(), row["hops_s"])]
        gathered = f"{row['gathered_kb']:.1f} kB, {1e3 * row['gather_s']:.2g} ms"
        table.append([row["ranks"], *(f"{row['sent_gb'][kind]:.1f}" for kind in ("shared", "arms")), *times, gathered])
    return table


def _host(known: dict[str, Any]) -> list[list[Any]]:
    counts = [int(name.split("_")[1]) for name in known["host"][0] if name.startswith("balanced_")]
    kinds = {"design": ("permuted", "balanced"), "controller": ("corrected", "normalised")}
    columns = [(name, own, knobs) for name, own in kinds.items() for knobs in counts]
    table = [["replicas", *(f"{name}, {knobs} knobs" for name, _, knobs in columns)], ["---:"] * (1 + len(columns))]
    for row in known["host"]:
        cells = [" / ".join(f"{row[f'{part}_{knobs}']['median']:.2g}" for part in own) for _, own, knobs in columns]
        table.append([row["replicas"], *cells])
    return table


def _ends(known: dict[str, Any]) -> list[list[Any]]:
    ends = {"end_4": "4 tensors", "end_1000": "1000", "end_1000_arms": "1000, arms", "end_4_journal": "4, a journal"}
    table = [["replicas", *ends.values(), "a line of it"], ["---:"] * (2 + len(ends))]
    for row in known["host"]:
        cells = [f"{row[name]['median']:.1f} ({row[name]['p95']:.1f})" for name in ends]
        table.append([row["replicas"], *cells, f"{row['line_kb']:.0f} kB"])
    return table


def _sent(known: dict[str, Any]) -> list[list[Any]]:
    table = [["gloo ranks", "replicas", "copies sent", "calculated", "s"], ["---:", "---", "---:", "---:", "---:"]]
    for row in known["gloo"]:
        ranks, arms = row["ranks"], row["arms"]
        replicas = f"{arms} arms of {ranks // arms}" if arms else f"{ranks}, shared gradients"
        copies = f"{row['copies_sent']:.2f}", f"{row['copies_calculated']:.0f}"
        table.append([ranks, replicas, *copies, f"{row['seconds']:.2f}"])
    return table


def tasks_of_feed(known: dict[str, Any]) -> str:
    """Loss, AUC and normalised entropy: plain training at the scan's lowest rate, all rows at the lower border."""
    lowest = min(row["rate"] for row in known["rows"])
    good = min(known["scan"]["rows"], key=lambda row: row["rate"])
    rows = [{**good, "label": f"{good['label']}, at the good rate"}, *known["rows"]]
    lines = [["row", "rate", "T", "crashed", "loss", "AUC", "normalised entropy"], ["---", *["---:"] * 6]]
    for row in rows:
        if row["rate"] > lowest:
            continue
        sound = [i for i, crash in enumerate(row["crashed"]) if not crash]
        of = {kind: [row[name] for name in row if name.startswith(f"{kind}_")] for kind in ("auc", "ne")}
        means = [fmean(values[i] for values in of[kind] for i in sound) for kind in ("auc", "ne")]
        crashed = f"{sum(row['crashed'])} of {len(row['crashed'])}"
        losses = [row["loss"][i] for i in sound]
        about = [row["label"], f"{row['rate']:.3g}", row["T"] or "", crashed]
        lines.append([*about, f"{fmean(losses):.3f} ± {stdev(losses):.3f}", *(f"{mean:.3f}" for mean in means)])
    return _lines(lines)


def ablation(known: dict[str, Any]) -> str:
    """The paper's configurations: crashes at the highest rate, and losses of what did not crash at the two others."""
    rows: dict[str, dict[float, list[dict[str, Any]]]] = {}
    for row in known["configurations"]:
        rows.setdefault(row["label"], {}).setdefault(row["rate"], []).append(row)
    low, high, highest = known["arguments"]["low"], *known["arguments"]["high"]
    lines = [
        [
            f"configuration; with two figures: averaged every {'; every '.join(map(str, known['arguments']['rounds']))}"
            " steps",
            f"crashed of {known['arguments']['seeds']} at rate {highest:g}",
            f"validation loss at rate {high:g}",
            f"at rate {low:g}",
            "published train loss, of another task",
        ],
        ["---", *["---:"] * 4],
    ]
    for label, by_rate in rows.items():
        told = next(iter(by_rate.values()))[0]["published"]
        published = f"{told['train_loss']:.3f}{', crashed' if told['crashed'] else ''}" if told["train_loss"] else ""
        crashes = "; ".join(str(row["crashed"]) for row in by_rate.get(highest, []))
        losses = ["; ".join(_of_sound(row["runs"]) for row in by_rate.get(rate, [])) for rate in (high, low)]
        lines.append([label, crashes, *losses, published])
    return _lines(lines)


def _of_sound(runs: list[dict[str, Any]]) -> str:
    losses = [run["loss"] for run in runs if not run["crashed"]]
    return f"{fmean(losses):.3f} ± {stdev(losses):.3f}"


def batch_sizes(known: dict[str, Any]) -> str:
    """What a change of the batch size in mid-run costs, a line per change."""
    ways = {"kept": "hdet goes on", "anew": "`hdet.auto` again", "root": "rate × root of the change"}
    ways["linear"] = "rate × the change"
    table = [["batch", *ways.values(), "best factor"], ["---", *["---:"] * (len(ways) + 1)]]
    for change in dict.fromkeys(row["change"] for row in known["rows"]):
        rows = [row for row in known["rows"] if row["change"] == change]
        cells = []
        for way in ways:
            means = [geometric_mean(row[way]["ratios"]) for row in rows]
            cells.append(f"{geometric_mean(means):.2f} ({min(means):.2f} to {max(means):.2f})")
        factors = sorted({row["best_factor"] for row in rows})
        table.append([f"× {change}", *cells, ", ".join(f"{factor:g}" for factor in factors)])
    return _lines(table)


def questions(results: Path) -> None:
    """The tables of docs/questions."""
    folder = HERE / "questions"
    every = real_table.of_splits(results / "real")
    shown = [table for split in real_table.SHOWN for table in every[split]]
    for page, names in PEERS.items():
        fill(folder / f"{page}.md", f"<!-- table: {page} -->", f"\n{real_table.versus(shown, names)}\n")
    lora = [table for table in shown if table.name == "code-lora"]
    fill(folder / "lora.md", "<!-- table: lora -->", f"\n{real_table.compact_table(lora)}\n")
    known = json.loads((HERE.parent / "lab" / "benchmarks" / "results" / "batch_size.json").read_text())
    fill(folder / "batch-size.md", "<!-- table: batch-size -->", f"\n{batch_sizes(known)}\n")


def _lines(rows: list[list[Any]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def fill(path: Path, begin: str, made: str) -> None:
    """Replace what a page has between the marks."""
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{path.name} must have the lines {begin} and {END}")
    path.write_text(f"{before}{begin}\n{made}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=HERE.parent / "lab" / "experiments" / "results")
    parser.add_argument("page", type=Path, nargs="?", default=HERE / "results.md")
    args = parser.parse_args()
    file = args.results / "zoo.json"
    made = zoo(json.loads(file.read_text())) if file.exists() else "Nothing has been measured yet."
    fill(args.page, BEGIN, f"\n{made}\n")
    if args.page == HERE / "results.md":
        fill(HERE / "real-data.md", BEGIN, f"\n{real_table.page(args.results / 'real', compact=True)}\n")
        border = json.loads((args.results / "ablation_border.json").read_text())
        fill(args.page, ABLATION_BEGIN, f"\n{ablation(border)}\n")
        known = json.loads((HERE.parent / "lab" / "benchmarks" / "results" / "scale.json").read_text())
        fill(HERE / "cost.md", BEGIN, f"\n{scale(known)}\n")
        feed = json.loads((args.results / "stacked_ablation" / "feed.json").read_text())
        fill(HERE / "the-paper.md", BEGIN, f"\n{tasks_of_feed(feed)}\n")
        fill(HERE.parent / "README.md", README_BEGIN, real_table.front(real_table.of_splits(args.results / "real")))
        fill(HERE / "study.md", BEGIN, f"\n{study_table.page(args.results / 'study')}\n")
        replicas = study_table.front(args.results / "study")
        fill(HERE.parent / "README.md", REPLICAS_BEGIN, replicas)
        fill(HERE / "study.md", REPLICAS_BEGIN, f"\n{replicas}\n")
        fill(HERE / "algoperf.md", REHEARSAL_BEGIN, rehearsal.page(args.results / "algoperf"))
        questions(args.results)


if __name__ == "__main__":
    main()
