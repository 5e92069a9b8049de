"""From the files of a package to the arrays of a data set. Nothing of a package is run."""

from __future__ import annotations

import csv
import gzip
import io
import json
import pickle
import re
import tarfile
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[np.generic]]
Files = dict[str, bytes]

FASHION_TRAIN, FASHION_TEST = 30_000, 4096
"""Half of what the package has: all data sets together stay below 45 MB. MNIST is whole."""
HELD_OUT = 4096
"""Rows of a table that are kept for validation."""
BLOCK, HELD_OUT_BLOCK = 8192, 20
"""Of a text every twentieth block of 8192 characters or words is held out: its end may be unlike the rest."""
LETTERS, PHONEMES = 12, 11
"""Longer words are left out."""
END = 40
"""Of a pronunciation; 0 is padding, 1 to 39 are the phonemes."""
VOICES = ("Soprano", "Alto", "Tenor", "Bass")
PATCH, STRIDE = 16, 4
"""Of photographs at half their size; the right fifth of each is held out."""
VOCABULARY = 2000
"""The most frequent words; others are left out."""
FASTEST_WIND = 100.0
"""In miles an hour; one hour of the table has a thousand."""
COUNTRIES, NAME = 24, 16
"""Those with the most cities; longer names are left out."""
LOWEST_PITCH = 30
"""MIDI number of what would be note 0, which stands for silence: every chorale, transposed, lies above."""


def mnist(files: Files) -> Arrays:
    rows = [np.loadtxt(io.BytesIO(files[name]), np.uint8, delimiter=",", skiprows=1) for name in sorted(files)]
    test, train = rows  # by name
    return _images(train[:, 1:], train[:, 0], test[:, 1:], test[:, 0])


def fashion(files: Files) -> Arrays:
    """The package has the training images only, in thousandths: the last of them become the test."""
    (packed,) = files.values()
    found = NumpyUnpickler(io.BytesIO(gzip.decompress(packed))).load()
    images, labels = np.rint(found["train_X"] * 1000).astype(np.uint8), found["train_Y(num)"].astype(np.uint8)
    train, test = slice(FASHION_TRAIN), slice(-FASHION_TEST, None)
    return _images(images[train], labels[train], images[test], labels[test])


class NumpyUnpickler(pickle.Unpickler):
    """Reads pickled arrays of numbers and refuses whatever else a pickle could call."""

    _ALLOWED = frozenset({("multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")})

    def find_class(self, module: str, name: str) -> object:
        owner = "multiarray" if module in ("numpy.core.multiarray", "numpy._core.multiarray") else module
        if (owner, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"only arrays may be unpickled, but the file asks for {module}.{name}")
        where = "numpy._core.multiarray" if owner == "multiarray" else module
        return super().find_class(where, name)


def _images(train: NDArray, train_labels: NDArray, test: NDArray, test_labels: NDArray) -> Arrays:
    return {
        "train_images": train.reshape(-1, 28, 28),
        "train_labels": train_labels,
        "test_images": test.reshape(-1, 28, 28),
        "test_labels": test_labels,
    }


def movielens(files: Files) -> Arrays:
    """Users and items from 0 on; some of the ratings, drawn at random, are held out."""
    (table,) = files.values()
    users, items, ratings = np.loadtxt(io.BytesIO(table), np.int64, skiprows=1, usecols=(0, 1, 2)).T
    rows = {"users": (users - 1).astype(np.int16), "items": (items - 1).astype(np.int16)}
    return split({**rows, "ratings": ratings.astype(np.uint8)})


def films(files: Files) -> Arrays:
    """What one user after the other has rated, from 1 on and in the order of time; every tenth user is held out.

    Before each user stands a 0.
    """
    (table,) = files.values()
    users, items, times = np.loadtxt(io.BytesIO(table), np.int64, skiprows=1, usecols=(0, 1, 3)).T
    order = np.lexsort((times, users))
    ends = np.flatnonzero(np.diff(users[order])) + 1
    seen = [np.concatenate([[0], own]).astype(np.int16) for own in np.split(items[order], ends)]
    train = [own for k, own in enumerate(seen) if k % 10 != 9]
    return {"train_films": np.concatenate(train), "test_films": np.concatenate(seen[9::10])}


def adult(files: Files) -> Arrays:
    """Eight categories, numbered, and five numbers, standardised; does someone earn more than 50 000 dollars?"""
    lines = b"\n".join(files.values()).decode().splitlines()
    table = np.array([row for row in (re.split(r",\s*", line.strip(" .")) for line in lines) if len(row) == 15])
    categories = [np.unique(table[:, k], return_inverse=True)[1] for k in (1, 3, 5, 6, 7, 8, 9, 13)]
    age, education, gain, loss, hours = (table[:, k].astype(np.float64) for k in (0, 4, 10, 11, 12))
    numbers = standardised([age, education, np.log1p(gain), np.log1p(loss), hours])
    return split(
        {
            "categories": np.stack(categories, 1).astype(np.uint8),
            "numbers": numbers.astype(np.float32),
            "labels": (table[:, 14] == ">50K").astype(np.uint8),
        }
    )


def diamonds(files: Files) -> Arrays:
    """Cut, colour and clarity, numbered; six numbers and the logarithm of the price, standardised."""
    (resources,) = files.values()
    with tarfile.open(fileobj=io.BytesIO(resources)) as archive:
        found = archive.extractfile("resources/rdata/csv/ggplot2/diamonds.csv")
        table = _table(found.read() if found is not None else b"")
    categories = [np.unique(table[name], return_inverse=True)[1] for name in ("cut", "color", "clarity")]
    numbers = standardised([table[name].astype(np.float64) for name in ("carat", "depth", "table", "x", "y", "z")])
    return split(
        {
            "categories": np.stack(categories, 1).astype(np.uint8),
            "numbers": numbers.astype(np.float32),
            "prices": standardised([np.log(table["price"].astype(np.float64))])[:, 0].astype(np.float32),
        }
    )


def weather(files: Files) -> Arrays:
    """Hours of which all six numbers are known: warmth, dew point, humidity, wind along two axes, pressure; 0 to 1."""
    (content,) = files.values()
    table = _table(content)
    names = ("temp", "dewp", "humid", "wind_dir", "wind_speed", "pressure")
    known = np.all([table[name] != "NA" for name in names], axis=0)
    known[known] = table["wind_speed"][known].astype(np.float64) < FASTEST_WIND
    warmth, dew, humidity, direction, speed, pressure = (table[name][known].astype(np.float64) for name in names)
    angle = np.deg2rad(direction)
    columns = np.stack([warmth, dew, humidity, speed * np.sin(angle), speed * np.cos(angle), pressure], 1)
    low, high = columns.min(0), columns.max(0)
    return split({"hours": ((columns - low) / (high - low)).astype(np.float32)})


def _table(content: bytes) -> dict[str, NDArray[np.str_]]:
    """The columns of a CSV file, as words."""
    head, *rows = csv.reader(io.StringIO(content.decode()))
    return dict(zip(head, np.array(rows).T, strict=True))


def standardised(columns: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    numbers = np.stack(columns, 1)
    scaled: NDArray[np.float64] = (numbers - numbers.mean(0)) / numbers.std(0)
    return scaled


def cities(files: Files) -> Arrays:
    """Names in Latin letters without accents, padded with 0, and the number of the country; 27 stands for any gap."""
    (content,) = files.values()
    rows = json.loads(content)
    often = Counter(row["countrycode"] for row in rows.values()).most_common(COUNTRIES)
    number = {country: place for place, country in enumerate(sorted(country for country, _ in often))}
    named = {(_letters(row["name"]), row["countrycode"]) for row in rows.values()}
    fit = sorted((name, number[code]) for name, code in named if code in number and 2 <= len(name) <= NAME)
    letters = np.zeros((len(fit), NAME), np.uint8)
    for row, (name, _) in enumerate(fit):
        letters[row, : len(name)] = [27 if letter == " " else ord(letter) - 96 for letter in name]
    return split({"letters": letters, "countries": np.array([country for _, country in fit], np.uint8)})


def _letters(name: str) -> str:
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z]+", " ", plain).strip()


def photos(files: Files) -> Arrays:
    """Grey patches of photographs at half their size."""
    from PIL import Image

    train, test = [], []
    for content in files.values():
        whole = np.asarray(Image.open(io.BytesIO(content)).convert("L"), np.float64)
        height, width = (side // 2 for side in whole.shape)
        half = whole[: 2 * height, : 2 * width].reshape(height, 2, width, 2).mean((1, 3))
        grey = np.rint(half).astype(np.uint8)
        border = width * 4 // 5
        train.append(_patches(grey[:, :border]))
        test.append(_patches(grey[:, border:]))
    return {"train_patches": np.concatenate(train), "test_patches": np.concatenate(test)}


def _patches(grey: NDArray[np.uint8]) -> NDArray[np.uint8]:
    windows = np.lib.stride_tricks.sliding_window_view(grey, (PATCH, PATCH))[::STRIDE, ::STRIDE]
    return windows.reshape(-1, PATCH, PATCH)


def split(rows: Arrays, held_out: int | None = None) -> Arrays:
    """Rows in a random order; the first are held out."""
    held_out = HELD_OUT if held_out is None else held_out
    order = np.random.default_rng(0).permutation(len(next(iter(rows.values()))))
    train = {f"train_{name}": values[order[held_out:]] for name, values in rows.items()}
    return train | {f"test_{name}": values[order[:held_out]] for name, values in rows.items()}


def shakespeare(files: Files) -> Arrays:
    return _text(b"\n\n".join(files.values()))


def kjv(files: Files) -> Arrays:
    return _text(bible(files))


def bible(files: Files) -> bytes:
    """The text is one literal in a module, which is read and not imported."""
    (module,) = files.values()
    found = re.search(rb'"""(.*?)"""', module, re.DOTALL)
    if found is None:
        raise ValueError("the module has no text in triple quotes")
    return found[1]


def words(files: Files) -> Arrays:
    """Numbers of the most frequent words, in the order of the text; of its blocks every twentieth is held out."""
    text = re.findall(r"[a-z]+", bible(files).decode(errors="ignore").lower())
    number = {word: place for place, (word, _) in enumerate(Counter(text).most_common(VOCABULARY))}
    train, test = blocks_of(np.array([number[word] for word in text if word in number], np.int16))
    return {"train_words": train, "test_words": test}


def tunes(files: Files) -> Arrays:
    """Title, metre, key and notes of each, in the letters of the ABC notation."""
    lines = b"\n".join(files.values()).splitlines()
    return _text(b"\n".join(line for line in lines if not re.match(rb"[A-JN-SU-Z]:|%", line)))


def _text(text: bytes) -> Arrays:
    train, test = blocks_of(tokens(text))
    return {"train_text": train, "test_text": test}


def blocks_of(numbers: NDArray[np.generic]) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """A sequence without every twentieth block, and these blocks."""
    blocks = numbers[: len(numbers) // BLOCK * BLOCK].reshape(-1, BLOCK)
    held_out = np.arange(len(blocks)) % HELD_OUT_BLOCK == HELD_OUT_BLOCK - 1
    return blocks[~held_out].flatten(), blocks[held_out].flatten()


def tokens(text: bytes) -> NDArray[np.uint8]:
    """Characters as numbers below 96: the end of a line is 0, a space 1; what is not ASCII is left out.

    >>> tokens(b"a b").tolist()
    [66, 1, 67]
    """
    values = np.frombuffer(text.replace(b"\r", b""), np.uint8)
    values = np.where(values == ord("\n"), 31, values)
    return (values[(values >= 31) & (values < 127)] - 31).astype(np.uint8)


def cmudict(files: Files) -> Arrays:
    """Spelling and pronunciation, padded with 0; the stress of vowels is left out."""
    (table,) = files.values()
    lines = [line.split("#")[0].split() for line in table.decode().splitlines()]
    spoken = [(word, [re.sub(r"\d", "", phoneme) for phoneme in phonemes]) for word, *phonemes in lines]
    fit = [row for row in spoken if re.fullmatch(r"[a-z']{2,12}", row[0]) and len(row[1]) <= PHONEMES]
    number = {name: k + 1 for k, name in enumerate(sorted({name for _, phonemes in fit for name in phonemes}))}
    if len(number) != END - 1:
        raise ValueError(f"there must be {END - 1} phonemes, but the dictionary has {len(number)}")
    letters, phonemes = np.zeros((len(fit), LETTERS), np.uint8), np.zeros((len(fit), PHONEMES + 1), np.uint8)
    for row, (word, sounds) in enumerate(fit):
        letters[row, : len(word)] = [27 if letter == "'" else ord(letter) - 96 for letter in word]
        phonemes[row, : len(sounds) + 1] = [*(number[sound] for sound in sounds), END]
    return split({"letters": letters, "phonemes": phonemes})


def bach(files: Files) -> Arrays:
    """Chorales for four voices, one row per eighth note; every fifth chorale is held out."""
    found = [chorale for chorale in (voices(_score(content)) for content in files.values()) if chorale is not None]
    train = [chorale for k, chorale in enumerate(found) if k % 5 != 4]
    return {"train_notes": np.concatenate(train), "test_notes": np.concatenate(found[4::5])}


def _score(packed: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("xml") and not name.startswith("META-INF"))
        return archive.read(name)


def voices(score: bytes) -> NDArray[np.uint8] | None:
    """Notes [eighth, voice] of a MusicXML score; None if its parts are not the four voices."""
    if b"<!ENTITY" in score:
        raise ValueError("a score may not define entities")
    root = ElementTree.fromstring(score)
    names = {part.get("id"): (part.findtext("part-name") or "").strip(" .\n") for part in root.iter("score-part")}
    parts = {names[part.get("id")]: part for part in root.iter("part")}
    if any(voice not in parts for voice in VOICES):
        return None
    sung = [_sung(parts[voice]) for voice in VOICES]
    length = min(map(len, sung))
    return np.array([notes[:length] for notes in sung], np.uint8).T


def _sung(part: ElementTree.Element) -> list[int]:
    """The note that sounds at the beginning of every eighth of a part; of several at once, the one written first."""
    notes: dict[int, int] = {}
    now, eighth = 0.0, 1.0
    for element in part.iter():
        if element.tag == "divisions":
            eighth = float(element.text or 1) / 2
        if element.tag not in ("note", "backup", "forward") or element.find("chord") is not None:
            continue
        length = float(element.findtext("duration") or 0) / eighth  # a grace note has none
        end = now - length if element.tag == "backup" else now + length
        if element.tag == "note":
            for place in range(int(-(-now // 1)), int(-(-end // 1))):
                notes.setdefault(place, _note(element))
        now = end
    return [notes.get(place, 0) for place in range(max(notes, default=-1) + 1)]


def _note(element: ElementTree.Element) -> int:
    pitch = element.find("pitch")
    if pitch is None:
        return 0
    step = "C D EF G A B".index(pitch.findtext("step") or "")
    octave, alter = int(pitch.findtext("octave") or 0), int(float(pitch.findtext("alter") or 0))
    return 12 * (octave + 1) + step + alter - LOWEST_PITCH


PREPARE: dict[str, Callable[[Files], Arrays]] = {
    "mnist": mnist,
    "fashion": fashion,
    "movielens": movielens,
    "films": films,
    "adult": adult,
    "shakespeare": shakespeare,
    "kjv": kjv,
    "cmudict": cmudict,
    "bach": bach,
    "tunes": tunes,
    "words": words,
    "photos": photos,
    "diamonds": diamonds,
    "cities": cities,
    "weather": weather,
}
"""By the name of the data set."""
