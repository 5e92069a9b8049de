"""Runs an example whose training can be held back: ``python -m tests.examples.paced HOLD example.py --its arguments``.

While the file HOLD exists, every step of an optimizer takes half a second. So a test decides what happens first,
whatever the machine is busy with: a process takes seconds to start, and in less an example may have ended.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

SLOW = 0.5
"""Seconds."""


def main(hold: Path, script: Path) -> None:
    def wait(*_: Any) -> None:
        deadline = time.monotonic() + SLOW
        while hold.exists() and time.monotonic() < deadline:
            time.sleep(0.02)

    register_optimizer_step_post_hook(wait)
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    _, given, *sys.argv = sys.argv
    main(Path(given), Path(sys.argv[0]))
