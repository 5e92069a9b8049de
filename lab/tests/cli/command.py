"""``python -m lab`` as a user runs it, as a process or, quicker, by its entry point here."""

from __future__ import annotations

import functools
import sys

from tests.cli.command import hdet_here

from lab.cli import main

LAB = (sys.executable, "-m", "lab")
lab_here = functools.partial(hdet_here, entry=main)
"""A command in this process."""
