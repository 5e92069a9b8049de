"""What a registry shows of hdet: links and README.md, from the built sdist and wheel. See hatch_build.py."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
from email import message_from_bytes
from email.message import Message
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import pytest
from readme_renderer import markdown
from tools.rehearse_release import ADDRESS, copy_to

import hdet
from hdet.errors import INSTALL
from tests.code_blocks import blocks
from tests.patience import PATIENCE
from tests.release.tree import ROOT, fault_of

STATED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PAPER = "https://arxiv.org/abs/2604.24708"


class Built(NamedTuple):
    """An sdist, and the wheel that was built from it: what their metadata say."""

    sdist: Message
    wheel: Message
    files: list[str]
    """Those in the sdist."""


def build(source: Path, out: Path) -> Built:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    name = f"hdet-{hdet.__version__}"
    with tarfile.open(out / f"{name}.tar.gz") as sdist, ZipFile(out / f"{name}-py3-none-any.whl") as wheel:
        packed = sdist.extractfile(f"{name}/PKG-INFO")
        assert packed is not None
        files = [member.removeprefix(f"{name}/") for member in sdist.getnames()]
        return Built(
            message_from_bytes(packed.read()), message_from_bytes(wheel.read(f"{name}.dist-info/METADATA")), files
        )


def test_what_a_missing_package_asks_for_is_what_the_extras_bring() -> None:
    extras = STATED["project"]["optional-dependencies"]
    brought = sorted(re.findall(r"^[\w-]+", one)[0] for one in (*extras["cli"], *extras["report"]))
    assert f"`pip install {' '.join(brought)}`" in INSTALL


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """As it will be, with an address."""
    return build(copy_to(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("dist"))


def links_of(metadata: Message) -> dict[str, str]:
    return dict(entry.split(", ", 1) for entry in metadata.get_all("Project-URL", []))


class Links(HTMLParser):
    """All that a page leads to or shows, and whether it is a picture."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, bool]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [(link, tag == "img") for name, link in attrs if name in ("href", "src") and link is not None]


def description(metadata: Message) -> str:
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload(decode=True)
    assert isinstance(text, bytes)
    return text.decode("utf-8")


def shown(metadata: Message) -> str:
    """The description, as the registry renders it."""
    page = markdown.render(description(metadata))
    assert page is not None
    return page


def test_links_lead_into_the_tree_of_this_version(released: Built) -> None:
    links = links_of(released.wheel)
    assert links.pop("Paper") == PAPER
    assert links.pop("Repository") == ADDRESS
    assert links.pop("Issues") == f"{ADDRESS}/issues"
    assert set(links) == {"Documentation", "Changelog"}
    assert {link: fault_of(link, hdet.__version__) for link in links.values() if fault_of(link, hdet.__version__)} == {}


def test_links_and_pictures_of_the_page_lead_into_it_too(released: Built) -> None:
    found = Links(shown(released.wheel)).found
    inside = [link for link, _ in found if link.startswith(ADDRESS)]
    assert {link: fault_of(link, hdet.__version__) for link in inside if fault_of(link, hdet.__version__)} == {}
    elsewhere = [link for link, _ in found if link not in inside and not link.startswith(("https://", "#"))]
    assert elsewhere == []
    written = re.findall(r"\]\((?!https://)[^)]+\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(inside) == len(written) > 30
    pictures = [link for link, is_picture in found if is_picture]
    drawn = [f"{ADDRESS}/raw/v{hdet.__version__}/docs/images/{name}.svg" for name in ("front", "components")]
    assert pictures == drawn


def test_the_page_has_all_of_the_readme(released: Built, tmp_path: Path) -> None:
    """Code, tables and headings survive the registry's cleaning, and code is as it was."""
    page, readme = shown(released.wheel), (ROOT / "README.md").read_text(encoding="utf-8")
    assert page.count("<table>") == len(re.findall(r"^\|(?: ?:?-+:? ?\|)+$", readme, re.MULTILINE))
    assert page.count("<h2>") + page.count("<h2 ") == readme.count("\n## ")
    described = tmp_path / "README.md"
    described.write_text(description(released.wheel), encoding="utf-8")
    assert [block.source for block in blocks(described)] == [block.source for block in blocks(ROOT / "README.md")]


def test_the_wheel_says_what_the_sdist_says(released: Built) -> None:
    assert released.wheel.items() == released.sdist.items()
    assert description(released.wheel) == description(released.sdist)


def test_the_sdist_can_be_tested_and_built_again(released: Built) -> None:
    needed = {"LICENSE", "README.md", "CHANGELOG.md", "hatch_build.py", "constraints.txt", "tests/conftest.py"}
    assert needed <= set(released.files)
    assert not {file.partition("/")[0] for file in released.files} & {"lab", "docs", ".github", ".ci", "tools"}


def test_without_an_address_there_are_no_links_to_it(tmp_path: Path) -> None:
    wheel = build(copy_to(tmp_path / "source", address=""), tmp_path / "dist").wheel
    assert links_of(wheel) == {"Paper": PAPER}
    assert description(wheel).strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()


@pytest.mark.parametrize("address", ["github.com/someone/hdet", f"{ADDRESS}/", f"{ADDRESS}.git", "https://someone"])
def test_an_address_that_is_none_is_refused(address: str, tmp_path: Path) -> None:
    source = copy_to(tmp_path / "source", address=address)
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "metadata"], cwd=source, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode != 0
    assert f"such as https://github.com/OWNER/hdet, without .git or a slash at its end, but got {address!r}" in (
        done.stdout + done.stderr
    )


def test_all_is_what_can_be_installed_anywhere() -> None:
    extras = STATED["project"]["optional-dependencies"]
    [together] = extras["all"]
    parts = set(re.findall(r"\w+", together.partition("[")[2]))
    for_work = {"all", "compare", "dev", "docs", "frameworks", "mutants", "release", "test"}
    assert set(extras) - for_work - parts == {"deepspeed", "torchft", "torchtitan"}


def test_only_what_was_tried_is_claimed() -> None:
    systems = [line for line in STATED["project"]["classifiers"] if line.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"]
