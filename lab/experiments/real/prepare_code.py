"""From the files of a package to the arrays of a data set: its messages in many languages, and its source as text."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable

import numpy as np

from real.prepare import Arrays, Files, blocks_of, tokens

PARTS = ("gap", "comment", "string", "number", "keyword", "name", "sign")
"""What a character of a program can belong to, from 0 on."""
_WORDS = re.compile(
    r"""(?P<comment>\#[^\n]*)
    |(?P<string>[rbfuRBFU]{0,2}(?:\"{3}.*?\"{3}|'{3}.*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))
    |(?P<number>\d[\w.]*)
    |(?P<name>[^\W\d]\w*)
    |(?P<gap>\s+)
    |(?P<sign>.)""",
    re.VERBOSE | re.DOTALL,
)


def locales(files: Files) -> Arrays:
    """Messages of a program, translated into many languages, as the bytes of UTF-8."""
    found = "\n".join(line for content in files.values() for line in messages(content.decode()))
    train, test = blocks_of(np.frombuffer(found.encode(), np.uint8))
    return {"train_bytes": train, "test_bytes": test}


def messages(catalogue: str) -> list[str]:
    r"""The translations in a catalogue of gettext; those that are missing or as the original are left out.

    >>> messages('msgid "Yes"\nmsgstr ""\n"Ja"\n\nmsgid "No"\nmsgstr "No"\n')
    ['Ja']
    """
    found = []
    for entry in catalogue.split("\n\n"):
        own: dict[str, str] = {}
        head = ""
        for line in entry.splitlines():
            matched = re.fullmatch(r'(?:(msg\w+(?:\[\d\])?) )?"(.*)"', line)
            if matched is not None:
                head = matched[1] or head
                own[head] = own.get(head, "") + matched[2]
        original = own.get("msgid", "")
        found += [text for head, text in own.items() if head.startswith("msgstr") and original and text != original]
    return [text.replace('\\"', '"').replace("\\n", " ").strip() for text in found if text]


def code(files: Files) -> Arrays:
    """Source as text, and for each character what it is a part of. The source is read and never run."""
    text = "\n".join(content.decode() for content in files.values())
    plain = re.sub(r"[^\n -~]", "", text)  # what `tokens` leaves out
    train, test = blocks_of(tokens(plain.encode()))
    train_parts, test_parts = blocks_of(kinds(plain))
    return {"train_text": train, "train_parts": train_parts, "test_text": test, "test_parts": test_parts}


def kinds(source: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """What each character belongs to, by its number in ``PARTS``.

    >>> "".join(PARTS[kind][0] for kind in kinds("if x: # 1"))
    'kkgnsgccc'
    """
    found = np.zeros(len(source), np.uint8)
    for word in _WORDS.finditer(source):
        kind = str(word.lastgroup)
        kind = "keyword" if kind == "name" and keyword.iskeyword(word[0]) else kind
        found[word.start() : word.end()] = PARTS.index(kind)
    return found


PREPARE_CODE: dict[str, Callable[[Files], Arrays]] = {"locales": locales, "code": code}
"""By the name of the data set."""
