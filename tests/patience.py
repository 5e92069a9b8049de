"""How long tests wait for processes: long enough for a machine that others keep busy. What hangs still fails."""

from __future__ import annotations

__all__ = ["GROUP_PATIENCE", "PATIENCE"]

PATIENCE = 400.0
"""Seconds for a process to answer or to end. pytest's own limit (pyproject.toml) is above it."""
GROUP_PATIENCE = 150.0
"""Seconds for the ranks of a group to wait for each other, in tests where none is lost."""
