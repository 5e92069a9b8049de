"""What the metadata say beyond pyproject.toml: links, and README.md as a registry can show it. hatchling calls it.

All addresses are below one, ``address`` in pyproject.toml. While that is empty, the metadata have no link to the
repository, README.md is left as it is, and ``tools/release.py`` refuses to publish. A wheel that is built from an sdist
has the sdist's metadata: nothing here is called then.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ADDRESS = re.compile(r"https://[\w.-]+(?:/[\w.-]+){2,}(?<!\.git)")
"""A repository: its host, its owner, its name."""
_CODE_OR_LINK = re.compile(
    r"^```.*?^```$|(?P<picture>!?)(?P<text>\[[^\]]*\])\((?![a-z]+:|#)(?P<path>[^)\s#]+)(?P<place>#[^)\s]*)?\)|`[^`\n]+`",
    re.DOTALL | re.MULTILINE,
)


class Metadata(MetadataHookInterface):
    """Sets the dynamic fields ``urls`` and ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        address, version = self.config["address"], metadata["version"]
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["urls"] = urls(self.config["urls"], address, version)
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": as_registries_show(readme, address, version) if address else readme,
        }


def urls(below: dict[str, str], address: str, version: str) -> dict[str, str]:
    """Links by name: whole addresses stay, the others are below ``address``, or left out if there is none.

    Raises:
        ValueError: ``address`` is not that of a repository.
    """
    if address and not ADDRESS.fullmatch(address):
        raise ValueError(
            f"address in pyproject.toml must be a repository's page, such as https://github.com/OWNER/hdet, without "
            f'.git or a slash at its end, but got {address!r}; leave it empty ("") until there is one'
        )
    whole = {name: path for name, path in below.items() if path.startswith("https://")}
    rest = {name: f"{address}/{path.format(version=version)}" for name, path in below.items() if name not in whole}
    return {**({"Repository": address, **rest} if address else {}), **whole}


def as_registries_show(readme: str, address: str, version: str) -> str:
    """README.md with whole addresses, in the tree of this version: a registry's page has no files beside it."""

    def whole(found: re.Match[str]) -> str:
        picture, text, path, place = found.group("picture", "text", "path", "place")
        if path is None:
            return found[0]  # code
        kind = "raw" if picture else "blob" if PurePosixPath(path).suffix else "tree"
        return f"{picture}{text}({address}/{kind}/v{version}/{path}{place or ''})"

    return _CODE_OR_LINK.sub(whole, readme)
