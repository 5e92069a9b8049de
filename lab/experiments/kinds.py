"""Rates by kind of parameter: what do embeddings, the head, hidden weights and vectors gain by rates of their own?

    python lab/experiments/kinds.py --part 0/4 --seconds 500           # fixed rates: results/kinds/NAME.json
    python lab/experiments/kinds.py --auto --part 0/4 --seconds 500    # the search with given ratios, in the same files
    python lab/experiments/kinds.py --table                            # what the files have

The *kinds* are the parameter groups of the tasks (``real.models.weights.groups``): ``embedding`` tables, the weight of
the ``head``, all other weights with two dimensions or more (``hidden``), and ``vectors``, which are biases and norms.
*Ratios*, such as ``embedding=10,head=3``, multiply the rates of these kinds. Muon steps the hidden weights of its
workload and AdamW all others, so a ratio there is one of Muon to AdamW.

**Fixed rates.** OneCycle at 1/2, 1 and 2 times its best rate, for one kind's ratio after the other and for some
combinations. If the best of these rates is at an edge, the next one is tried, so that the common rate is tuned again
for every set of ratios. A kind that has all matrices of a model is not tried alone: its rate is the common one.

**The search** (``--auto``). ``hdet.auto`` from 1/1000 of the best rate and from the rate itself, with the ratios given
from the first step on, as parameter groups with guesses of their own have them. Kept, too, is how straight the path of
each kind is by itself, in the later half of its rounds: does a straighter path show a kind that wants a higher rate?

Losses are those of the validation set, three seeds, *dev* and *kin* alone. What a file has is not run again, unless the
rule of the search has changed; delete it to run it anew.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
from auto_runs import Run
from changed_rule import part_of
from group_order import correlation
from provenance import commit, library, versions
from real.bench import Validator
from real.ledger import save
from real.score import geometric_mean, scored_by
from real_lr import tidy
from shapes import onecycle, trapezoid
from stacked import Stack, Supply

from problems import Problem, losses_of, problem_of

RESULTS = Path(__file__).parent / "results" / "kinds"
KINDS = ("embedding", "head", "hidden", "vectors")
RATIOS = (0.1, 0.3, 1.0, 3.0, 10.0)
COMBINED = ("embedding=10,head=3", "embedding=10,head=10")
KNOWN = ("embedding=10", *COMBINED)
"""What the search is given."""
FACTORS, WIDER = (0.5, 1.0, 2.0), 3
"""Of the common rate to the best one, and how often they are widened."""
STARTS = (1e-3, 1.0)
SHAPES = {"onecycle": onecycle, "trapezoid": trapezoid}
PLAIN = ""
"""No ratios."""


# Ratios in words -----------------------------------------------------------------------------------------------------


def ratios_of(words: str) -> dict[str, float]:
    """
    >>> ratios_of("embedding=10,head=3"), ratios_of("")
    ({'embedding': 10.0, 'head': 3.0}, {})
    """
    pairs = [pair.partition("=") for pair in words.split(",") if pair]
    return {kind: float(ratio) for kind, _, ratio in pairs}


def within(words: str, kinds: Sequence[str]) -> str:
    """The ratios of those kinds that a model has, in their order; 1 says nothing.

    >>> within("head=3,embedding=10", ["head", "hidden"]), within("head=1", ["head"])
    ('head=3', '')
    """
    ratios = ratios_of(words)
    return ",".join(f"{kind}={ratios[kind]:g}" for kind in KINDS if kind in kinds and ratios.get(kind, 1) != 1)


def sets_of(kinds: Sequence[str]) -> list[str]:
    """Every set of ratios that is tried on a model at fixed rates.

    >>> sets_of(["head", "vectors"])
    ['', 'vectors=0.1', 'vectors=0.3', 'vectors=3', 'vectors=10', 'head=3', 'head=10']
    """
    matrices = [kind for kind in kinds if kind != "vectors"]
    alone = [kind for kind in KINDS if kind in kinds and (kind not in matrices or len(matrices) > 1)]
    words = [PLAIN, *(f"{kind}={ratio:g}" for kind, ratio in product(alone, RATIOS)), *COMBINED]
    return list(dict.fromkeys(within(one, kinds) for one in words))


# Runs ----------------------------------------------------------------------------------------------------------------


@dataclass
class Setting:
    """Where the runs of a workload are trained.

    Args:
        problem: what trains.
        seeds: a run of each for every column.
        device: where.
        together: how many columns train in one stack; bounds memory.
    """

    problem: Problem
    seeds: Sequence[int]
    device: torch.device
    together: int = 64

    @cached_property
    def task(self) -> Any:
        return self.problem.build()

    @cached_property
    def _supply(self) -> Supply:
        return Supply(self.task, self.seeds, self.problem.steps, self.device)

    @property
    def sizes(self) -> dict[str, int]:
        """How many weights of each kind there are."""
        groups = self.task.groups(self.task.model(self.seeds[0]))
        return {str(group["name"]): sum(p.numel() for p in group["params"]) for group in groups}

    def initial(self) -> float:
        """The loss of the first weights."""
        stack = Stack(self.task, self.seeds, 1, self.device)
        return Validator(stack, stack.theta, graph=False)(stack.theta).mean().item()

    def losses(self, columns: Sequence[Sequence[Run]]) -> list[list[float]]:
        """Train ``columns[column][seed]`` to their end: the final losses; one that is not finite is infinite."""
        found, graph = [], self.device.type == "cuda"
        for first in range(0, len(columns), self.together):
            runs = [list(row) for row in zip(*columns[first : first + self.together], strict=True)]
            _, some = losses_of(self.problem, self.task, self.seeds, self._supply, runs, self.device, graph)
            found += [[loss if math.isfinite(loss) else math.inf for loss in column] for column in some]
            tidy()
        return found


def begun(setting: Setting, shape: str) -> dict[str, Any]:
    """The file of a workload, with nothing in it."""
    return {
        "workload": setting.problem.name,
        "steps": setting.problem.steps,
        "rate": setting.problem.rate,
        "shape": shape,
        "seeds": list(setting.seeds),
        "sizes": setting.sizes,
        "density": getattr(setting.task, "density", False),
        "initial": setting.initial(),
        "commit": commit(),
        "versions": versions(setting.device),
        "library": library(),
        "fixed": {},
        "auto": {},
    }


def add_fixed(content: dict[str, Any], setting: Setting, sets: Sequence[str]) -> None:
    """Runs at fixed rates, by ratios: ``{"rates": factors on the best common rate, "losses": [rate][seed]}``."""
    wanted = [words for words in sets if words not in content["fixed"]]
    found: dict[str, dict[float, list[float]]] = {words: {} for words in wanted}
    columns = list(product(wanted, FACTORS))
    for _ in range(1 + WIDER):
        runs = [[_fixed(setting, content["shape"], *column) for _ in setting.seeds] for column in columns]
        for (words, factor), losses in zip(columns, setting.losses(runs), strict=True):
            found[words][factor] = losses
        columns = [(words, factor) for words, row in found.items() for factor in _next_factors(content, row)]
        if not columns:
            break
    for words, row in found.items():
        factors = sorted(row)
        content["fixed"][words] = {"rates": factors, "losses": [row[factor] for factor in factors]}


def _fixed(setting: Setting, shape: str, words: str, factor: float) -> Run:
    rate = setting.problem.rate * factor
    return Run(setting.problem.steps, rate, searches=False, shape=SHAPES[shape], ratios=ratios_of(words))


def _next_factors(content: Mapping[str, Any], losses: Mapping[float, list[float]]) -> list[float]:
    """The factor beyond the best one, if that is at an edge."""
    best = min(losses, key=lambda factor: score(content, losses[factor]))
    return [best / 2] * (best == min(losses)) + [best * 2] * (best == max(losses))


def add_auto(content: dict[str, Any], setting: Setting, sets: Sequence[str]) -> None:
    """Runs of the search, by ratios: ``{"starts": ..., "losses": [start][seed], "found": common rates over the best}``.

    ``onecycle`` among them is OneCycle at its best rate.
    """
    if content["library"] != library():
        content.update(auto={}, library=library())
    wanted, problem = [words for words in sets if words not in content["auto"]], setting.problem
    if not wanted:
        return
    columns = list(product(wanted, STARTS))

    def searching(words: str, start: float) -> Run:
        return Run(problem.steps, problem.rate * start, ratios=ratios_of(words))

    runs = [[searching(*column) for _ in setting.seeds] for column in columns]
    tuned = [_fixed(setting, "onecycle", PLAIN, 1.0) for _ in setting.seeds]
    own, *losses = setting.losses([tuned, *runs])
    content["auto"]["onecycle"] = {"losses": [own]}
    rates = [[run.found / problem.rate for run in column] for column in runs]
    for number, words in enumerate(wanted):
        here = slice(number * len(STARTS), (number + 1) * len(STARTS))
        straight = [straightness(run) for column in runs[here] for run in column]
        by_kind = dict(zip(content["sizes"], map(fmean, zip(*straight, strict=True)), strict=True))
        row = {"starts": list(STARTS), "losses": losses[here], "found": rates[here], "straight": by_kind}
        content["auto"][words] = row


def straightness(run: Run) -> list[float]:
    """Of each kind's path, the median over the later half of the rounds until the schedule falls."""
    later = run.straight[len(run.straight) // 2 :]
    return [median(rounds) for rounds in zip(*later, strict=True)]


# Tables --------------------------------------------------------------------------------------------------------------


def score(content: Mapping[str, Any], losses: Sequence[float | None]) -> float:
    """The geometric mean over seeds; a run that has failed is as bad as the first weights."""
    return geometric_mean(_scores(content, losses))


def _scores(content: Mapping[str, Any], losses: Sequence[float | None]) -> list[float]:
    scored = scored_by(content)
    return [min(scored(loss), scored(content["initial"])) for loss in losses]


def gain(content: Mapping[str, Any], words: str) -> tuple[float, float, float]:
    """Final loss with ratios over that without, each at its best common rate; the standard error; and that rate."""
    (_, plain), (factor, own) = (_best(content, one) for one in (PLAIN, words))
    logs = [math.log(a / b) for a, b in zip(_scores(content, own), _scores(content, plain), strict=True)]
    error = stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    return math.exp(fmean(logs)), error, factor


def _best(content: Mapping[str, Any], words: str) -> tuple[float, list[float | None]]:
    row = content["fixed"][words]
    return min(zip(row["rates"], row["losses"], strict=True), key=lambda pair: score(content, pair[1]))


def fixed_lines(content: Mapping[str, Any]) -> Iterator[str]:
    """One workload at fixed rates: a line for each kind, and one for each combination."""
    sizes = ", ".join(f"{kind} {size}" for kind, size in content["sizes"].items())
    best = _best(content, PLAIN)[0]
    yield f"{content['workload']}: {sizes}; without ratios {best:g} of the best rate is best"
    for kind in content["sizes"]:
        if _is_tried(content, kind):
            chosen, gains = best_ratio(content, kind)
            cells = "".join(f"{ratio:>6g}: {one[0]:.3f}" for ratio, one in gains.items())
            yield f"  {kind:22}{cells}   best {chosen:g}: {_shown(gains[chosen])}"
    for words in content["fixed"]:
        if len(ratios_of(words)) > 1:
            yield f"  {words:22} {_shown(gain(content, words))}"


def _is_tried(content: Mapping[str, Any], kind: str) -> bool:
    return all(within(f"{kind}={ratio:g}", KINDS) in content["fixed"] for ratio in RATIOS)


def best_ratio(content: Mapping[str, Any], kind: str) -> tuple[float, dict[float, tuple[float, float, float]]]:
    """Of one kind, and what each of its ratios brings."""
    gains = {ratio: gain(content, within(f"{kind}={ratio:g}", KINDS)) for ratio in RATIOS}
    return min(gains, key=lambda ratio: gains[ratio][0]), gains


def _shown(one: tuple[float, float, float]) -> str:
    return f"{one[0]:.3f} ± {one[1]:.3f} at {one[2]:g} of the best rate"


def auto_line(content: Mapping[str, Any]) -> str:
    """One workload under the search: over OneCycle at its best rate, and the common rate that was found over that."""
    cells = []
    for words, row in content["auto"].items():
        if words != "onecycle":
            found = geometric_mean([rate for rates in row["found"] for rate in rates])
            cells.append(f"{words or 'no ratios'} {searched(content, words, 'onecycle'):.3f} ({found:.2g})")
    paths = ", ".join(f"{kind} {one:.2f}" for kind, one in content["auto"][PLAIN]["straight"].items())
    return f"{content['workload']}, search: {'; '.join(cells)}; straightness without ratios: {paths}"


def searched(content: Mapping[str, Any], words: str, other: str = PLAIN) -> float:
    """Final loss of the search with some ratios over that with others, or over ``onecycle``: means over starts."""
    own, base = (
        geometric_mean([score(content, losses) for losses in content["auto"][one]["losses"]]) for one in (words, other)
    )
    return own / base


def summary(contents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Each set of ratios over all workloads. Those that lack the kinds of a set count as 1, if they have the others."""
    yield f"{'':34}{'mean of all':>14}{'with the kinds':>18}{'worst':>10}"
    for part in ("fixed", "auto"):
        there = [one for one in contents if PLAIN in one[part]]
        for words in dict.fromkeys(words for one in there for words in one[part] if words not in (PLAIN, "onecycle")):
            own = {one["workload"]: within(words, list(one["sizes"])) for one in there}
            known = [one for one in there if own[one["workload"]] in one[part]]
            ratios = {one["workload"]: _over_plain(part, one, own[one["workload"]]) for one in known}
            has = [ratio for name, ratio in ratios.items() if own[name] == words]
            worst = max(ratios, key=ratios.__getitem__)
            means = [f"{geometric_mean(some):.4f} ({len(some):2})" for some in (list(ratios.values()), has)]
            yield f"{part:6}{words:28}{means[0]:>14}{means[1]:>18}{ratios[worst]:>10.3f} {worst}"


def told(contents: Sequence[Mapping[str, Any]]) -> tuple[float, int]:
    """Whether straightness tells the best ratio: Spearman's correlation of the two over the kinds of all workloads,
    each as far as it differs from the workload's mean; and how many there are."""
    pairs: list[tuple[float, float]] = []
    for content in contents:
        own = [kind for kind in content["sizes"] if _is_tried(content, kind)]
        if PLAIN in content["auto"] and len(own) > 1:
            rows = [[content["auto"][PLAIN]["straight"][kind] for kind in own]]
            rows.append([math.log(best_ratio(content, kind)[0]) for kind in own])
            pairs += zip(*([value - fmean(row) for value in row] for row in rows), strict=True)
    return (correlation(*zip(*pairs, strict=True)) if pairs else math.nan), len(pairs)


def _over_plain(part: str, content: Mapping[str, Any], words: str) -> float:
    return gain(content, words)[0] if part == "fixed" else searched(content, words)


# The command line ----------------------------------------------------------------------------------------------------


def run(path: Path, problem: Problem, sets: Sequence[str], given: argparse.Namespace, device: torch.device) -> None:
    """Measure a workload and print it; ``sets``: none stands for all."""
    setting = Setting(problem, range(given.seeds), device, given.together)
    content = json.loads(path.read_text()) if path.exists() else begun(setting, given.shape)
    was, asked = (content["shape"], content["seeds"]), (given.shape, list(setting.seeds))
    if was != asked:
        raise SystemExit(f"{path} is of shape and seeds {was}, but {asked} are asked for; give another --results")
    kinds = list(content["sizes"])
    chosen = [PLAIN, *sets] if sets else [PLAIN, *KNOWN] if given.auto else sets_of(kinds)
    own = list(dict.fromkeys(within(words, kinds) for words in chosen))
    add_auto(content, setting, own) if given.auto else add_fixed(content, setting, own)
    save(path, content)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="dev,kin", help="names, or dev and kin; no others are run here")
    parser.add_argument("--ratios", nargs="*", default=[], help="sets of ratios in place of the usual ones")
    parser.add_argument("--auto", action="store_true", help="the search, not fixed rates")
    parser.add_argument("--shape", choices=SHAPES, default="onecycle", help="of fixed rates")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--part", default="0/1", help="i/k: every k-th workload, for processes side by side")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no workload is begun after so many")
    parser.add_argument("--together", type=int, default=64, help="columns in one stack; fewer need less memory")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder")
    parser.add_argument("--table", action="store_true", help="print what the files have, and run nothing")
    given = parser.parse_args(arguments)
    names, began = part_of(given.workloads, given.part, ("dev", "kin")), time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    contents = []
    for name in names:
        path = given.results / f"{name}.json"
        if not given.table:
            if time.monotonic() - began > given.seconds:
                print(f"{name}: left out, no time", flush=True)
                continue
            run(path, problem_of(name), given.ratios, given, device)
        if path.exists():
            contents.append(json.loads(path.read_text()))
            print("\n".join(_lines(contents[-1])), flush=True)
    print("\n".join(summary(contents)))
    print("straightness of a kind's path and its best ratio: correlation {:.2f} over {} kinds".format(*told(contents)))


def _lines(content: Mapping[str, Any]) -> Iterator[str]:
    if content["fixed"]:
        yield from fixed_lines(content)
    if content["auto"]:
        yield auto_line(content)


if __name__ == "__main__":
    main()
