"""From the files of a package to the arrays of a data set. Nothing of a package is run."""

from __future__ import annotations

import gzip
import io
import pickle
import re
import zipfile
from collections.abc import Callable
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

__all__ = ["PREPARE", "NumpyUnpickler", "tokens", "voices"]

Arrays = dict[str, NDArray[np.generic]]
Files = dict[str, bytes]

FASHION_TRAIN, FASHION_TEST = 30_000, 4096
"""Half of what the package has: all data sets together stay below 45 MB. MNIST is whole."""
HELD_OUT = 4096
"""Rows of a table that are kept for validation."""
BLOCK, HELD_OUT_BLOCK = 8192, 20
"""Of a text every twentieth block of 8192 characters is held out: its end may be unlike the rest."""
LETTERS, PHONEMES = 12, 11
"""Longer words are left out."""
END = 40
"""Of a pronunciation; 0 is padding, 1 to 39 are the phonemes."""
VOICES = ("Soprano", "Alto", "Tenor", "Bass")
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
    return _split({**rows, "ratings": ratings.astype(np.uint8)})


def adult(files: Files) -> Arrays:
    """Eight categories, numbered, and five numbers, standardised; does someone earn more than 50 000 dollars?"""
    lines = b"\n".join(files.values()).decode().splitlines()
    table = np.array([row for row in (re.split(r",\s*", line.strip(" .")) for line in lines) if len(row) == 15])
    categories = [np.unique(table[:, k], return_inverse=True)[1] for k in (1, 3, 5, 6, 7, 8, 9, 13)]
    age, education, gain, loss, hours = (table[:, k].astype(np.float64) for k in (0, 4, 10, 11, 12))
    numbers = np.stack([age, education, np.log1p(gain), np.log1p(loss), hours], 1)
    numbers = (numbers - numbers.mean(0)) / numbers.std(0)
    return _split(
        {
            "categories": np.stack(categories, 1).astype(np.uint8),
            "numbers": numbers.astype(np.float32),
            "labels": (table[:, 14] == ">50K").astype(np.uint8),
        }
    )


def _split(rows: Arrays) -> Arrays:
    """Rows in a random order; the first are held out."""
    order = np.random.default_rng(0).permutation(len(next(iter(rows.values()))))
    train = {f"train_{name}": values[order[HELD_OUT:]] for name, values in rows.items()}
    return train | {f"test_{name}": values[order[:HELD_OUT]] for name, values in rows.items()}


def shakespeare(files: Files) -> Arrays:
    return _text(b"\n\n".join(files.values()))


def kjv(files: Files) -> Arrays:
    """The text is one literal in a module, which is read and not imported."""
    (module,) = files.values()
    found = re.search(rb'"""(.*?)"""', module, re.DOTALL)
    if found is None:
        raise ValueError("the module has no text in triple quotes")
    return _text(found[1])


def _text(text: bytes) -> Arrays:
    numbers = tokens(text)
    blocks = numbers[: len(numbers) // BLOCK * BLOCK].reshape(-1, BLOCK)
    held_out = np.arange(len(blocks)) % HELD_OUT_BLOCK == HELD_OUT_BLOCK - 1
    return {"train_text": blocks[~held_out].flatten(), "test_text": blocks[held_out].flatten()}


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
    return _split({"letters": letters, "phonemes": phonemes})


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
    "adult": adult,
    "shakespeare": shakespeare,
    "kjv": kjv,
    "cmudict": cmudict,
    "bach": bach,
}
"""By the name of the data set."""
