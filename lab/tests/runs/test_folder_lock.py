"""The lock of a run's folder ends with its process, whatever that has forked."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tests.journal.test_lock import is_free, persistent_workers

from lab.runs.folder import Folder


def test_a_forked_child_does_not_keep_a_folder(tmp_path: Path) -> None:
    """The lock of ``python -m lab train``."""
    with ExitStack() as stack:
        with Folder(tmp_path).held():
            stack.enter_context(persistent_workers())
            assert not is_free(tmp_path / ".lock")
        assert is_free(tmp_path / ".lock")
