"""Signals are the program's: the library leaves them alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.patience import PATIENCE


@pytest.mark.slow
def test_the_library_installs_no_handler() -> None:
    """Neither an import nor a run of the library touches signals."""
    code = """if True:
        import signal
        def refuse(*_):
            raise AssertionError("a handler was installed")
        signal.signal = refuse
        import torch, hdet
        p = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([p], lr=0.1)
        scheduler = hdet.auto(optimizer, total_steps=50)
        for _ in range(5):
            p.grad = p.detach().clone()
            optimizer.step()
            scheduler.step()
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE, stderr=subprocess.DEVNULL)
