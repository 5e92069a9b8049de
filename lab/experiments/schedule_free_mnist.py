"""A published row: MNIST as in the examples of Schedule-Free, whose authors give 99.22 % and 99.35 %.

    python lab/experiments/schedule_free_mnist.py                        # three rows, three seeds, 14 epochs
    python lab/experiments/schedule_free_mnist.py --rows auto --processes 3
    python lab/experiments/schedule_free_mnist.py --synthetic --epochs 2 --seeds 1

The small network of PyTorch's own example, batches of 64, 14 epochs. ``default``: Adadelta at rate 1, times 0.7 after
every epoch. ``schedulefree``: AdamWScheduleFree at 0.0025, no warm-up. ``auto``: AdamW with
``hdet.OneCycleLR(max_lr="auto")``, the guess being AdamW's default. Images lie on the device. Needs the prepared data;
how many images it has is in the result, as the published numbers are of 60,000.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d, relu

import hdet

RESULTS = Path(__file__).parent / "results" / "schedule_free_mnist.json"
PUBLISHED = {"default": 99.22, "schedulefree": 99.35}
PUBLISHED_IMAGES = 60_000
BATCH = 64
GUESS = 1e-3
"""AdamW's default."""


class Net(nn.Module):
    """Two convolutions, a pooling, two linear layers, dropout before each of these."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.hidden, self.head = nn.Linear(64 * 12 * 12, 128), nn.Linear(128, 10)
        self.early, self.late = nn.Dropout(0.25), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.early(max_pool2d(relu(self.second(relu(self.first(x)))), 2))
        return self.head(self.late(relu(self.hidden(x.flatten(1)))))  # type: ignore[no-any-return]


class Images(NamedTuple):
    """Normalised images and labels on the device."""

    images: Tensor
    labels: Tensor

    def epoch(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """All of them once, in a new order; the last batch is shorter."""
        order = torch.randperm(len(self.labels), generator=generator, device=self.labels.device)
        for places in order.split(BATCH):
            yield self.images[places], self.labels[places]


def images_of(synthetic: bool, device: torch.device) -> tuple[Images, Images]:
    """Training and test images."""
    from real.data import load, stand_in

    found = stand_in("mnist") if synthetic else load("mnist")

    def part(name: str) -> Images:
        images = (found[f"{name}_images"].to(device).float()[:, None] / 255 - 0.1307) / 0.3081
        return Images(images, found[f"{name}_labels"].to(device).long())

    return part("train"), part("test")


# Rows ----------------------------------------------------------------------------------------------------------------


class Trainer:
    """How a row steps; for some optimizers evaluation is another mode."""

    def __init__(self, optimizer: Any, after_step: Callable[[Tensor], None], after_epoch: Callable[[], None]) -> None:
        self.optimizer, self.after_step, self.after_epoch = optimizer, after_step, after_epoch

    def mode(self, name: str) -> None:
        """Switch to "train" or "eval"."""
        getattr(self.optimizer, name, lambda: None)()


def _nothing(*_: Any) -> None:
    pass


def default(model: nn.Module, steps: int) -> Trainer:
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    return Trainer(optimizer, _nothing, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7).step)


def schedule_free(model: nn.Module, steps: int) -> Trainer:
    from schedulefree import AdamWScheduleFree

    return Trainer(AdamWScheduleFree(model.parameters(), lr=0.0025), _nothing, _nothing)


def auto(model: nn.Module, steps: int) -> Trainer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=GUESS)
    scheduler = hdet.OneCycleLR(optimizer, max_lr="auto", total_steps=steps, cycle_momentum=False)
    return Trainer(optimizer, scheduler.step, _nothing)


ROWS: dict[str, Callable[[nn.Module, int], Trainer]] = {
    "default": default,
    "schedulefree": schedule_free,
    "auto": auto,
}


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


def train(row: str, seed: int, epochs: int, synthetic: bool, device_name: str) -> dict[str, Any]:
    """One run: test accuracy in percent after every epoch."""
    torch.set_num_threads(1)
    device = torch.device(device_name)
    training, test = images_of(synthetic, device)
    torch.manual_seed(seed)
    model = Net().to(device)
    generator = torch.Generator(device).manual_seed(seed)
    trainer = ROWS[row](model, epochs * -(-len(training.labels) // BATCH))
    began, accuracy, highest = time.perf_counter(), [], 0.0
    for _ in range(epochs):
        model.train()
        trainer.mode("train")
        for batch in training.epoch(generator):
            trainer.optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            trainer.optimizer.step()
            highest = max(highest, float(trainer.optimizer.param_groups[0]["lr"]))
            trainer.after_step(loss)
        trainer.after_epoch()
        model.eval()
        trainer.mode("eval")
        accuracy.append(_accuracy(model, test))
    seconds = time.perf_counter() - began
    return {"row": row, "seed": seed, "accuracy": accuracy, "highest_rate": highest, "seconds": seconds}


@torch.no_grad()
def _accuracy(model: nn.Module, test: Images) -> float:
    parts = zip(test.images.split(1000), test.labels.split(1000), strict=True)
    right = sum((model(images).argmax(1) == labels).sum() for images, labels in parts)
    return 100 * float(right) / len(test.labels)


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard error of the last accuracy, beside the published one."""
    last = [run["accuracy"][-1] for run in runs]
    error = statistics.stdev(last) / len(last) ** 0.5 if len(last) > 1 else None
    published = PUBLISHED.get(runs[0]["row"])
    return {"accuracy": statistics.fmean(last), "standard_error": error, "published": published, "runs": runs}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--synthetic", action="store_true", help="a stand-in instead of MNIST")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args(words)
    rows = [row for row in given.rows.split(",") if row != "schedulefree" or find_spec("schedulefree") is not None]
    training, test = images_of(given.synthetic, torch.device("cpu"))
    wanted = [(row, seed, given.epochs, given.synthetic, given.device) for row in rows for seed in range(given.seeds)]
    if given.processes > 1:
        with ProcessPoolExecutor(given.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            runs = list(pool.map(train, *zip(*wanted, strict=True)))
    else:
        runs = [train(*one) for one in wanted]
    found = json.loads(given.json.read_text()) if given.json.exists() else {}
    arguments = {"epochs": given.epochs, "images": len(training.labels), "test_images": len(test.labels)}
    if {name: found.get(name) for name in arguments} != arguments:
        found = {
            **arguments,
            "as_published": len(training.labels) == PUBLISHED_IMAGES and not given.synthetic,
            "rows": {},
        }
    for row in rows:
        found["rows"][row] = summary([run for run in runs if run["row"] == row])
        print(row, {name: value for name, value in found["rows"][row].items() if name != "runs"}, flush=True)
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
