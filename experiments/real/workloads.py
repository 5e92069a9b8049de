"""The workloads of decisions 015 and 019: model, data, optimizer and length, and what each may be used for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from hdet.tasks.task import Task
from real.models.convolutions import CNN, ResNet
from real.models.transformers import ViT
from real.optimizers import CUSTOMARY
from real.problems import images, tables, texts

__all__ = ["SPLITS", "WORKLOADS", "Workload"]

SPLITS = ("dev", "kin", "seen", "test")
"""dev, kin: rules may be tuned on them. seen: it was *test* until its failures moved the rule. test: for judging
only, run with a reason that is logged."""
WRONG_LABELS = 0.3


class Workload(NamedTuple):
    """What is trained, and how long."""

    name: str
    split: str
    """One of ``SPLITS``."""
    optimizer: str
    steps: int
    build: Callable[[str, bool], Task]
    """The task of a name, from synthetic data or from `.bench-data/`."""

    @property
    def customary(self) -> float:
        """The peak rate that one writes without a search."""
        return CUSTOMARY[self.optimizer]

    def task(self, synthetic: bool = False) -> Task:
        return self.build(self.name, synthetic)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("fashion-vit", "dev", "adamw", 1000, partial(images.classes, "fashion", ViT)),
        Workload(
            "mnist-resnet-noisy", "dev", "nesterov", 600, partial(images.classes, "mnist", ResNet, wrong=WRONG_LABELS)
        ),
        Workload("shakespeare-gpt", "dev", "adamw", 200, partial(texts.gpt, "shakespeare")),
        Workload("shakespeare-gru", "dev", "lion", 800, texts.text_gru),
        Workload("adult-widedeep", "dev", "adagrad", 500, partial(tables.adult, tables.wide_deep)),
        Workload("movielens-factors", "dev", "adamw", 5000, tables.movielens),
        Workload("mnist-cnn", "seen", "adamw", 200, partial(images.classes, "mnist", CNN)),
        Workload("fashion-resnet", "seen", "nesterov", 1500, partial(images.classes, "fashion", ResNet)),
        Workload("kjv-gpt", "seen", "muon", 1000, partial(texts.gpt, "kjv")),
        Workload("kjv-finetune", "seen", "lion", 400, texts.fine_tuned),
        Workload("cmudict-seq2seq", "seen", "adafactor", 1500, texts.cmudict),
        Workload("bach-gru", "seen", "adamw", 5000, texts.bach),
    )
}
"""By name."""
