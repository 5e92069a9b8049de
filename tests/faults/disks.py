"""Disks that fill up or become read-only while a run writes to them."""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from hdet.checkpoint import file as checkpoint_file

__all__ = ["SPOILS", "disk", "possible", "repair", "spoil"]

SPOILS = ("full disk", "read-only folder")
_BALLAST = "ballast"


@contextmanager
def disk(folder: Path) -> Iterator[None]:
    """A file system of 1 MB at ``folder``, where this user may make one; else the folder as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    mounted = _mount("-t", "tmpfs", "-o", "size=1m", "none", folder)
    try:
        yield
    finally:
        repair(folder)
        if mounted:
            subprocess.run(["umount", "--lazy", folder], check=True)


def possible(fault: str, point: str) -> bool:
    """Whether this user can have it, of the checkpoint's disk or of the journal's.

    Who may not mount has a limit for a disk, which is the same for all files; and a superuser's folders are never
    read-only.
    """
    return _may_mount() or (point == "checkpoint" if fault == "full disk" else os.geteuid() != 0)


@cache
def _may_mount() -> bool:
    with tempfile.TemporaryDirectory() as name, disk(Path(name) / "disk"):
        return os.path.ismount(Path(name) / "disk")


def spoil(fault: str, folder: Path) -> None:
    """Called by the rank that writes, since a limit is a process's own."""
    if fault == "read-only folder":
        for file in checkpoint_file._held.values():  # one that is open for writing keeps a disk from being read-only
            file.close()
        if not _mount("-o", "remount,ro", folder):
            folder.chmod(0o555)
    elif os.path.ismount(folder):
        with suppress(OSError), (folder / _BALLAST).open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def repair(folder: Path) -> None:
    """As it was before."""
    if not _mount("-o", "remount,rw", folder):
        folder.chmod(0o755)
    (folder / _BALLAST).unlink(missing_ok=True)


def _mount(*arguments: object) -> bool:
    command = ["mount", *map(str, arguments)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
