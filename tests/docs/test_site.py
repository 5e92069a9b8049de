"""What makes the site of the pages: docstrings as Markdown, equations as MathML, places that are filled, and the whole.

Needs the extra docs; ``make docs`` installs it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("zensical")
pytest.importorskip("mkdocstrings")
pytest.importorskip("latex2mathml")

from markdown import Markdown

from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
try:
    import docstrings
    import pages
finally:
    sys.path.remove(str(DOCS))


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("Uses :class:`hdet.ProbeLoss` and ``x``.", "Uses `hdet.ProbeLoss` and ``x``."),
        (r"At :math:`\rho_r` times.", r"At $\rho_r$ times."),
        ("Text:\n\n.. math:: a = b,\n    c = d\n\nMore.", "Text:\n\n\n$$\na = b, c = d\n$$\n\nMore."),
        (
            ".. code-block:: python\n\n    for x in y:\n        pass\n\nArgs:\n    x: y.",
            "```python\nfor x in y:\n    pass\n```\n\nArgs:\n    x: y.",
        ),
        ("It adds.\n\n>>> 1 + 1\n2", "It adds.\n\n```pycon\n>>> 1 + 1\n2\n```"),
        ("Args:\n    a, b,\n        c: as in torch.", "Args:\n    a, b, c: as in torch."),
    ],
    ids=["roles", "inline math", "math", "code", "doctest", "names on two lines"],
)
def test_docstrings_become_markdown(written: str, wanted: str) -> None:
    assert docstrings.as_markdown(written) == wanted


def rendered(text: str) -> str:
    return Markdown(extensions=["tables", "pymdownx.arithmatex", pages.Pages()], extension_configs=ARITHMATEX).convert(
        text
    )


ARITHMATEX = {"pymdownx.arithmatex": {"generic": True}}


def test_equations_become_mathml() -> None:
    drawn = rendered(r"At $\alpha < 1$:" + "\n\n$$\nx^2\n$$\n")
    assert "arithmatex" not in drawn
    assert drawn.count("<math ") == 2
    assert 'display="inline"' in drawn
    assert 'display="block"' in drawn


def test_places_are_filled() -> None:
    filled = rendered("A\n\n<!-- fill: readme results -->\n\n<!-- fill: command export -->\n\nB")
    assert "fill:" not in filled
    assert "<code>--every-step</code>" in filled
    with pytest.raises(ValueError, match="nothing"):
        rendered("<!-- fill: readme nothing -->")


def test_every_decision_is_listed() -> None:
    listed = re.findall(r"href=\"decisions/(\d{3}-[\w-]+\.md)\"", rendered("<!-- fill: decisions all -->"))
    assert listed == sorted(file.name for file in (DOCS / "decisions").glob("*.md"))


def test_notebooks_have_links_into_colab_once_there_is_an_address() -> None:
    where = "colab.research.google.com/github/someone/hdet/blob/v1.2.3/examples/getting_started.ipynb"
    assert where in pages.in_colab("https://github.com/someone/hdet", "1.2.3", "getting_started")
    for none in ("", "https://codeberg.org/someone/hdet"):
        assert pages.in_colab(none, "1.2.3", "getting_started") == ""
    named = re.findall(r"^<!-- fill: colab (\w+) -->$", (DOCS / "getting-started.md").read_text("utf-8"), re.MULTILINE)
    named += re.findall(r"^<!-- fill: colab (\w+) -->$", (DOCS / "jax.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(notebook.stem for notebook in (ROOT / "examples").glob("*.ipynb"))


class Loaded(HTMLParser):
    """What a page loads when it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed"):
            self.addresses.append(known.get("src") or "")
        elif tag == "link" and known.get("rel") != "canonical":
            self.addresses.append(known.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "lab", "src"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "mkdocs.yml", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    done = built(folder)
    assert done.returncode == 0, done.stdout
    return folder / "site"


def built(folder: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` does."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (DOCS, ROOT)))}
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **paths}, capture_output=True, text=True, timeout=PATIENCE
    )


def test_every_page_is_built_without_anything_that_is_to_be_filled(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        made = (site / page.relative_to(DOCS)).with_suffix(".html").read_text(encoding="utf-8")
        assert "arithmatex" not in made, page
        assert "<!-- fill" not in made, page


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    """Nor does a style sheet. The theme's script has addresses for what our pages do not have, such as diagrams."""
    for page in site.rglob("*.html"):
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        assert [one for one in loaded.addresses if "//" in one] == [], page
        assert 'class="mermaid"' not in page.read_text(encoding="utf-8")
    assert not [file for file in site.rglob("*.css") if re.search(r"url\(\W?(https?:)?//", file.read_text("utf-8"))]


def test_it_can_be_searched_and_is_light_or_dark_as_the_system_is(site: Path) -> None:
    assert "hdet.auto" in (site / "search.json").read_text(encoding="utf-8")
    home = (site / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'data-md-color-media="\(prefers-color-scheme: (\w+)\)"', home)[:2] == ["light", "dark"]


def test_the_reference_is_made_of_the_docstrings(site: Path) -> None:
    made = (site / "reference.html").read_text(encoding="utf-8")
    assert 'id="hdet.auto"' in made
    assert "<math " in made
    assert not re.search(r":(?:class|func|meth|math):`|code-block::", made)


@pytest.mark.parametrize("link", ["nothing.md", "#nothing", "index.md#nothing"])
def test_a_broken_link_or_anchor_stops_the_build(link: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Home\n\n[where]({link})\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: a\ntheme:\n  font: false\n")
    done = built(tmp_path)
    assert done.returncode != 0
    assert "does not exist" in done.stdout + done.stderr


def test_read_the_docs_builds_as_make_does() -> None:
    yaml = pytest.importorskip("yaml")
    hosted = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text(encoding="utf-8"))
    (made,) = hosted["build"]["jobs"]["build"]["html"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (paths,) = re.findall(r"^docs: export PYTHONPATH := (.+)$", makefile, re.MULTILINE)
    (command,) = re.findall(r"^\t\$\(PY\) (-m zensical .+)$", makefile, re.MULTILINE)
    assert made == f"PYTHONPATH={paths} python {command}"
    stated = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = ">={hosted["build"]["tools"]["python"]}"' in stated
