"""Paths that users give, and files that are written there."""

from __future__ import annotations

import os
from pathlib import Path

from hdet.checks import shown
from hdet.errors import ArgumentError

__all__ = ["path_of", "write_atomically"]


def path_of(path: object, name: str) -> Path:
    """The path, if a file system could have it; ``name``: of the argument."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or "\0" in text:
        raise ArgumentError(f"{name} must be a path, but got {shown(path)}; give a text or a pathlib.Path")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # torch could write such a file, but not read it
        raise ArgumentError(
            f"{name} must be a path that UTF-8 can write, but got {text!a}, which has a surrogate at character "
            f"{error.start}; give the file or folder another name"
        ) from error
    try:
        Path(text).exists()
    except OSError as error:  # too long a name
        raise ArgumentError(f"{name} must be a path, but got {shown(text)} ({error.strerror}); shorten it") from error
    return Path(text)


def write_atomically(path: Path, text: str) -> None:
    """All of the text or none: a kill at any moment leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
