"""The workloads of decisions 015 and 019: model, data, optimizer and length, and what each may be used for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from hdet.tasks.streams import generator_of
from hdet.tasks.task import Batch, Task
from real.data import ADULT_CATEGORIES, CHARACTERS, ITEMS, NOTES, USERS, load, load_or_stand_in
from real.models import CNN, GPT, ChordGRU, Factors, ResNet, Seq2Seq, TextGRU, ViT, WideDeep, draw
from real.optimizers import CUSTOMARY
from real.task import Chords, RealTask, Rows, Windows, held_out

__all__ = ["CONTEXT", "SPLITS", "WORKLOADS", "Workload", "gpt", "gpt_task"]

SPLITS = ("dev", "kin", "seen", "test")
"""dev, kin: rules may be tuned on them. seen: it was *test* until its failures moved the rule. test: for judging
only, run with a reason that is logged."""

CONTEXT = 48
"""Characters that the GPT sees."""
GRU_STEPS, CHORD_STEPS = 32, 16
WRONG_LABELS = 0.3
PHONEMES, LETTERS = 41, 28
CROSSINGS = ((1, 3), (2, 4))
"""Education with occupation, marital status with relationship."""


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


# Losses --------------------------------------------------------------------------------------------------------------


def _image_loss(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    bright = images[:, None].float() / 255
    return cross_entropy(model((bright - 0.3) / 0.3), labels.long())


def _next_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Every number of a window but the first is predicted from those before it."""
    window = batch[0].long()
    return cross_entropy(model(window[:, :-1]).flatten(0, -2), window[:, 1:].flatten())


def _income_loss(model: nn.Module, batch: Batch) -> Tensor:
    categories, numbers, labels = batch
    return binary_cross_entropy_with_logits(model(categories.long(), numbers), labels.float())


def _rating_loss(model: nn.Module, batch: Batch) -> Tensor:
    users, items, ratings = batch
    predicted = model(users.long(), items.long())
    return (predicted - ratings.float()).square().mean()  # mse_loss fails under two vmaps


def _spoken_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean over the phonemes; padding does not count."""
    letters, phonemes = (part.long() for part in batch)
    logits = model(letters, phonemes).flatten(0, 1)
    return cross_entropy(logits, phonemes.flatten(), ignore_index=0)


# Tasks ---------------------------------------------------------------------------------------------------------------


def _drawn(model: nn.Module, generator: torch.Generator, table: float = 0.02) -> nn.Module:
    draw(model, generator, table)
    return model


def _images(data: str, model: Callable[[], nn.Module], name: str, synthetic: bool, wrong: float = 0.0) -> Task:
    found = load_or_stand_in(data, synthetic)
    labels = _mislabelled(found["train_labels"], wrong)
    return RealTask(
        name,
        Rows((found["train_images"], labels)),
        held_out(Rows((found["test_images"], found["test_labels"])), 2048, 512),
        lambda generator: _drawn(model(), generator),
        _image_loss,
        batch_size=64,
    )


def _mislabelled(labels: Tensor, share: float) -> Tensor:
    """A share of the labels is drawn anew, always the same ones; a tenth of these happen to be right."""
    generator = generator_of("wrong labels")
    drawn = torch.randint(10, labels.shape, generator=generator, dtype=labels.dtype)
    return torch.where(torch.rand(labels.shape, generator=generator) < share, drawn, labels)


def gpt(generator: torch.Generator) -> nn.Module:
    """The GPT of all texts."""
    return _drawn(GPT(CHARACTERS, CONTEXT), generator)


def gpt_task(data: str, name: str, synthetic: bool, build: Callable[[torch.Generator], nn.Module] = gpt) -> RealTask:
    return _text(data, name, synthetic, CONTEXT, build, batch_size=32)


def _fine_tuned(name: str, synthetic: bool) -> Task:
    """The King James Bible from weights that know Shakespeare: all seeds begin there and see other batches."""

    def build(generator: torch.Generator) -> nn.Module:
        model = gpt(generator_of("before fine-tuning"))
        if not synthetic:
            model.load_state_dict({key: weight.float() for key, weight in load("shakespeare_gpt").items()})
        return model

    return gpt_task("kjv", name, synthetic, build)


def _text_gru(name: str, synthetic: bool) -> Task:
    def build(generator: torch.Generator) -> nn.Module:
        return _drawn(TextGRU(CHARACTERS), generator)

    return _text("shakespeare", name, synthetic, GRU_STEPS, build, batch_size=64)


def _text(
    data: str, name: str, synthetic: bool, length: int, build: Callable[[torch.Generator], nn.Module], batch_size: int
) -> RealTask:
    found = load_or_stand_in(data, synthetic)
    validation = held_out(Windows(found["test_text"], length).all(), 512, 128)
    return RealTask(name, Windows(found["train_text"], length), validation, build, _next_loss, batch_size)


def _bach(name: str, synthetic: bool) -> Task:
    found = load_or_stand_in("bach", synthetic)
    return RealTask(
        name,
        Chords(Windows(found["train_notes"], CHORD_STEPS)),
        held_out(Windows(found["test_notes"], CHORD_STEPS).all(), 512, 256),
        lambda generator: _drawn(ChordGRU(NOTES), generator),
        _next_loss,
        batch_size=64,
    )


def _adult(name: str, synthetic: bool) -> Task:
    found = load_or_stand_in("adult", synthetic)
    train, test = _rows(found, "categories", "numbers", "labels")
    numbers = train.tables[1].shape[1]
    return RealTask(
        name,
        train,
        held_out(test, 2048, 1024),
        lambda generator: _drawn(WideDeep(ADULT_CATEGORIES, numbers, CROSSINGS), generator),
        _income_loss,
        batch_size=128,
    )


def _movielens(name: str, synthetic: bool) -> Task:
    """Few factors and three epochs: more of either, and validation rather measures who stops first."""
    found = load_or_stand_in("movielens", synthetic)
    train, test = _rows(found, "users", "items", "ratings")
    mean = float(train.tables[2].float().mean())
    return RealTask(
        name,
        train,
        held_out(test, 2048, 1024),
        lambda generator: _drawn(Factors(USERS, ITEMS, mean), generator, table=0.1),
        _rating_loss,
        batch_size=64,
    )


def _cmudict(name: str, synthetic: bool) -> Task:
    found = load_or_stand_in("cmudict", synthetic)
    train, test = _rows(found, "letters", "phonemes")
    return RealTask(
        name,
        train,
        held_out(test, 1024, 512),
        lambda generator: _drawn(Seq2Seq(LETTERS, PHONEMES), generator),
        _spoken_loss,
        batch_size=64,
    )


def _rows(found: dict[str, Tensor], *keys: str) -> tuple[Rows, Rows]:
    """Training and held-out rows of some columns."""
    return Rows(tuple(found[f"train_{key}"] for key in keys)), Rows(tuple(found[f"test_{key}"] for key in keys))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("fashion-vit", "dev", "adamw", 1000, partial(_images, "fashion", ViT)),
        Workload("mnist-resnet-noisy", "dev", "nesterov", 600, partial(_images, "mnist", ResNet, wrong=WRONG_LABELS)),
        Workload("shakespeare-gpt", "dev", "adamw", 200, partial(gpt_task, "shakespeare")),
        Workload("shakespeare-gru", "dev", "lion", 800, _text_gru),
        Workload("adult-widedeep", "dev", "adagrad", 500, _adult),
        Workload("movielens-factors", "dev", "adamw", 5000, _movielens),
        Workload("mnist-cnn", "seen", "adamw", 200, partial(_images, "mnist", CNN)),
        Workload("fashion-resnet", "seen", "nesterov", 1500, partial(_images, "fashion", ResNet)),
        Workload("kjv-gpt", "seen", "muon", 1000, partial(gpt_task, "kjv")),
        Workload("kjv-finetune", "seen", "lion", 400, _fine_tuned),
        Workload("cmudict-seq2seq", "seen", "adafactor", 1500, _cmudict),
        Workload("bach-gru", "seen", "adamw", 5000, _bach),
    )
}
"""By name."""
