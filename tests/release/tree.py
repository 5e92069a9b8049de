"""A copy of the repository as it would be released, and what an address in it leads to."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "https://github.com/someone/hdet"
"""Made up: the repository has no address yet."""


def copy_to(folder: Path, address: str = ADDRESS, names: Sequence[str] = ()) -> Path:
    """Files, or all that git knows or would add, with the address in its place."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", *names]
    found = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, found):
        if (ROOT / name).is_file():  # not one that was removed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    stated = folder / "pyproject.toml"
    text, places = re.subn(r'^address = ".*"$', f'address = "{address}"', stated.read_text("utf-8"), flags=re.MULTILINE)
    assert places == 1
    stated.write_text(text, encoding="utf-8")
    return folder


def fault_of(link: str, version: str, address: str = ADDRESS) -> str | None:
    """What is wrong with a link into the repository; None if it leads to a file, folder or heading that is there."""
    found = re.fullmatch(rf"{re.escape(address)}/(blob|tree|raw)/v{re.escape(version)}/([^#]+)(?:#(.+))?", link)
    if found is None:
        return "is no address in the tree of this version"
    kind, path, heading = found.groups()
    if not (ROOT / path).exists():
        return "leads to no file"
    if (kind == "tree") != (ROOT / path).is_dir():
        return "takes a folder for a file, or a file for a folder"
    if heading is not None and heading not in headings(ROOT / path):
        return "leads to no heading"
    return None


def headings(page: Path) -> set[str]:
    """The names of a page's headings in links."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
