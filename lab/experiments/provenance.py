"""Where a result comes from: the commit, the rule and the packages it was made with."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib import metadata

import torch
from behaviour import fingerprint

PACKAGES = ("torch", "numpy", "transformers", "prodigyopt", "dadaptation", "dog-optimizer", "schedulefree")


def commit() -> str:
    """``HDET_COMMIT`` where the tree is a copy, otherwise of the working tree."""
    if "HDET_COMMIT" in os.environ:
        return os.environ["HDET_COMMIT"]
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


@cache
def library() -> str:
    """A fingerprint of what the rule decides: a row made with another rule does not belong into the same table."""
    return fingerprint()


def versions(device: torch.device) -> dict[str, str]:
    """What it ran on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return found
