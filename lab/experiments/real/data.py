"""The prepared data sets, and synthetic stand-ins of the same keys, kinds and meaning where they are not there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from checkout import ROOT
from torch import Tensor

from lab.tasks.streams import generator_of

FOLDER = ROOT / ".bench-data"

CHARACTERS = 96
"""Of a text; see `prepare.tokens`."""
USERS, ITEMS = 943, 1682
NOTES = 64
"""Of a voice: 0 is silence."""
ADULT_CATEGORIES = (9, 16, 7, 15, 6, 5, 2, 42)
"""Work class, education, marital status, occupation, relationship, race, sex, country."""
DIAMOND_CATEGORIES = (5, 7, 8)
"""Cut, colour, clarity."""
COUNTRIES, WORDS = 24, 2000
ATOM_KINDS, BOND_KINDS = 12, 5
"""Of molecules: 0 is padding, or no bond."""
CONCEPTS, RELATIONS = 135, 92
"""Of medicine; a relation and the one that turns it around are two."""
TISSUES, FRAMES, CODE_PARTS, BYTES = 4, 7, 7, 256
"""Kinds of a point in a brain, of a base in a genome, of a character in a program; of a byte in a text."""

_TRAIN, _TEST = 512, 128
"""Rows of a stand-in."""
_CHARACTERS_TRAIN, _CHARACTERS_TEST = 16_384, 8192
_PARTS = (("train", slice(8)), ("test", slice(8, None)))
"""Of ten long rows."""

Data = dict[str, Tensor]


class MissingDataError(FileNotFoundError):
    """The data have not been fetched."""


def load_or_stand_in(name: str, synthetic: bool) -> Data:
    return stand_in(name) if synthetic else load(name)


@cache
def load(name: str) -> Data:
    """A data set of `.bench-data/`, read once a process."""
    path = FOLDER / f"{name}.npz"
    if not path.exists():
        raise MissingDataError(
            f"there is no data set {name} in {FOLDER.name}/; run `make bench-data` once, or take the stand-in"
        )
    with np.load(path, allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def stand_in(name: str) -> Data:
    """A small problem that can be learnt, the same every time."""
    return _STAND_INS[name](generator_of("stand-in", name))


def _images(generator: torch.Generator) -> Data:
    """Every class is a blob at its own place, under noise."""
    centres = torch.randint(6, 22, (10, 2), generator=generator)
    grid = torch.arange(28)
    rows, columns = (grid - centres[:, :1]) ** 2, (grid - centres[:, 1:]) ** 2
    blobs = torch.exp(-(rows[:, :, None] + columns[:, None, :]) / 20.0)
    labels = torch.randint(10, (_TRAIN + _TEST,), generator=generator)
    noise = torch.rand(len(labels), 28, 28, generator=generator)
    images = (255 * (0.7 * blobs[labels] + 0.3 * noise)).to(torch.uint8)
    return _split({"images": images, "labels": labels.to(torch.uint8)})


def _movielens(generator: torch.Generator) -> Data:
    """Ratings of hidden tastes, four numbers each."""
    count = _TRAIN + _TEST
    users = torch.randint(USERS, (count,), generator=generator)
    items = torch.randint(ITEMS, (count,), generator=generator)
    tastes, kinds = (torch.randn(n, 4, generator=generator) for n in (USERS, ITEMS))
    ratings = (3.5 + (tastes[users] * kinds[items]).sum(1) / 2).round().clamp(1, 5)
    return _split({"users": users.short(), "items": items.short(), "ratings": ratings.to(torch.uint8)})


def _adult(generator: torch.Generator) -> Data:
    """A label that depends on the second category and the first number, with noise."""
    count = _TRAIN + _TEST
    columns = [torch.randint(size, (count,), generator=generator) for size in ADULT_CATEGORIES]
    numbers = torch.randn(count, 5, generator=generator)
    score = columns[1] / 8 - 1 + numbers[:, 0] + 0.5 * torch.randn(count, generator=generator)
    categories = torch.stack(columns, 1).to(torch.uint8)
    return _split({"categories": categories, "numbers": numbers, "labels": (score > 0.5).to(torch.uint8)})


def _text(generator: torch.Generator) -> Data:
    chain = _chain(CHARACTERS, generator).to(torch.uint8)
    return {"train_text": chain[:_CHARACTERS_TRAIN], "test_text": chain[_CHARACTERS_TRAIN:]}


def _words(generator: torch.Generator) -> Data:
    chain = _chain(WORDS, generator).short()
    return {"train_words": chain[:_CHARACTERS_TRAIN], "test_words": chain[_CHARACTERS_TRAIN:]}


def _films(generator: torch.Generator) -> Data:
    chain = _chain(ITEMS + 1, generator).short()
    return {"train_films": chain[:_CHARACTERS_TRAIN], "test_films": chain[_CHARACTERS_TRAIN:]}


def _chain(symbols: int, generator: torch.Generator) -> Tensor:
    """A Markov chain: every symbol has four followers."""
    followers = torch.randint(symbols, (symbols, 4), generator=generator).tolist()
    choices = torch.randint(4, (_CHARACTERS_TRAIN + _CHARACTERS_TEST,), generator=generator).tolist()
    text = [0]
    for choice in choices[1:]:
        text.append(followers[text[-1]][choice])
    return torch.tensor(text)


def _photos(generator: torch.Generator) -> Data:
    """Waves of some direction, length and brightness."""
    angle, phase, length = torch.rand(3, _TRAIN + _TEST, 1, 1, generator=generator)
    rows, columns = torch.arange(16.0)[:, None], torch.arange(16.0)
    way = torch.cos(7 * angle) * rows + torch.sin(7 * angle) * columns
    waves = torch.sin(way / (2 + 4 * length) + 7 * phase)
    return _split({"patches": (255 * (0.5 + 0.4 * waves)).to(torch.uint8)})


def _diamonds(generator: torch.Generator) -> Data:
    """A price that depends on a category and two numbers, with a little noise."""
    count = _TRAIN + _TEST
    columns = [torch.randint(size, (count,), generator=generator) for size in DIAMOND_CATEGORIES]
    numbers = torch.randn(count, 6, generator=generator)
    prices = columns[2] / 4 - 1 + torch.tanh(numbers[:, 0]) * numbers[:, 1]
    prices = prices + 0.1 * torch.randn(count, generator=generator)
    return _split({"categories": torch.stack(columns, 1).to(torch.uint8), "numbers": numbers, "prices": prices})


def _cities(generator: torch.Generator) -> Data:
    """Names of 3 to 16 letters, of which every country has four of its own."""
    count = _TRAIN + _TEST
    own = torch.randint(1, 28, (COUNTRIES, 4), generator=generator)
    countries = torch.randint(COUNTRIES, (count,), generator=generator)
    picked = torch.randint(4, (count, 16), generator=generator)
    lengths = torch.randint(3, 17, (count, 1), generator=generator)
    letters = own[countries[:, None], picked] * (torch.arange(16) < lengths)
    return _split({"letters": letters.to(torch.uint8), "countries": countries.to(torch.uint8)})


def _weather(generator: torch.Generator) -> Data:
    """Six numbers between 0 and 1, of which two follow from others."""
    hours = 0.5 + 0.1 * torch.randn(_TRAIN + _TEST, 6, generator=generator)
    hours[:, 1] = hours[:, 0] ** 2 + 0.1 * hours[:, 1]
    hours[:, 2] = hours[:, 0] * hours[:, 3] + 0.1 * hours[:, 2]
    return _split({"hours": hours.clamp(0, 1)})


def _cmudict(generator: torch.Generator) -> Data:
    """Words of 3 to 11 letters, each letter spoken by a sound of its own."""
    count = _TRAIN + _TEST
    lengths = torch.randint(3, 12, (count, 1), generator=generator)
    letters = torch.randint(1, 28, (count, 12), generator=generator)
    sounds = torch.randperm(39, generator=generator)[:28] + 1
    place = torch.arange(12)
    letters = letters * (place < lengths)
    phonemes = sounds[letters] * (place < lengths) + 40 * (place == lengths)
    return _split({"letters": letters.to(torch.uint8), "phonemes": phonemes.to(torch.uint8)})


def _bach(generator: torch.Generator) -> Data:
    """Four voices that climb a scale, each from its own note, and now and then begin again."""
    count = 8 * (_TRAIN + _TEST)
    height = (torch.arange(count) + torch.randint(2, (count,), generator=generator)) // 2 % 8
    notes = height[:, None] + torch.tensor([36, 28, 22, 14])
    return {"train_notes": notes[: 8 * _TRAIN].to(torch.uint8), "test_notes": notes[8 * _TRAIN :].to(torch.uint8)}


def _molecules(generator: torch.Generator) -> Data:
    """Chains in which carbon takes turns with another kind, single bonds with double ones."""
    count = _TRAIN + _TEST
    other = torch.randint(2, ATOM_KINDS, (count, 1), generator=generator)
    place = torch.arange(26)
    there = place < torch.randint(8, 27, (count, 1), generator=generator)
    atoms = torch.where(place % 2 == 0, 1, other) * there
    bonds = torch.zeros(count, 26, 26, dtype=torch.long)
    bonds[:, place[:-1], place[1:]] = bonds[:, place[1:], place[:-1]] = 1 + place[:-1] % 2
    bonds = bonds * there[:, :, None] * there[:, None, :]
    return _split({"atoms": atoms.to(torch.uint8), "bonds": bonds.to(torch.uint8)})


def _concepts(generator: torch.Generator) -> Data:
    """A relation leads so many concepts further."""
    count = _TRAIN + _TEST
    subject = torch.randint(CONCEPTS, (count,), generator=generator)
    relation = torch.randint(RELATIONS, (count,), generator=generator)
    statements = torch.stack([subject, relation, (subject + relation) % CONCEPTS], 1)
    return _split({"statements": statements.to(torch.uint8)})


def _patients(generator: torch.Generator) -> Data:
    """The first number shortens lives; some are seen no longer before they end."""
    count = _TRAIN + _TEST
    numbers = torch.randn(count, 7, generator=generator)
    lives, seen = -torch.rand(2, count, generator=generator).clamp(min=1e-6).log() * 10
    lives = lives * torch.exp(-numbers[:, 0])
    deaths = (lives < seen).to(torch.uint8)
    return _split({"numbers": numbers, "years": torch.minimum(lives, seen), "deaths": deaths})


def _brain(generator: torch.Generator) -> Data:
    """Rings of tissue around a middle, each of its own brightness, under noise."""
    rows, columns = (torch.arange(size) - size / 2 for size in (197, 233))
    far = (rows[:, None].square() + columns.square()).sqrt()
    widths = 60 + 20 * torch.rand(10, 1, 1, generator=generator)
    tissue = (3 - (4 * far / widths).floor()).clamp(0, 3)
    slices = 60 * tissue + 30 * torch.rand(tissue.shape, generator=generator)
    both = {"slices": slices.to(torch.uint8), "tissue": tissue.to(torch.uint8)}
    return {f"{part}_{key}": t[place] for key, t in both.items() for part, place in _PARTS}


def _appliances(generator: torch.Generator) -> Data:
    """Waves of some length."""
    length, phase = torch.rand(2, 10, 1, generator=generator)
    power = torch.sin(torch.arange(1460) / (2 + 10 * length) + 7 * phase)
    return {f"{part}_power": power[place] for part, place in _PARTS}


def _genes(generator: torch.Generator) -> Data:
    """Of every three bases the first is the same, where something is read."""
    bases = torch.randint(4, (10, 4096), generator=generator)
    place = torch.arange(4096)
    frames = torch.where(place // 512 % 2 == 0, 0, 1 + place % 3).expand(10, -1)
    both = {"bases": torch.where(frames == 1, 2, bases).to(torch.uint8), "frames": frames.to(torch.uint8)}
    return {f"{part}_{key}": t[place] for key, t in both.items() for part, place in _PARTS}


def _locales(generator: torch.Generator) -> Data:
    chain = _chain(BYTES, generator).to(torch.uint8)
    return {"train_bytes": chain[:_CHARACTERS_TRAIN], "test_bytes": chain[_CHARACTERS_TRAIN:]}


def _code(generator: torch.Generator) -> Data:
    """A part is known from a character and the one before it."""
    text = _chain(CHARACTERS, generator)
    parts = (text + text.roll(1)) % CODE_PARTS
    cut = {"train": slice(_CHARACTERS_TRAIN), "test": slice(_CHARACTERS_TRAIN, None)}
    both = {"text": text.to(torch.uint8), "parts": parts.to(torch.uint8)}
    return {f"{part}_{key}": t[place] for key, t in both.items() for part, place in cut.items()}


def _split(rows: Data) -> Data:
    train = {f"train_{key}": values[:_TRAIN] for key, values in rows.items()}
    return train | {f"test_{key}": values[_TRAIN:] for key, values in rows.items()}


_STAND_INS: dict[str, Callable[[torch.Generator], Data]] = {
    "mnist": _images,
    "fashion": _images,
    "movielens": _movielens,
    "films": _films,
    "adult": _adult,
    "shakespeare": _text,
    "kjv": _text,
    "cmudict": _cmudict,
    "bach": _bach,
    "tunes": _text,
    "words": _words,
    "photos": _photos,
    "diamonds": _diamonds,
    "cities": _cities,
    "weather": _weather,
    "molecules": _molecules,
    "concepts": _concepts,
    "patients": _patients,
    "brain": _brain,
    "appliances": _appliances,
    "genes": _genes,
    "locales": _locales,
    "code": _code,
}
