"""Where a result comes from: the commit, the rule and the packages it was made with."""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import hdet

PACKAGES = ("torch", "numpy", "transformers", "prodigyopt", "dadaptation", "dog-optimizer", "schedulefree")

RULE = tuple(f"rule/{name}.py" for name in ("constants", "decision", "estimate", "judge", "progress", "state"))
"""What auto_runs.py takes of the library."""


def commit() -> str:
    """``HDET_COMMIT`` where the tree is a copy, otherwise of the working tree."""
    if "HDET_COMMIT" in os.environ:
        return os.environ["HDET_COMMIT"]
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def library() -> str:
    """A fingerprint of the rule, whatever its words: a row made with another does not belong into the same table."""
    files = [Path(hdet.__file__).parent / name for name in RULE]
    return fingerprint("".join(file.read_text(encoding="utf-8") for file in files))


def fingerprint(source: str) -> str:
    """Of a program without its comments and docstrings.

    >>> fingerprint('x = 1  # why') == fingerprint('"words"' + chr(10) + 'x  =  1') != fingerprint('x = 2')
    True
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [part for part in node.body if not _is_word(part)]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:12]


def _is_word(part: ast.stmt) -> bool:
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)


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
