"""No tracked file names a machine's folder, or a host that is not a public one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

from tests.release.tree import ROOT

HOSTS = {
    *("github.com", "arxiv.org", "pypi.org", "semver.org", "keepachangelog.com", "matplotlib.org", "codeberg.org"),
    *("colab.research.google.com", "www.w3.org", "purl.org", "creativecommons.org", "www.apache.org"),
    *("localhost", "127.0.0.1", "index", "someone"),  # of tests
}
FOLDERS = re.compile(r"(?<![\w.*])/(?:work|opt|root|home|srv|Users)/\w")


def test_every_host_is_a_public_one() -> None:
    found = {
        (host, name) for name, text in texts() for host in re.findall(r"https?://([\w.-]+)", text) if host not in HOSTS
    }
    assert not found


def test_no_folder_of_a_machine_is_named() -> None:
    assert not [(name, found[0]) for name, text in texts() if (found := FOLDERS.search(text))]


def texts() -> Iterator[tuple[str, str]]:
    """The files that git tracks, but for those that are no text."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and b"\0" not in (content := (ROOT / name).read_bytes()):
            yield name, content.decode("utf-8")
