"""One long run: a GPT of 111 million weights on 41 million tokens, once each. Is the rate that is found the best?

    python lab/experiments/long_gpt_data.py            # the corpus, once
    python lab/experiments/long_gpt.py                 # some ten minutes on one H200; writes results/long_gpt.json
    python lab/experiments/long_gpt.py --seconds 540 --state FOLDER    # the same in pieces: again until all is done
    python lab/experiments/long_gpt.py --tiny --results long.json      # seconds on a core, no data
    python lab/experiments/long_gpt.py --table

Rows are torch's OneCycleLR at some peak rates, and ``hdet.auto`` from guesses that are far too low and far too high.
All begin from the same weights and see the same batches: AdamW, bf16, gradients clipped to 1, momentum constant. The
score is the loss on packages that are held out, over that of the best fixed rate.

The file is written after each row; a row that it has is not run again, unless it was made in another way. With
``--state`` a row that the time was too short for goes on where it stopped, also after a kill.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import checkout  # noqa: F401 - so that lab is found
import torch
from long_gpt_data import VOCABULARY, Corpus, load
from provenance import commit, library, versions
from real.ledger import save
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from lab.benchmarks.gpt import GPT, Size, batches, loss_of
from lab.tasks.streams import generator_of

RESULTS = Path(__file__).parent / "results" / "long_gpt.json"
LARGE = Size(layers=12, width=768, heads=12, context=512, batch=16, bf16=True, vocabulary=VOCABULARY)
TINY = Size(layers=2, width=32, heads=2, context=16, batch=4, bf16=False)
STEPS, TINY_STEPS = 5000, 60
RATES = (3e-4, 6e-4, 1.2e-3)
"""Peaks of OneCycle."""
GUESSES = (1e-6, 1e-1)
BETAS, DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
"""As GPTs are trained; norms and biases do not decay."""
STD = 0.02
"""Of the first weights."""
TARGET = 1.01
POINTS = 50
"""Of a row's curve of train losses."""


# The problem ---------------------------------------------------------------------------------------------------------


class Windows:
    """A text in pieces of ``context`` tokens and the one after."""

    def __init__(self, tokens: Tensor, size: Size) -> None:
        self._tokens, self._batch = tokens, size.batch
        self._places = torch.arange(size.context + 1, device=tokens.device)
        self.starts = torch.arange(0, len(tokens) - size.context, size.context, device=tokens.device)

    def __len__(self) -> int:
        """Whole batches."""
        return len(self.starts) // self._batch

    def batch(self, t: int) -> Tensor:
        """[sample, place]; nothing is copied from the host."""
        starts = self.starts[t * self._batch : (t + 1) * self._batch]
        return self._tokens[starts[:, None] + self._places].long()

    def shuffle(self, seed: int) -> None:
        """Another order, the same in all runs of a seed."""
        order = torch.randperm(len(self.starts), generator=generator_of("long_gpt", seed))
        self.starts = self.starts[order.to(self.starts.device)]


@torch.no_grad()
def draw(model: GPT, seed: int) -> None:
    """GPT-2's first weights: normal, smaller where a block adds to its input; biases are zero."""
    generator = generator_of("weights", seed)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            adds = name.endswith(("mix.weight", "network.2.weight"))
            std = STD / math.sqrt(2 * len(model.blocks)) if adds else STD
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)
        elif name.endswith("bias"):
            weight.zero_()


class Bench:
    """One model with its text; every row begins from the same weights, and the compiled step is shared by all."""

    def __init__(self, size: Size, corpus: Corpus, steps: int, seed: int, device: torch.device) -> None:
        self.size, self.steps, self.seed, self.device = size, steps, seed, device
        self.train, self.held_out = Windows(corpus.train, size), Windows(corpus.held_out, size)
        if len(self.train) < steps:
            wanted = steps * size.batch * size.context
            raise ValueError(f"{steps} steps must have {wanted} tokens, but the corpus has {len(corpus.train)}")
        self.train.shuffle(seed)
        self.model = GPT(size)
        draw(self.model, seed)
        self.model.to(device)
        self._first = {name: value.clone() for name, value in self.model.state_dict().items()}
        self._loss = torch.compile(loss_of) if device.type == "cuda" else loss_of

    def warm(self) -> float:
        """Seconds until the first step is compiled."""
        began = time.perf_counter()
        self.loss(0).backward()
        self.wait()
        return time.perf_counter() - began

    def reset(self) -> None:
        self.model.load_state_dict(self._first)
        self.model.zero_grad()

    def loss(self, t: int) -> Tensor:
        return self._loss(self.size, self.model, self.train.batch(t))

    @torch.no_grad()
    def evaluate(self) -> float:
        """Loss on what is held out. Not compiled: a second graph would take longer than it saves."""
        losses = [loss_of(self.size, self.model, self.held_out.batch(t)) for t in range(len(self.held_out))]
        return float(torch.stack(losses).double().mean())

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def optimizer(self, rate: float) -> AdamW:
        weights = list(self.model.parameters())
        groups = [
            {"params": [p for p in weights if p.dim() > 1], "weight_decay": DECAY},
            {"params": [p for p in weights if p.dim() == 1], "weight_decay": 0.0},
        ]
        return AdamW(groups, lr=rate, betas=BETAS, fused=self.device.type == "cuda")


# Rows ----------------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A way to set the rate."""

    way: str
    """Either "fixed" or "auto"."""
    rate: float
    """The peak that is given, or the guess."""

    @property
    def name(self) -> str:
        return f"{self.way} {self.rate:g}"


class Training:
    """A row on its way; its state can be saved after any step.

    Args:
        bench: the problem; its model is this row's until another one begins.
        row: which.
    """

    def __init__(self, bench: Bench, row: Row) -> None:
        bench.reset()
        self.bench = bench
        self.optimizer = bench.optimizer(row.rate)
        self.scheduler: Any = (
            hdet.auto(self.optimizer, total_steps=bench.steps)
            if row.way == "auto"
            else OneCycleLR(self.optimizer, row.rate, total_steps=bench.steps, cycle_momentum=False)
        )
        self.losses = torch.zeros(bench.steps, device=bench.device)
        self.step, self.seconds = 0, 0.0

    def resume(self, file: Path) -> None:
        """From what :meth:`save` wrote."""
        found = hdet.load(file, model=self.bench.model, optimizer=self.optimizer, scheduler=self.scheduler)
        self.step, self.seconds = found["step"], found["seconds"]
        self.losses.copy_(found["losses"])

    def save(self, file: Path) -> None:
        parts = {"model": self.bench.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        hdet.save(file, keep=1, **parts, step=self.step, seconds=self.seconds, losses=self.losses)

    def steps(self) -> Iterator[int]:
        """Train, and tell after each step how many are done. The host waits for the device only if hdet does."""
        while self.step < self.bench.steps:
            began = time.perf_counter()
            self.optimizer.zero_grad()
            loss = self.bench.loss(self.step)
            loss.backward()
            clip_grad_norm_(self.bench.model.parameters(), CLIP)
            self.optimizer.step()
            self.losses[self.step] = loss.detach()
            if isinstance(self.scheduler, hdet.AutoScheduler):
                self.scheduler.step(loss.detach())
            else:
                self.scheduler.step()
            self.step += 1
            self.seconds += time.perf_counter() - began
            yield self.step

    def outcome(self) -> dict[str, Any]:
        """What a finished row says."""
        points = min(POINTS, self.bench.steps)
        curve = [float(part.double().mean()) for part in self.losses.tensor_split(points)]
        outcome: dict[str, Any] = {"loss": self.bench.evaluate(), "train": curve, "seconds": self.seconds}
        if isinstance(self.scheduler, hdet.AutoScheduler):
            found = self.scheduler.found
            outcome |= {"found": found.rate, "status": found.status, "rolled_back": found.rolled_back}
        return outcome


class Plan(NamedTuple):
    """Where a run's results and states go, and how long it may take."""

    results: Path
    state: Path | None
    every: int
    """Steps between states."""
    until: float
    """When to stop, as ``time.time`` has it."""
    head: dict[str, Any]
    """How all rows are made: rows of another head do not belong into the same file."""

    def content(self) -> dict[str, Any]:
        """What the file has, if it was made in the same way."""
        there = json.loads(self.results.read_text()) if self.results.exists() else {}
        rows = there["rows"] if there.get("head") == self.head else {}
        kept = {name: row for name, row in rows.items() if row["way"] == "fixed" or row["library"] == library()}
        return {"command": "python lab/experiments/long_gpt.py", "head": self.head, "rows": kept}

    def file(self, row: Row) -> Path | None:
        """Of the row's state. Runs that are made in another way have other files."""
        if self.state is None:
            return None
        made = sha256(json.dumps([self.head, library() if row.way == "auto" else ""]).encode()).hexdigest()[:12]
        return self.state / f"{row.name.replace(' ', '-')}-{made}.pt"


def run_row(plan: Plan, bench: Bench, row: Row) -> dict[str, Any] | None:
    """A row's outcome; None if the time is over."""
    training, file = Training(bench, row), plan.file(row)
    if file is not None and hdet.exists(file):
        training.resume(file)
        print(f"{row.name}: goes on after step {training.step}", flush=True)
    tell = max(bench.steps // 10, 1)
    for step in training.steps():
        if step % tell == 0:
            mean = float(training.losses[step - tell : step].mean())
            print(f"{row.name}: {step} steps, train loss {mean:.4f}, {training.seconds:.1f} s", flush=True)
        if step == bench.steps:
            break
        is_over = time.time() > plan.until
        if file is not None and (is_over or step % plan.every == 0):
            training.save(file)
        if is_over:
            print(f"{row.name}: no time left after step {step}", flush=True)
            return None
    bench.wait()
    return {**row._asdict(), **training.outcome(), "library": library(), "commit": commit()}


def run(plan: Plan, bench: Bench, rows: Sequence[Row]) -> None:
    """The rows that the file lacks; it is written after each."""
    wanted = [row for row in rows if row.name not in plan.content()["rows"]]
    if not wanted:
        return
    print(f"{bench.warm():.1f} s until the first step", flush=True)
    for row in wanted:
        outcome = run_row(plan, bench, row)
        if outcome is None:
            return
        content = plan.content()
        content["rows"][row.name] = outcome
        save(plan.results, scored({**content, **versions(bench.device), **memory(bench.device)}))
        file = plan.file(row)
        if file is not None:
            file.unlink(missing_ok=True)


def memory(device: torch.device) -> dict[str, float]:
    """The most GB at once that the device has held."""
    return {"peak_GB": torch.cuda.max_memory_allocated(device) / 1e9} if device.type == "cuda" else {}


# What comes of it ----------------------------------------------------------------------------------------------------


def scored(content: dict[str, Any]) -> dict[str, Any]:
    """With each row's ratio to the best fixed one, once there is one; a loss that is not finite has no ratio."""
    rows = content["rows"].values()
    fixed = {row["rate"]: row["loss"] for row in rows if row["way"] == "fixed" and _is_finite(row["loss"])}
    if not fixed:
        return content
    best = min(fixed, key=fixed.__getitem__)
    for row in rows:
        row["ratio"] = row["loss"] / fixed[best] if _is_finite(row["loss"]) else None
    tried = [row["rate"] for row in rows if row["way"] == "fixed"]
    return {**content, "best": {"rate": best, "on_edge": best in (min(tried), max(tried))}}


def _is_finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def table(content: dict[str, Any]) -> str:
    """In Markdown, with PASS or MISS."""
    lines = ["| rate | held-out loss | over the best fixed one | found | rolled back | seconds |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    for row in content["rows"].values():
        loss, ratio = (row.get(name) for name in ("loss", "ratio"))
        score = "diverged | " if loss is None else f"{loss:.4f} | {'' if ratio is None else f'{ratio:.4f}'}"
        found = f"{row['found']:.2g} | {row['rolled_back']}" if "found" in row else " | "
        lines.append(f"| {row['way']} {row['rate']:g} | {score} | {found} | {row['seconds']:.0f} |")
    return "\n".join([*lines, "", *verdict(content)])


def verdict(content: dict[str, Any]) -> list[str]:
    """Against the target; and whether the best fixed rate may lie beyond those that were tried."""
    auto = [row for row in content["rows"].values() if row["way"] == "auto"]
    if "best" not in content or not auto:
        return []
    ratios = [math.inf if row["ratio"] is None else row["ratio"] for row in auto]
    met = "PASS" if max(ratios) <= TARGET else "MISS"
    lines = [f"{met}: auto within {TARGET} of the best fixed rate: {', '.join(f'{ratio:.4f}' for ratio in ratios)}"]
    if content["best"]["on_edge"]:
        lines.append(f"the best fixed rate, {content['best']['rate']:g}, is on the edge: try one beyond it (--rates)")
    return lines


def tiny_corpus(steps: int) -> Corpus:
    """Sentences for a few steps; see ``batches``."""
    found = torch.cat(batches(TINY, steps + 40, torch.device("cpu"))).flatten()
    train, held_out = found[: (steps + 10) * TINY.batch * TINY.context], found[-20 * TINY.batch * TINY.context :]
    return Corpus(train, held_out, {"made": "see tiny_corpus"})


def main(words: Sequence[str] | None = None) -> None:
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--rates", type=_numbers, default=RATES, help="fixed peaks, with commas between")
    line.add_argument("--guesses", type=_numbers, default=GUESSES, help="where auto starts")
    line.add_argument("--steps", type=int)
    line.add_argument("--seed", type=int, default=0)
    line.add_argument("--seconds", type=float, default=math.inf, help="stop after so many")
    line.add_argument("--state", type=Path, help="folder for rows that are not finished; 1 to 4 GB each")
    line.add_argument("--every", type=int, default=2500, help="steps between states in that folder")
    line.add_argument("--results", type=Path, default=RESULTS)
    line.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    line.add_argument("--tiny", action="store_true", help="a model of 45,000 weights on made sentences")
    line.add_argument("--table", action="store_true", help="print the table of --results, and run nothing")
    given = line.parse_args(words)
    if not given.table:
        until, device = time.time() + given.seconds, torch.device(given.device)
        torch.set_float32_matmul_precision("high")
        size, steps = (TINY, given.steps or TINY_STEPS) if given.tiny else (LARGE, given.steps or STEPS)
        corpus = tiny_corpus(steps) if given.tiny else load(device)
        bench = Bench(size, corpus, steps, given.seed, device)
        plan = Plan(given.results, given.state, given.every, until, head_of(bench, corpus))
        run(plan, bench, [*(Row("fixed", rate) for rate in given.rates), *(Row("auto", one) for one in given.guesses)])
    if given.results.exists():
        print(table(json.loads(given.results.read_text())))


def head_of(bench: Bench, corpus: Corpus) -> dict[str, Any]:
    """How rows are made, as JSON holds it."""
    size = bench.size
    return {
        "model": {**size._asdict(), "weights": sum(p.numel() for p in bench.model.parameters())},
        "steps": bench.steps,
        "tokens_trained_on": bench.steps * size.batch * size.context,
        "tokens_held_out": len(bench.held_out) * size.batch * size.context,
        "seed": bench.seed,
        "optimizer": {"name": "AdamW", "betas": [*BETAS], "weight_decay": DECAY, "clip": CLIP},
        "corpus": corpus.facts,
    }


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",") if number]


if __name__ == "__main__":
    main()
