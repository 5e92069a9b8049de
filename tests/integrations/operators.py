"""Importing this makes torchvision importable where it was built for another torch: images are read without operators.

There is no build of it for every build of torch. Without its operators it fails on import, and with it ultralytics.
"""

from __future__ import annotations

import contextlib
import importlib
import re

import torch

__all__ = ["DECLARED"]

DECLARED = torch.library.Library("torchvision", "FRAGMENT")
"""Operators that are declared, and cannot be called."""


def _missing() -> str | None:
    """The operator without which torchvision cannot be imported."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        found = re.search(r"operator torchvision::(\w+) does not exist", str(error))
        return found[1] if found else None
    return None


with contextlib.suppress(ImportError):
    while (name := _missing()) is not None:
        DECLARED.define(f"{name}() -> ()")
