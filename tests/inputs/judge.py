"""Whether an error helps: it is one of hdet's and names the argument, or torch's own about an argument of torch's."""

from __future__ import annotations

import os
import re
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from hdet.errors import HdetError
from tests.inputs.calls import Call

__all__ = ["complaint"]

_TORCH = str(Path(torch.__file__).parent)


def complaint(call: Call, spoilt: dict[str, Any], folder: Path) -> str | None:
    """Call with some arguments spoilt. None: accepted, or refused in words that help; else what is wrong."""
    given = {**call.right(folder), **spoilt}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call.use(call(given), given)
        except Exception as error:
            if any(frame.name == "loss_fn" for frame in traceback.extract_tb(error.__traceback__)):
                return None  # the user's own function has raised it
            if _is_torchs(error) and call.torchs & set(spoilt):
                return None
            is_ours = isinstance(error, HdetError)
            if is_ours and any(_names(call, name, value, str(error)) for name, value in spoilt.items()):
                return None
            where = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
    return None


def _names(call: Call, argument: str, value: Any, text: str) -> bool:
    """Whether the text has the argument's name; that of a file will do, where it is one that is there."""
    is_file = isinstance(value, (str, Path)) and os.path.isfile(value)
    words = (argument, *call.words.get(argument, ()), *([str(value)] if is_file else []))
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) for word in words)


def _is_torchs(error: Exception) -> bool:
    """Whether torch itself has raised it."""
    return traceback.extract_tb(error.__traceback__)[-1].filename.startswith(_TORCH)
