"""AlgoPerf rehearsed on eight stand-ins: who reaches the target first, by the benchmark's score.

    python lab/experiments/rehearsal.py --split dev --seconds 500               # on a GPU; goes on where it stopped
    python lab/experiments/rehearsal.py --split test --log "final table"        # twice at most
    python lab/experiments/rehearsal.py --variants --seconds 300                # of the entry, on dev alone
    python lab/experiments/rehearsal.py --table                                 # the tables of docs/algoperf.md;
                                                                                # with --variants the other one
    python lab/experiments/rehearsal.py --split dev --quick --synthetic --results FOLDER    # two cores, no data

All methods are kinds of Adam and train each workload for its budget of steps, three studies each. The target is set as
the benchmark sets its own: NAdamW with 40 settings at three quarters of the budget, one run each, and of the best
setting the median validation loss over three other seeds. Evaluations are at 40 points of the budget. Other people's
packages are optional: see `real_lr.py`; AdEMAMix is that of pytorch_optimizer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import checkout  # noqa: F401 - so that lab is found
import torch
from entries import CANDIDATES, ENTRIES, FREE_ENTRIES, NADAMW, Entry, names
from entries import trained as trained_entries
from provenance import commit, library, versions
from real.bench import Bench, evaluated_at
from real.calibrated import GRID, Setting, trained
from real.ledger import log_test_run, save
from real.peers import PEERS, Method, Place, Stepped, Switched, missing
from real.problems.made import speech
from real.together import run_together
from real.workloads import WORKLOADS, Workload
from real_lr import Cut, tidy
from shapes import onecycle, warmed
from stacked import Supply

import lab.algoperf
from lab.algoperf.score import ratios, score, time_to_target

RESULTS = Path(__file__).parent / "results" / "algoperf"
COST = Path(lab.algoperf.__file__).parent / "cost.json"
"""What `cost.py` has measured: a step of the entry over one of its optimizer."""
SEEDS, CHOOSING = (0, 1, 2), (1000,)
EVALUATIONS = 40
TARGET_SHARE = 0.75
"""Of the budget: the runs that set the target may use no more, as in the benchmark."""
_WEIGHTS_AT_ONCE = 1_100_000_000
"""Of all runs in a stack; bounds memory."""
ORACLE = "onecycle"
"""OneCycle at the best of a sweep on the same workload: no method, a bound. It has no part in the others' scores."""

SPEECH = Workload("speech-ctc", "test", "adamw", 1500, speech)
STANDS_FOR = {
    "fashion-resnet": "ImageNet, ResNet",
    "cmudict-seq2seq": "WMT",
    "molecules-messages": "OGBG",
    "movielens-factors": "Criteo",
    "brain-unet": "fastMRI",
    "locales-llama": "FineWeb, language model",
    "fashion-vit": "ImageNet, ViT",
    "speech-ctc": "LibriSpeech",
}
SPLITS = {"dev": list(STANDS_FOR)[:4], "test": list(STANDS_FOR)[4:]}
"""Decision 036: what is made faster is chosen on dev alone."""
BASELINE = NADAMW._replace(rate=0.0017486387539278373, warm_up=0.02)
"""That of the benchmark's own self-tuning baseline."""
ADEMAMIX = Setting(False, 2e-3, 0.02, (0.8, 0.995), 0.1)
"""That of the submission, beside what `ademamix` has."""


class Row(NamedTuple):
    """A method of the table, and the package that it comes from."""

    label: str
    package: str = "torch"


CALIBRATED = {"nadamw": BASELINE, "adamw": BASELINE._replace(nesterov=False)}
ROWS = {
    "hdet": Row("**`hdet.auto` from 1e-6, NAdamW, averaged weights** (submission.py)"),
    "hdet-free": Row("**`hdet.auto` from 1e-6, Schedule-Free AdamW**"),
    "nadamw": Row("NAdamW, the benchmark's baseline"),
    "adamw": Row("AdamW, the same setting"),
    "schedulefree-v2": Row("Schedule-Free AdamW v2, as submitted", "schedulefree"),
    "ademamix": Row("AdEMAMix, as submitted", "pytorch_optimizer"),
    "prodigyplus": Row("Prodigy with Schedule-Free"),
}


def schedule_free_v2(place: Place) -> Switched:
    """Schedule-Free AdamW v2 with the settings of its submission."""
    from schedulefree import AdamWScheduleFree

    warm_up = round(0.02 * TARGET_SHARE * place.bench.steps)
    how = {"lr": 0.0025, "betas": (0.9, BASELINE.betas[1]), "weight_decay": BASELINE.decay, "warmup_steps": warm_up}
    return Switched(place, [AdamWScheduleFree(place.seeds(0), **how)])


class AdEMAMix(Stepped):
    """AdEMAMix with the settings of its submission: each run's gradient is clipped, the rate falls as a cosine.

    Its alpha and slow momentum rise over 500,000 steps, some five times the length of a workload; so they do here.
    """

    CLIP, ALPHA, SLOW, RISE = 0.5, 8.0, 0.9995, 5.0

    def __init__(self, place: Place) -> None:
        steps = place.bench.steps
        super().__init__(
            place,
            [
                import_module("pytorch_optimizer").AdEMAMix(
                    place.seeds(0),
                    betas=(*ADEMAMIX.betas, self.SLOW),
                    weight_decay=ADEMAMIX.decay,
                    weight_decouple=True,
                    alpha=self.ALPHA,
                    t_alpha_beta3=self.RISE * steps,
                    foreach=False,
                )
            ],
        )
        self._rates = iter((ADEMAMIX.rate * warmed(steps, ADEMAMIX.warm_up)).tolist())

    def step(self) -> None:
        gradients = self.place.gradients
        gradients.mul_((self.CLIP / (gradients.norm(dim=-1, keepdim=True) + 1e-6)).clamp(max=1.0))
        self._optimizers[0].param_groups[0]["lr"] = next(self._rates)
        super().step()


OTHERS = {
    "schedulefree-v2": Method("schedulefree", schedule_free_v2),
    "ademamix": Method("pytorch_optimizer", AdEMAMix),
}
"""Peers of this table alone."""


class Study:
    """One workload: its budget, its target and the curves of all rows, in one JSON file.

    Args:
        workload: of the eight.
        given: the command line.
    """

    def __init__(self, workload: Workload, given: argparse.Namespace) -> None:
        self.workload, self._given = workload, given
        self._steps = min(workload.steps, 40) if given.quick else workload.steps
        self._seeds = SEEDS[:1] if given.quick else SEEDS
        self._path = given.results / f"{workload.name}.json"
        content: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}
        head = {"steps": self._steps, "seeds": [*self._seeds], "synthetic": given.synthetic}
        self.content = content if content.get("arguments") == head else {"arguments": head, "curves": {}}
        self._supplies: dict[tuple[int, ...], Supply] = {}

    def bench(self, seeds: Sequence[int], steps: int, evaluations: int = EVALUATIONS) -> Bench:
        given = self._given
        task = self.workload.task(synthetic=given.synthetic)
        cut, seeds = Cut(task, 8) if given.quick else task, tuple(seeds)
        if seeds not in self._supplies:
            self._supplies[seeds] = Supply(cut, seeds, self._steps, given.device)
        evaluations = min(evaluations, 4) if given.quick else evaluations
        return Bench(cut, "adamw", 1e-3, steps, seeds, self._supplies[seeds], given.device, True, evaluations)

    def run(self, until: float) -> None:
        """The target, the oracle, then the rows that the file lacks, as long as there is time."""
        parts = self._variants() if self._given.variants else self._missing()
        if parts and self.workload.name in SPLITS["test"] and not self._given.synthetic:
            log_test_run(self._given.results, self.workload.name, parts, self._given.log)
        for name, part in parts.items():
            if time.time() > until:
                return
            began = time.perf_counter()
            part()
            self.content |= {"commit": commit(), "versions": versions(self._given.device)}
            save(self._path, self.content)
            tidy()
            print(f"{self.workload.name} {name}: {time.perf_counter() - began:.1f} s", flush=True)

    def _missing(self) -> dict[str, Callable[[], None]]:
        curves, again = self.content["curves"], self._given.again
        peers = [name for name in (*OTHERS, "prodigyplus") if missing(PEERS[name].package) is None]
        parts: dict[str, Callable[[], None]] = {}
        if "target" not in self.content:
            parts["target"] = self._set_target
        for name in CANDIDATES:
            if name not in curves or (again and self.content.get("own", {}).get(name) != library()):
                parts[name] = partial(self._run_candidate, name)
        if not CALIBRATED.keys() <= curves.keys():
            parts["calibrated"] = self._run_calibrated
        if left := [name for name in peers if name not in curves]:
            parts["peers"] = lambda: self._run_peers(left)
        if ORACLE not in curves:
            parts["oracle"] = self._run_oracle
        return parts

    def _whole(self) -> Bench:
        bench = self.bench(self._seeds, self._steps)
        self.content["evaluated"] = evaluated_at(self._steps, bench.evaluations)
        return bench

    def _run_candidate(self, name: str) -> None:
        entry = CANDIDATES[name]
        self.content["curves"][name] = trained_entries(self._whole(), {name: entry})[names({name: entry})[-1]]
        self.content.setdefault("own", {})[name] = library()

    def _run_calibrated(self) -> None:
        curves = trained(self._whole(), list(CALIBRATED.values()))[0]
        self.content["curves"].update(zip(CALIBRATED, curves, strict=True))

    def _run_peers(self, methods: Sequence[str]) -> None:
        together = run_together(self._whole(), [], onecycle(self._steps), methods)
        self.content["curves"].update({name: columns[0] for name, columns in together.others.items()})
        if together.broken:
            self.content["broken"] = together.broken

    def _run_oracle(self) -> None:
        peaks = [1e-3 * 2.0**i for i in ((0,) if self._given.quick else range(-5, 8))]
        choosing = self.bench(CHOOSING, self._steps, 1)
        swept = run_together(choosing, peaks, onecycle(self._steps)).own
        best = min(range(len(peaks)), key=lambda number: _or_infinite(fmean(curve[-1] for curve in swept[number])))
        self.content["oracle"] = {"rate": peaks[best], "on_edge": best in (0, len(peaks) - 1)}
        self.content["curves"][ORACLE] = run_together(self._whole(), [peaks[best]], onecycle(self._steps)).own[0]

    def _set_target(self) -> None:
        steps, settings = round(TARGET_SHARE * self._steps), [one for one in GRID if one.nesterov]
        settings = settings[::20] if self._given.quick else settings
        choosing = self.bench(CHOOSING, steps, 1)
        together = max(1, _WEIGHTS_AT_ONCE // choosing.stack(1).theta.numel())
        parts = [settings[i : i + together] for i in range(0, len(settings), together)]
        finals = [rows[0][-1] for part in parts for rows in trained(choosing, part)[0]]
        best = settings[min(range(len(settings)), key=lambda number: _or_infinite(finals[number]))]
        fresh = trained(self.bench(self._seeds, steps, 1), [best])[0][0]
        self.content["target"] = {"loss": median(curve[-1] for curve in fresh), "setting": best._asdict()}

    def _variants(self) -> dict[str, Callable[[], None]]:
        """All entries that were considered, beside the submitted one."""
        stored = self.content.setdefault("variants", {})
        parts = {}
        for group, entries in {"variants": ENTRIES, "variants, Schedule-Free": FREE_ENTRIES}.items():
            left = {name: entry for name, entry in entries.items() if names({name: entry})[-1] not in stored}
            if left:
                parts[group] = partial(self._run_variants, left)
        return parts

    def _run_variants(self, entries: Mapping[str, Entry]) -> None:
        self.content["variants"] |= trained_entries(self._whole(), entries)


def _or_infinite(value: float | None) -> float:
    """What is no number, which a file has as null, is worse than any loss."""
    return float("inf") if value is None or value != value else value


def times(contents: Mapping[str, Mapping[str, Any]], name: str, kind: str = "curves") -> dict[str, float]:
    """The steps that a row needs to the target of each workload: the median of its studies."""

    def of_study(content: Mapping[str, Any], curve: Sequence[float | None]) -> float:
        values = [float("nan") if value is None else value for value in curve]
        return time_to_target(content["evaluated"], values, content["target"]["loss"], is_minimized=True)

    return {
        workload: median(of_study(content, curve) for curve in content[kind][name])
        for workload, content in contents.items()
        if name in content.get(kind, {})
    }


def table(contents: Mapping[str, Mapping[str, Any]], seconds: Mapping[str, float]) -> str:
    """Steps to the target as parts of the budget, and scores by steps and by seconds.

    Args:
        contents: the files by workload.
        seconds: what a step of a row costs over one of AdamW, for rows where it is not 1.
    """
    names = [name for name in (*ROWS, ORACLE) if any(name in content["curves"] for content in contents.values())]
    steps = {name: times(contents, name) for name in names}
    timed = {name: {one: time * seconds.get(name, 1.0) for one, time in row.items()} for name, row in steps.items()}
    groups = {**SPLITS, "all": list(STANDS_FOR)}
    found = {split: [name for name in group if name in contents] for split, group in groups.items()}
    titles = [f"score on {split}, steps (seconds)" for split in found]
    lines = [["", *STANDS_FOR, *titles], ["---"] * (1 + len(STANDS_FOR) + len(titles))]
    for name in names:
        cells = []
        for workload in STANDS_FOR:
            cells.append(_shown(contents[workload], steps[name][workload]) if workload in steps[name] else "")
        for group in found.values():
            both = [_scores(rows, group, name) for rows in (steps, timed)] if group else []
            cells.append(f"{both[0]:.3f} ({both[1]:.3f})" if both else "")
        label = ROWS[name].label if name in ROWS else "OneCycle at the best rate of a sweep (an oracle)"
        lines.append([label, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _scores(rows: Mapping[str, Mapping[str, float]], workloads: Sequence[str], name: str) -> float:
    """The score of a row among other people's; theirs, with the entry that is submitted."""
    own = name if name in (*CANDIDATES, ORACLE) else next(iter(CANDIDATES))
    taking_part = {one: row for one, row in rows.items() if one == own or one not in (*CANDIDATES, ORACLE)}
    return score(ratios(taking_part, workloads)[name])


def page(results: Path, variants: bool = False) -> str:
    """A table of docs/algoperf.md: the rows, or what was considered on dev."""
    files = {name: results / f"{name}.json" for name in STANDS_FOR}
    contents = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    if variants:
        return variants_table(contents)
    return table(contents, dict.fromkeys(CANDIDATES, fmean(json.loads(COST.read_text())["ratios"])))


def variants_table(contents: Mapping[str, Mapping[str, Any]]) -> str:
    """All that was considered on dev: steps to the target, the final loss over the target, and the score of each."""
    workloads = [name for name in SPLITS["dev"] if "variants" in contents.get(name, {})]
    if not workloads:
        return "Nothing has been measured yet."
    entries = {**ENTRIES, **FREE_ENTRIES}
    others = {name: times(contents, name) for name in ROWS if name not in CANDIDATES}
    lines = [["", "", *workloads, "final loss ÷ target", "score"], ["---"] * (4 + len(workloads))]
    rows = []
    for name in (name for part in (ENTRIES, FREE_ENTRIES) for name in names(part)):
        if not all(name in contents[workload]["variants"] for workload in workloads):
            continue
        steps = times(contents, name, "variants")
        finals = [median(_or_infinite(curve[-1]) for curve in contents[one]["variants"][name]) for one in workloads]
        ended = fmean(final / contents[one]["target"]["loss"] for one, final in zip(workloads, finals, strict=True))
        scored = score(ratios({**others, name: steps}, workloads)[name])
        cells = [_shown(contents[one], steps[one]) for one in workloads]
        entry = entries[name.partition(" ~")[0]]
        optimizer = "Schedule-Free" if entry.is_schedule_free else "NAdamW"
        rows.append(
            ((scored, -ended), [f"`{name}`", f"{optimizer}, {entry.label}", *cells, f"{ended:.3f}", f"{scored:.3f}"])
        )
    lines += [row for _, row in sorted(rows, key=itemgetter(0), reverse=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(content: Mapping[str, Any], time: float) -> str:
    """A time as a part of the budget."""
    return f"{time / content['arguments']['steps']:.2f}" if time < float("inf") else "missed"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", choices=tuple(SPLITS), default="dev")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after so many seconds")
    parser.add_argument("--again", action="store_true", help="run hdet again if it has changed")
    parser.add_argument("--log", default="", help="why test is run; needed for it")
    parser.add_argument("--variants", action="store_true", help="run what the entry may be instead, on dev")
    parser.add_argument(
        "--table",
        action="store_true",
        help="print what the files have; with --variants the entries that were considered",
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--synthetic", action="store_true")
    given = parser.parse_args(words)
    if given.table:
        print(page(given.results, given.variants))
        return
    if given.variants and given.split == "test":
        parser.error("--variants are chosen on dev alone")
    if given.split == "test" and not given.synthetic and not given.log:
        parser.error('workloads of test are run for a reason, which is logged: add --log "why"')
    given.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    PEERS.update(OTHERS)
    until = time.time() + given.seconds
    for name in SPLITS[given.split]:
        Study(SPEECH if name == SPEECH.name else WORKLOADS[name], given).run(until)


if __name__ == "__main__":
    main()
