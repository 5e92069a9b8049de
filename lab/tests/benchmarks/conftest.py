"""The scripts of lab/benchmarks import each other by name, as when one of them is run."""

from __future__ import annotations

import sys

from tests.examples.launch import ROOT

sys.path.append(str(ROOT / "lab" / "benchmarks"))
