"""The clock: seconds per phase of a round's end."""

from __future__ import annotations

import time

__all__ = ["Clock"]


class Clock:
    """Starts when it is made."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """What has passed since the last lap belongs to ``phase``."""
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now
