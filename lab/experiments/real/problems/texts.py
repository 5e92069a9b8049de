"""Sequences: what comes next, what is nearby, how a word is spoken, where a name is from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus

from lab.tasks.streams import generator_of
from lab.tasks.task import Batch
from real.data import CHARACTERS, COUNTRIES, NOTES, WORDS, load, load_or_stand_in
from real.models.adapters import adapted
from real.models.convolutions import CausalText, NameCNN
from real.models.experts import Experts
from real.models.recurrent import ChordGRU, TextGRU, TextLSTM
from real.models.tables import SkipGram
from real.models.transformers import GPT, Seq2Seq
from real.models.weights import drawn
from real.pools import Chords, Rows, Skips, Windows, frozen, held_out
from real.task import RealTask

__all__ = [
    "adapters",
    "bach",
    "causal",
    "cities",
    "cmudict",
    "experts",
    "fine_tuned",
    "gpt",
    "next_loss",
    "text_gru",
    "text_lstm",
    "words",
]

CONTEXT = 48
"""Characters that the GPT sees."""
GRU_STEPS, CHORD_STEPS, EXPERT_CONTEXT = 32, 16, 16
UNEVEN = 0.01
"""The weight of the load's unevenness."""
A, Z = 66, 91
"""Small letters, as `prepare.tokens` numbers them; capitals are 32 below."""
PHONEMES, LETTERS = 41, 28

Build = Callable[[torch.Generator], nn.Module]


def gpt(data: str, name: str, synthetic: bool, build: Build | None = None, batch_size: int = 32) -> RealTask:
    """The GPT of all texts, or another model of as many characters."""
    return _text(load_or_stand_in(data, synthetic), name, CONTEXT, build or _new_gpt, batch_size)


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


def adapters(name: str, synthetic: bool) -> RealTask:
    """Shakespeare in capitals, by low-rank adapters on the model that knows him as he is."""
    found = load_or_stand_in("shakespeare", synthetic)
    capitals = {key: torch.where((text >= A) & (text <= Z), text - 32, text) for key, text in found.items()}
    return _text(capitals, name, CONTEXT, lambda generator: adapted(_trained_gpt(synthetic), generator), batch_size=32)


def text_lstm(name: str, synthetic: bool) -> RealTask:
    return _text(
        load_or_stand_in("shakespeare", synthetic),
        name,
        GRU_STEPS,
        lambda generator: drawn(TextLSTM(CHARACTERS), generator),
        batch_size=64,
    )


def causal(name: str, synthetic: bool) -> RealTask:
    """Irish tunes; the gradients are clipped."""
    return _text(
        load_or_stand_in("tunes", synthetic),
        name,
        CONTEXT,
        lambda generator: drawn(CausalText(CHARACTERS), generator, table=0.3),
        batch_size=32,
        clip=1.0,
    )


def experts(name: str, synthetic: bool) -> RealTask:
    found = load_or_stand_in("kjv", synthetic)
    return RealTask(
        name,
        Windows(found["train_text"], EXPERT_CONTEXT),
        held_out(Windows(found["test_text"], EXPERT_CONTEXT).all(), 4096, 1024),
        lambda generator: drawn(Experts(CHARACTERS, EXPERT_CONTEXT), generator, table=0.3),
        _expert_loss,
        batch_size=128,
    )


def _expert_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Of the last character of each window, and a little for an uneven load."""
    window = batch[0].long()
    logits, uneven = model(window[:, :-1])
    return cross_entropy(logits, window[:, -1]) + UNEVEN * uneven


def words(name: str, synthetic: bool) -> RealTask:
    found = load_or_stand_in("words", synthetic)
    return RealTask(
        name,
        Skips.of(found["train_words"], WORDS),
        held_out(frozen(Skips.of(found["test_words"], WORDS), name, 8192), 8192, 4096),
        lambda generator: drawn(SkipGram(WORDS), generator, table=0.1),
        _nearby_loss,
        batch_size=256,
    )


def _nearby_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The first of the others was nearby, the rest were not."""
    middle, others = (part.long() for part in batch)
    fits = model(middle, others)
    return softplus(-fits[:, 0]).mean() + softplus(fits[:, 1:]).sum(-1).mean()


def cities(name: str, synthetic: bool) -> RealTask:
    """In which country is it?"""
    train, test = Rows.of(load_or_stand_in("cities", synthetic), "letters", "countries")
    return RealTask(
        name,
        train,
        held_out(test, 4096, 1024),
        lambda generator: drawn(NameCNN(LETTERS, COUNTRIES), generator, table=0.3),
        _country_loss,
        batch_size=128,
    )


def _country_loss(model: nn.Module, batch: Batch) -> Tensor:
    letters, countries = (part.long() for part in batch)
    return cross_entropy(model(letters), countries)


def text_gru(name: str, synthetic: bool) -> RealTask:
    return _text(
        load_or_stand_in("shakespeare", synthetic),
        name,
        GRU_STEPS,
        lambda generator: drawn(TextGRU(CHARACTERS), generator),
        batch_size=64,
    )


def _text(
    found: Mapping[str, Tensor], name: str, length: int, build: Build, batch_size: int, clip: float | None = None
) -> RealTask:
    validation = held_out(Windows(found["test_text"], length).all(), 512, 128)
    return RealTask(name, Windows(found["train_text"], length), validation, build, next_loss, batch_size, clip)


def bach(name: str, synthetic: bool) -> RealTask:
    found = load_or_stand_in("bach", synthetic)
    return RealTask(
        name,
        Chords(Windows(found["train_notes"], CHORD_STEPS)),
        held_out(Windows(found["test_notes"], CHORD_STEPS).all(), 512, 256),
        lambda generator: drawn(ChordGRU(NOTES), generator),
        next_loss,
        batch_size=64,
    )


def next_loss(model: nn.Module, batch: Batch) -> Tensor:
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
