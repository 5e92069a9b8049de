"""Sequences: what comes next, and how a word is spoken."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hdet.tasks.streams import generator_of
from hdet.tasks.task import Batch
from real.data import CHARACTERS, NOTES, load, load_or_stand_in
from real.models.recurrent import ChordGRU, TextGRU
from real.models.transformers import GPT, Seq2Seq
from real.models.weights import drawn
from real.pools import Chords, Rows, Windows, held_out
from real.task import RealTask

__all__ = ["bach", "cmudict", "fine_tuned", "gpt", "text_gru"]

CONTEXT = 48
"""Characters that the GPT sees."""
GRU_STEPS, CHORD_STEPS = 32, 16
PHONEMES, LETTERS = 41, 28

Build = Callable[[torch.Generator], nn.Module]


def gpt(data: str, name: str, synthetic: bool, build: Build | None = None, batch_size: int = 32) -> RealTask:
    """The GPT of all texts, or another model of as many characters."""
    return _text(data, name, synthetic, CONTEXT, build or _new_gpt, batch_size)


def _new_gpt(generator: torch.Generator) -> nn.Module:
    return drawn(GPT(CHARACTERS, CONTEXT), generator)


def _trained_gpt(synthetic: bool) -> nn.Module:
    """The GPT that knows Shakespeare."""
    model = _new_gpt(generator_of("before fine-tuning"))
    if not synthetic:
        model.load_state_dict({key: weight.float() for key, weight in load("shakespeare_gpt").items()})
    return model


def fine_tuned(name: str, synthetic: bool) -> RealTask:
    """The King James Bible from weights that know Shakespeare: all seeds begin there and see other batches."""
    return gpt("kjv", name, synthetic, lambda generator: _trained_gpt(synthetic))


def text_gru(name: str, synthetic: bool) -> RealTask:
    return _text("shakespeare", name, synthetic, GRU_STEPS, lambda generator: drawn(TextGRU(CHARACTERS), generator), 64)


def _text(data: str, name: str, synthetic: bool, length: int, build: Build, batch_size: int) -> RealTask:
    found = load_or_stand_in(data, synthetic)
    validation = held_out(Windows(found["test_text"], length).all(), 512, 128)
    return RealTask(name, Windows(found["train_text"], length), validation, build, _next_loss, batch_size)


def bach(name: str, synthetic: bool) -> RealTask:
    found = load_or_stand_in("bach", synthetic)
    return RealTask(
        name,
        Chords(Windows(found["train_notes"], CHORD_STEPS)),
        held_out(Windows(found["test_notes"], CHORD_STEPS).all(), 512, 256),
        lambda generator: drawn(ChordGRU(NOTES), generator),
        _next_loss,
        batch_size=64,
    )


def _next_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Every number of a window but the first is predicted from those before it."""
    window = batch[0].long()
    return cross_entropy(model(window[:, :-1]).flatten(0, -2), window[:, 1:].flatten())


def cmudict(name: str, synthetic: bool) -> RealTask:
    train, test = Rows.of(load_or_stand_in("cmudict", synthetic), "letters", "phonemes")
    return RealTask(
        name,
        train,
        held_out(test, 1024, 512),
        lambda generator: drawn(Seq2Seq(LETTERS, PHONEMES), generator),
        _spoken_loss,
        batch_size=64,
    )


def _spoken_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean over the phonemes; padding does not count."""
    letters, phonemes = (part.long() for part in batch)
    logits = model(letters, phonemes).flatten(0, 1)
    return cross_entropy(logits, phonemes.flatten(), ignore_index=0)
