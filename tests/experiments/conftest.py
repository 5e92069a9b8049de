"""The scripts of experiments/ import each other by name, as when one of them is run."""

from __future__ import annotations

import sys

from tests.examples.launch import ROOT
from tests.threads import one_thread

__all__ = ["one_thread"]

sys.path.append(str(ROOT / "experiments"))
