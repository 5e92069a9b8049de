"""Stopping in order: a signal asks, the loop finishes its step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Stop", "on_signals"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Whether somebody asked for the end."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self) -> None:
        self.asked = True


@contextmanager
def on_signals(react: Callable[[], None]) -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM call ``react``; afterwards they do what they did. A second ends the process."""
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers only there
        yield
        return
    before: dict[signal.Signals, Any] = {which: signal.getsignal(which) for which in _SIGNALS}

    def handler(number: int, frame: FrameType | None) -> None:
        for which in _SIGNALS:
            signal.signal(which, before[which])
        react()

    for which in _SIGNALS:
        signal.signal(which, handler)
    try:
        yield
    finally:
        for which in _SIGNALS:
            signal.signal(which, before[which])
