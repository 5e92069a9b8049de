"""Stopping in order: a signal asks, the loop finishes its step. For the command line: the library has no handlers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Stop", "Terminated", "on_signals", "terminating"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(BaseException):
    """SIGTERM, as KeyboardInterrupt is SIGINT."""


class Stop:
    """Whether somebody asked for the end, and by which signal."""

    def __init__(self) -> None:
        self.asked = False
        self._number: int = signal.SIGINT

    def ask(self, number: int = signal.SIGINT) -> None:
        self.asked, self._number = True, number

    @property
    def code(self) -> int:
        """The exit code of a program that such a signal has ended."""
        return 128 + self._number


@contextmanager
def on_signals(react: Callable[[int], None], *, only_once: bool = False) -> Iterator[None]:
    """Inside, the first Ctrl-C or SIGTERM calls ``react``; a second does what it did before, as afterwards.

    ``only_once``: a second does nothing. For ranks: who signals all processes of a run also signals the launcher, which
    passes it on, and a rank that this ended would take the checkpoint with it.
    """
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers only there
        yield
        return
    before: dict[signal.Signals, Any] = {which: signal.getsignal(which) for which in _SIGNALS}
    asked = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            return
        asked = True
        if not only_once:
            _install(before)
        react(number)

    _install(dict.fromkeys(_SIGNALS, handler))
    try:
        yield
    finally:
        _install(before)


@contextmanager
def terminating() -> Iterator[None]:
    """Inside, SIGTERM raises :class:`Terminated`, so that a command can say how to go on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _install(handlers: dict[signal.Signals, Any]) -> None:
    for which, handler in handlers.items():
        signal.signal(which, handler)
