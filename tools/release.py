"""Whether a tag may be published: release.yml asks before it builds, and goes on if nothing is refused.

python tools/release.py v0.1.0
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTALLING, NOT_YET = ("README.md", "docs/getting-started.md"), r"from PyPI, once \S+ is there"
"""The pages on installing, and what they say as long as nothing is published."""


def refusals(tag: str, root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Why a tag cannot be published, each with what to do; empty if it can."""
    stated = tomllib.loads(_text(root, "pyproject.toml"))
    address = stated["tool"]["hatch"]["metadata"]["hooks"]["custom"]["address"]
    [version] = re.findall(r'^__version__ = "(.+)"$', _text(root, "src/hdet/_version.py"), re.MULTILINE)
    [recipe] = re.findall(
        r"^  version: (.+)$", _text(root, "recipe/recipe.yaml").partition("\npackage:")[0], re.MULTILINE
    )
    sections = re.findall(r"^## (.+)$", _text(root, "CHANGELOG.md"), re.MULTILINE)
    found = []
    if not address:
        found.append("address in pyproject.toml is empty: write the repository's page there")
    elif (here := _repository(environment)) not in (None, address):
        found.append(f"address in pyproject.toml is {address}, but this is {here}: only the former publishes")
    elif f"repository-code: {address}" not in _text(root, "CITATION.cff").splitlines():
        found.append(f"CITATION.cff has another address, or none: add the line repository-code: {address}")
    if tag != f"v{version}":
        found.append(f"the tag is {tag}, and the version {version}: tag v{version}, or change src/hdet/_version.py")
    if recipe != version:
        found.append(f"recipe/recipe.yaml has version {recipe}, and src/hdet/_version.py {version}: write {version}")
    if not re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", sections[0]):
        found.append(f"CHANGELOG.md begins with ## {sections[0]}: write ## [{version}] - and the day, as 2026-12-31")
    for name in INSTALLING:
        if words := re.search(NOT_YET, _text(root, name)):
            found.append(f"{name} says {words[0]}: write what holds for those who read it on PyPI")
    return found


def _text(root: Path, name: str) -> str:
    return (root / name).read_text(encoding="utf-8")


def _repository(environment: Mapping[str, str]) -> str | None:
    """The repository in which a workflow runs; None elsewhere."""
    parts = [environment.get(name) for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY")]
    return "/".join(part for part in parts if part) if all(parts) else None


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python tools/release.py TAG, but got {sys.argv[1:]}")
    if refused := refusals(sys.argv[1]):
        sys.exit("\n".join(["not published:", *(f"- {why}" for why in refused)]))
    print(f"{sys.argv[1]} can be published")
