"""Sequences: what comes next, what is hidden, what is nearby, how a word is spoken, where a name is from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus

from lab.tasks.streams import generator_of
from lab.tasks.task import Batch
from real.data import BYTES, CHARACTERS, CODE_PARTS, COUNTRIES, ITEMS, NOTES, WORDS, load, load_or_stand_in
from real.models.convolutions import CausalText, NameCNN
from real.models.llama import Llama
from real.models.perceptrons import Experts
from real.models.recurrent import ChordGRU, LinearText, TextGRU
from real.models.tables import SkipGram
from real.models.transformers import GPT, ChordTransformer, Encoder, NextThing, Seq2Seq, adapted
from real.models.weights import drawn, draws
from real.pools import Chords, Masked, Rows, Sampled, Skips, Stretches, Windows
from real.task import RealTask

CONTEXT = 48
"""Characters that the GPT sees."""
GRU_STEPS, CHORD_STEPS, EXPERT_CONTEXT = 32, 16, 16
LONG_CONTEXT, LONG_CHORDS, FILMS = 64, 32, 32
"""Characters, moments of music and films that the larger models see."""
OTHERS = 127
"""Films that the right one is compared with."""
UNEVEN = 0.01
"""The weight of the load's unevenness."""
A, Z = 66, 91
"""Small letters, as `prepare.tokens` numbers them; capitals are 32 below."""
PHONEMES, LETTERS = 41, 28
HIDDEN = CHARACTERS
"""The character that stands for one that is hidden."""
LOCALE_BYTES, CODE_ROW = 64, 8192

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


def causal(name: str, synthetic: bool) -> RealTask:
    """Irish tunes; the gradients are clipped."""
    return _text(
        load_or_stand_in("tunes", synthetic),
        name,
        CONTEXT,
        draws(lambda: CausalText(CHARACTERS), table=0.3),
        batch_size=32,
        clip=1.0,
    )


def linear(name: str, synthetic: bool) -> RealTask:
    found = load_or_stand_in("shakespeare", synthetic)
    return _text(found, name, LONG_CONTEXT, draws(lambda: LinearText(CHARACTERS), table=0.3), batch_size=32)


def hidden_verse(name: str, synthetic: bool) -> RealTask:
    """Which characters of the King James Bible are hidden?"""
    found = load_or_stand_in("kjv", synthetic)
    train, test = (Masked(Windows(found[f"{part}_text"], LONG_CONTEXT - 1)) for part in ("train", "test"))
    build = draws(lambda: Encoder(CHARACTERS + 1, LONG_CONTEXT, width=96, depth=3, heads=4))
    return RealTask(name, train, test, (512, 128), build, _hidden_loss, 32)


def experts(name: str, synthetic: bool) -> RealTask:
    found = load_or_stand_in("kjv", synthetic)
    return RealTask(
        name,
        Windows(found["train_text"], EXPERT_CONTEXT),
        Windows(found["test_text"], EXPERT_CONTEXT).all(),
        (4096, 1024),
        draws(lambda: Experts(CHARACTERS, EXPERT_CONTEXT), table=0.3),
        _expert_loss,
        128,
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
        Skips.of(found["test_words"], WORDS),
        (8192, 4096),
        draws(lambda: SkipGram(WORDS), table=0.1),
        nearby_loss,
        256,
    )


def nearby_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The first of the others was nearby, the rest were not."""
    middle, others = (part.long() for part in batch)
    fits = model(middle, others)
    return softplus(-fits[:, 0]).mean() + softplus(fits[:, 1:]).sum(-1).mean()


def cities(name: str, synthetic: bool) -> RealTask:
    """In which country is it?"""
    train, test = Rows.of(load_or_stand_in("cities", synthetic), "letters", "countries")
    return RealTask(
        name, train, test, (4096, 1024), draws(lambda: NameCNN(LETTERS, COUNTRIES), table=0.3), _country_loss, 128
    )


def _country_loss(model: nn.Module, batch: Batch) -> Tensor:
    letters, countries = (part.long() for part in batch)
    return cross_entropy(model(letters), countries)


def text_gru(name: str, synthetic: bool) -> RealTask:
    return _text(
        load_or_stand_in("shakespeare", synthetic),
        name,
        GRU_STEPS,
        draws(lambda: TextGRU(CHARACTERS)),
        batch_size=64,
    )


def _text(
    found: Mapping[str, Tensor], name: str, length: int, build: Build, batch_size: int, clip: float | None = None
) -> RealTask:
    train, test = Windows(found["train_text"], length), Windows(found["test_text"], length).all()
    return RealTask(name, train, test, (512, 128), build, next_loss, batch_size, clip)


def bach(name: str, synthetic: bool) -> RealTask:
    return _chorales(name, synthetic, CHORD_STEPS, draws(lambda: ChordGRU(NOTES)), (512, 256), batch_size=64)


def bach_transformer(name: str, synthetic: bool) -> RealTask:
    build = draws(lambda: ChordTransformer(NOTES, LONG_CHORDS))
    return _chorales(name, synthetic, LONG_CHORDS, build, (256, 128), batch_size=32)


def _chorales(
    name: str, synthetic: bool, length: int, build: Build, held_out: tuple[int, int], batch_size: int
) -> RealTask:
    found = load_or_stand_in("bach", synthetic)
    return RealTask(
        name,
        Chords(Windows(found["train_notes"], length)),
        Windows(found["test_notes"], length).all(),
        held_out,
        build,
        next_loss,
        batch_size,
    )


def next_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Every number of a window but the first is predicted from those before it."""
    window = batch[0].long()
    return cross_entropy(model(window[:, :-1]).flatten(0, -2), window[:, 1:].flatten())


def next_film(name: str, synthetic: bool) -> RealTask:
    """Which film does a user of MovieLens rate next? By a softmax over the right one and some that are drawn."""
    found = load_or_stand_in("films", synthetic)
    return RealTask(
        name,
        Sampled(Windows(found["train_films"], FILMS), ITEMS, OTHERS),
        Sampled(Windows(found["test_films"], FILMS).all(), ITEMS, OTHERS),
        (256, 128),
        draws(lambda: NextThing(ITEMS + 1, FILMS)),
        _film_loss,
        16,
    )


def _film_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean over the films. Where the next user begins nothing is asked; the right film is not among the others."""
    films, others = (part.long() for part in batch)
    following = films[:, 1:]
    right, drawn_ones = model(films[:, :-1], following, others)
    same = others[:, None] == following[..., None]
    scores = torch.cat([right[..., None], drawn_ones.masked_fill(same, -math.inf)], -1)
    asked = following > 0
    return ((scores.logsumexp(-1) - right) * asked).sum() / asked.sum().clamp(min=1)


def locales(name: str, synthetic: bool) -> RealTask:
    """Messages in a hundred languages, byte by byte, by a transformer of 51 million weights; its stand-in is small."""
    found = load_or_stand_in("locales", synthetic)
    size = {"width": 48, "depth": 2, "heads": 3, "hidden": 96} if synthetic else {}
    return RealTask(
        name,
        Windows(found["train_bytes"], LOCALE_BYTES),
        Windows(found["test_bytes"], LOCALE_BYTES).all(),
        (128, 64),
        lambda generator: Llama(BYTES, **size).drawn(generator),
        next_loss,
        16,
        clip=1.0,
    )


# Programs as text ----------------------------------------------------------------------------------------------------


def hidden_code(name: str, synthetic: bool) -> RealTask:
    """Which characters of a program are hidden? It trains the encoder that `tagged_code` begins with."""
    found = load_or_stand_in("code", synthetic)
    train, test = (Masked(_code(found, part, "text")) for part in ("train", "test"))
    return RealTask(name, train, test, (512, 128), _new_encoder, _hidden_loss, 32)


def _code(found: Mapping[str, Tensor], part: str, *keys: str) -> Stretches:
    return Stretches(tuple(found[f"{part}_{key}"].unflatten(0, (-1, CODE_ROW)) for key in keys), CONTEXT)


def _new_encoder(generator: torch.Generator) -> nn.Module:
    return drawn(Encoder(CHARACTERS + 1, CONTEXT, width=64, depth=3, heads=4), generator)


def _hidden_loss(model: nn.Module, batch: Batch) -> Tensor:
    text, hidden = batch[0].long(), batch[1]
    losses = cross_entropy(model(text.masked_fill(hidden, HIDDEN)).mT, text, reduction="none")
    return (losses * hidden).sum() / hidden.sum().clamp(min=1)


def tagged_code(name: str, synthetic: bool) -> RealTask:
    """Comment, string, keyword, name? By low-rank adapters on the encoder, and a new head."""
    found = load_or_stand_in("code", synthetic)
    train, test = (_code(found, part, "text", "parts") for part in ("train", "test"))

    def build(generator: torch.Generator) -> nn.Module:
        model = _new_encoder(generator_of("before fine-tuning"))
        if not synthetic:
            model.load_state_dict({key: weight.float() for key, weight in load("code_encoder").items()})
        model = adapted(model, generator)
        head = nn.Linear(model.head.in_features, CODE_PARTS)  # type: ignore[arg-type, union-attr]
        model.head = drawn(nn.ModuleDict({"head": head}), generator).get_submodule("head")
        return model

    return RealTask(name, train, test, (1024, 256), build, tag_loss, 32)


def tag_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Of the class of every place."""
    text, classes = (part.long() for part in batch)
    return cross_entropy(model(text).flatten(0, 1), classes.flatten())


def cmudict(name: str, synthetic: bool) -> RealTask:
    train, test = Rows.of(load_or_stand_in("cmudict", synthetic), "letters", "phonemes")
    return RealTask(name, train, test, (1024, 512), draws(lambda: Seq2Seq(LETTERS, PHONEMES)), _spoken_loss, 64)


def _spoken_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean over the phonemes; padding does not count."""
    letters, phonemes = (part.long() for part in batch)
    logits = model(letters, phonemes).flatten(0, 1)
    return cross_entropy(logits, phonemes.flatten(), ignore_index=0)
