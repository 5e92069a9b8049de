"""Starts the benchmark's own runner, with queues of batches from packages in place of its loaders.

    python lab/algoperf/runner.py BENCHMARK --workload=mnist --framework=pytorch ...

BENCHMARK is a clone of mlcommons/algorithmic-efficiency; the other words are its submission_runner.py's. Its loader of
MNIST needs tensorflow_datasets, which downloads at run time: the images here are those that `make bench-data` takes
from a package. For cifar no package has the data, so it gets the same random batch again and again, as in the
benchmark's own tests with a fake queue.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
MNIST = ROOT / ".bench-data" / "mnist.npz"

FAKE = 1024
"""So many fake images of cifar are evaluated, of each split."""

Batch = dict[str, torch.Tensor]


def _split(split: str, trained_on: int) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one of the benchmark's splits: it validates on the last images for training."""
    with np.load(MNIST, allow_pickle=False) as arrays:
        if split == "test":
            return arrays["test_images"], arrays["test_labels"]
        part = slice(trained_on, None) if split == "validation" else slice(trained_on)
        return arrays["train_images"][part], arrays["train_labels"][part]


def mnist_queue(workload: Any, split: str, batch_size: int, seed: int) -> Iterator[Batch]:
    """Batches of MNIST without an end: shuffled for training; for evaluation in order, the last one padded."""
    images, labels = _split(split, workload.num_train_examples)
    inputs = (torch.from_numpy(images).float().unsqueeze(1) / 255 - workload.train_mean) / workload.train_stddev
    targets = torch.from_numpy(labels.astype(np.int64))
    generator = torch.Generator().manual_seed(seed)
    examples = len(targets)
    while True:
        order = torch.randperm(examples, generator=generator) if split == "train" else torch.arange(examples)
        for rows in order.split(batch_size):
            missing = batch_size - len(rows)
            if missing and split == "train":
                continue
            weights = torch.ones(batch_size, dtype=torch.bool)
            weights[len(rows) :] = False
            rows = torch.cat([rows, rows[:1].expand(missing)])
            yield {"inputs": inputs[rows], "targets": targets[rows], "weights": weights}


def fake_queue(batch_size: int, classes: int, shape: tuple[int, ...], seed: int) -> Iterator[Batch]:
    """The same random images and labels, again and again."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(batch_size, *shape, generator=generator)
    targets = torch.randint(classes, (batch_size,), generator=generator)
    while True:
        yield {"inputs": inputs, "targets": targets, "weights": torch.ones(batch_size, dtype=torch.bool)}


def main(benchmark: str, words: list[str]) -> None:
    sys.path[:0] = [benchmark, str(ROOT), str(ROOT / "src")]
    for name in ("tensorflow_datasets", "tensorflow_probability", "torchvision", "torchvision.datasets"):
        sys.modules.setdefault(name, ModuleType(name))  # imported at the top of its loaders, which are not used here
    for module, name in (("torchvision", "transforms"), ("torchvision.datasets", "CIFAR10")):
        sys.modules[module].__dict__.setdefault(name, None)
    version = sys.modules.setdefault("algoperf._version", ModuleType("algoperf._version"))
    version.__dict__.setdefault("version", "a clone")  # its build writes this module
    import submission_runner
    from absl import app
    from algoperf.workloads.mnist.mnist_pytorch.workload import MnistWorkload

    def mnist(self: Any, data_rng: Any, split: str, data_dir: str, global_batch_size: int, *_: Any, **__: Any) -> Any:
        return mnist_queue(self, split, global_batch_size, int(data_rng[0]))

    MnistWorkload._build_input_queue = mnist
    if "--workload=cifar" in words:
        from algoperf.workloads.cifar.cifar_pytorch.workload import CifarWorkload

        def cifar(
            self: Any, data_rng: Any, split: str, data_dir: str, global_batch_size: int, *_: Any, **__: Any
        ) -> Any:
            return fake_queue(global_batch_size, 10, (3, 32, 32), int(data_rng[0]))

        CifarWorkload._build_input_queue = cifar
        for split in ("eval_train", "validation", "test"):  # nothing is to be learned from fake images
            setattr(CifarWorkload, f"num_{split}_examples", FAKE)
    app.run(submission_runner.main, argv=["submission_runner.py", *words])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
