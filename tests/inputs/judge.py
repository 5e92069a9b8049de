"""Whether an error helps: it is one of hdet's and names the argument, or torch's own about torch's own argument."""

from __future__ import annotations

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
        except HdetError as error:
            if any(_names(call, name, str(error)) for name in spoilt):
                return None
            return f"does not name {list(spoilt)}: {type(error).__name__}: {error}"
        except Exception as error:
            if _is_torchs(error) and set(spoilt) & call.torchs:
                return None
            if any(frame.name == "loss_fn" for frame in traceback.extract_tb(error.__traceback__)):
                return None  # the user's own function has raised it
            where = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
    return None


def _names(call: Call, argument: str, text: str) -> bool:
    words = (argument, *call.words.get(argument, ()))
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) for word in words)


def _is_torchs(error: Exception) -> bool:
    """Whether torch itself has raised it."""
    return traceback.extract_tb(error.__traceback__)[-1].filename.startswith(_TORCH)
