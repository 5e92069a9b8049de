"""What tests on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["no_synchronising"]


@contextmanager
def no_synchronising() -> Iterator[None]:
    """Inside, an operation that makes the host wait for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
