"""What an address in the repository leads to."""

from __future__ import annotations

import re
from pathlib import Path

from tools.rehearse_release import ADDRESS

ROOT = Path(__file__).resolve().parents[2]


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
