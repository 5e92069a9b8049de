"""What `make demo` runs: four replicas learn handwritten digits, with torch's OneCycleLR and then with hdet's.

This process starts four others with torchrun (gloo, on CPUs). They train the network of ``ddp.py`` under
DistributedDataParallel, for each seed once with each scheduler, on the same batches from the same weights, and report
in JSON lines; this process shows them while they come and prints a table at the end.

    python examples/demo.py                        # a bit more than a minute on two cores
    python examples/demo.py --seeds 1 --steps 100  # a quick look
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from statistics import mean, stdev
from typing import Any

try:
    import torch
    import torch.distributed as dist
    from ddp import digits, evaluate, network
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    import hdet
except ModuleNotFoundError as missing:
    sys.exit(f"demo: the package {missing.name} is not installed; run `make demo`, or `pip install -e '.[dev]'` first")

SCHEDULERS = ("torch", "hdet")
GROUPS = ("conv", "head")
BATCH, MAX_LR, SYNC_EVERY = 16, 0.1, 20
EXPECTED = """\
What to expect: not a better model. Gradients are shared, so within a round the replicas lie on one line around the path
of plain DDP, and their mean should end where plain DDP ends, up to noise. The published controller moves the rate only
a little: the losses of neighbouring rates differ by little against sigma = 0.1. A multiplier of 1 means "not moved".
Round ends include waiting for the slowest replica; the model is tiny and the rounds short, so their share is large."""


def planned(args: argparse.Namespace) -> list[tuple[int, str]]:
    """The runs in their order: (seed, scheduler)."""
    return [(seed, scheduler) for seed in range(args.seeds) for scheduler in SCHEDULERS]


def journal_of(args: argparse.Namespace, seed: int) -> Path:
    return args.out / f"seed-{seed}.jsonl"


# -- the replicas ------------------------------------------------------------------------------------------------------


def replica(args: argparse.Namespace) -> None:
    """All runs of one rank, started by torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        for run, (seed, scheduler) in enumerate(planned(args)):
            train(args, run, seed, scheduler)
    except Exception as error:
        report(kind="failed", error=f"{type(error).__name__}: {error}".splitlines()[0])
        raise
    finally:
        dist.destroy_process_group()


def train(args: argparse.Namespace, run: int, seed: int, kind: str) -> None:
    """One run: the loop of ddp.py, with either scheduler."""
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels, val_images, val_labels = digits()
    model = network(seed)
    ddp = DistributedDataParallel(model)
    groups = [{"params": model[:-1].parameters()}, {"params": model[-1].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=MAX_LR, momentum=0.9)
    if kind == "torch":
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, MAX_LR, args.steps)
    else:
        journal = journal_of(args, seed)
        scheduler = hdet.OneCycleLR(optimizer, MAX_LR, args.steps, sync_every=SYNC_EVERY, model=model, journal=journal)

    began, reported = time.perf_counter(), 0.0
    for step in range(args.steps):
        rates = [group["lr"] for group in optimizer.param_groups]
        base = rates if kind == "torch" else scheduler.base_lrs_now
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        batch = torch.randint(len(labels), (world, BATCH), generator=generator)[rank]
        loss = cross_entropy(ddp(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step() if kind == "torch" else scheduler.step(loss)
        if time.perf_counter() > reported + 0.1 or step + 1 == args.steps:
            reported = time.perf_counter()
            report(kind="step", rank=rank, run=run, step=step + 1, rates=rates, base=base, loss=loss.item())
    seconds = time.perf_counter() - began
    with nullcontext() if kind == "torch" else scheduler.consensus():
        val_loss, accuracy = evaluate(model, val_images, val_labels)
    if rank == 0:
        report(kind="result", run=run, loss=val_loss, accuracy=accuracy, seconds=seconds)


def report(**message: Any) -> None:
    """One line to the process that shows it. A line is short, so lines of several ranks do not mix."""
    os.write(1, (json.dumps(message) + "\n").encode())


# -- the process that shows them ---------------------------------------------------------------------------------------


@contextmanager
def launched(args: argparse.Namespace) -> Iterator[subprocess.Popen[str]]:
    """The replicas under torchrun. Whatever happens inside, none of them is left afterwards."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.replicas}"]
    command += [__file__, f"--steps={args.steps}", f"--seeds={args.seeds}", f"--out={args.out}"]
    with (args.out / "stderr.txt").open("w") as log:
        # A session of its own: Ctrl-C reaches this process alone, which then stops the others in order.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
    try:
        yield process
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        process.terminate()  # torchrun passes it on to its workers
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
        process.stdout.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)


def messages(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """What the replicas report, until they have ended. Raises RuntimeError if they fail."""
    failure = None
    for line in process.stdout:
        if line.startswith("{"):
            message = json.loads(line)
            if message["kind"] == "failed":
                failure = failure or message["error"]
            else:
                yield message
    if process.wait() != 0:
        raise RuntimeError(failure or f"the replicas ended with exit code {process.returncode}")


class Screen:
    """The live display on a terminal: a bar with the time left, and one line per replica."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console)
        self._runs = planned(args)
        self._steps = args.steps
        self._task = self._progress.add_task("starting the replicas", total=args.steps * len(self._runs))
        self._latest: dict[int, Mapping[str, Any]] = {}
        self._live = Live(self._progress, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> "Screen":
        self._live.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._live.__exit__(*failure)

    def show(self, message: Mapping[str, Any]) -> None:
        self._latest[message["rank"]] = message
        seed, scheduler = self._runs[message["run"]]
        done = message["run"] * self._steps + message["step"]
        self._progress.update(self._task, completed=done, description=f"{scheduler}.OneCycleLR, seed {seed}")
        table = Table("replica", *(f"rate, {name}" for name in GROUPS), "loss", box=None, padding=(0, 2))
        for rank, latest in sorted(self._latest.items()):
            pairs = zip(latest["rates"], latest["base"], strict=True)
            rates = [f"{rate:.3e} = {rate / base:.3f} × base" for rate, base in pairs]
            table.add_row(str(rank), *rates, f"{latest['loss']:.4f}")
        table.add_row("base", *(f"{base:.3e}" for base in message["base"]), style="bold")
        self._live.update(Group(self._progress, table))


class Lines:
    """The same for a file or a pipe: a plain line every few seconds."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._runs = planned(args)
        self._steps = args.steps
        self._first: tuple[float, int] | None = None
        self._shown = 0.0

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *failure: Any) -> None:
        pass

    def show(self, message: Mapping[str, Any]) -> None:
        step, now = message["step"], time.monotonic()
        if message["rank"] != 0 or (now < self._shown + 5 and step < self._steps):
            return
        self._shown = now
        seed, scheduler = self._runs[message["run"]]
        done, total = message["run"] * self._steps + step, len(self._runs) * self._steps
        began, already = self._first = self._first or (now, done)  # the start-up says nothing about the speed
        left = f"about {(now - began) * (total - done) / (done - already):.0f} s left" if done > already else "started"
        print(
            f"{scheduler}.OneCycleLR, seed {seed}: step {step} of {self._steps}, base rate {message['base'][0]:.3e}, "
            f"loss of replica 0 {message['loss']:.4f}; {left}",
            flush=True,
        )


def table_of(args: argparse.Namespace, results: Mapping[int, Mapping[str, Any]]) -> Table:
    """The results as mean ± standard deviation over the seeds."""

    def of(scheduler: str, key: str) -> list[float]:
        return [results[run][key] for run, (_, kind) in enumerate(planned(args)) if kind == scheduler]

    seeds = "one seed: no spread known" if args.seeds == 1 else f"mean ± standard deviation over {args.seeds} seeds"
    table = Table("OneCycleLR of", "torch", "hdet", "hdet - torch", title=seeds, title_justify="left")
    for name, key, scale, form in (
        ("validation loss", "loss", 1, ".4f"),
        ("accuracy, %", "accuracy", 100, ".2f"),
        ("seconds per run", "seconds", 1, ".1f"),
    ):
        torch_values, hdet_values = ([scale * value for value in of(kind, key)] for kind in SCHEDULERS)
        differences = [ours - theirs for ours, theirs in zip(hdet_values, torch_values, strict=True)]
        table.add_row(name, *(spread(values, form) for values in (torch_values, hdet_values, differences)))
    rounds = [hdet.read_journal(journal_of(args, seed)).rounds for seed in range(args.seeds)]
    for group, name in enumerate(GROUPS):
        learned = [of_run[-1]["learned"][group] for of_run in rounds]
        table.add_row(f"multiplier, {name}", "", spread(learned, ".4f"), "")
    table.add_row("rounds per run", "", str(len(rounds[0])), "")
    shares = [100 * round_ends(of_run) for of_run in rounds]
    table.add_row("round ends, % of time", "", spread(shares, ".1f"), "")
    return table


def round_ends(rounds: list[dict[str, Any]]) -> float:
    """The share of the time that went into the ends of rounds: gather (with waiting), controller, converge."""
    total = sum(sum(record["seconds"].values()) for record in rounds)
    return 1 - sum(record["seconds"]["train"] for record in rounds) / total


def spread(values: list[float], form: str) -> str:
    """Mean ± standard deviation; of one value just the value."""
    return f"{mean(values):{form}}" + (f" ± {stdev(values):{form}}" if len(values) > 1 else "")


def demo(args: argparse.Namespace) -> None:
    """Start the replicas, show them, print the table."""
    console = Console(highlight=False)
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in range(args.seeds):
        journal_of(args, seed).unlink(missing_ok=True)
    console.print(
        f"{args.replicas} replicas, scikit-learn's digits, SGD with momentum at max_lr = {MAX_LR}, {args.steps} steps, "
        f"rounds of {SYNC_EVERY}, spread 1/9; seeds: {args.seeds}\n"
    )
    results = {}
    display = Screen(args, console) if console.is_terminal else Lines(args)
    with launched(args) as process, display:
        for message in messages(process):
            if message["kind"] == "result":
                results[message["run"]] = message
            else:
                display.show(message)
    console.print(table_of(args, results))
    console.print(EXPECTED, soft_wrap=True)
    paths = ", ".join(os.path.relpath(journal_of(args, seed)) for seed in range(args.seeds))
    console.print(f"\njournals: {paths}", soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps per run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "runs" / "demo")
    args = parser.parse_args()
    if "RANK" in os.environ:
        replica(args)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave by exceptions, so that the replicas are stopped
    try:
        demo(args)
    except KeyboardInterrupt:
        sys.exit("demo: stopped")
    except Exception as error:
        sys.exit(f"demo: {error} (details: {os.path.relpath(args.out / 'stderr.txt')})")


if __name__ == "__main__":
    main()
