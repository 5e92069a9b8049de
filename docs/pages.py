"""What the site's pages need beyond Markdown: equations as MathML, and places that are filled from the code.

An extension of Python-Markdown, which mkdocs.yml names. Everything happens while the site is built; no page needs a
script or a network for it.
"""

import html
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.postprocessors import Postprocessor
from markdown.preprocessors import Preprocessor

ROOT = Path(__file__).resolve().parents[1]
_EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_FILL = re.compile(r"^<!-- fill: (\w+) ([\w-]+) -->$", re.MULTILINE)


class Pages(Extension):
    """Fills places before a page is read, and draws equations after it was written; those of docstrings too."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(Places(md), "places", 100)  # before blocks of code are found
        md.postprocessors.register(Equations(md), "equations", 0)  # when what arithmatex wrote is in the page


class Places(Preprocessor):
    """``<!-- fill: what name -->``, on a line of its own, becomes what the function ``what`` says of ``name``."""

    def run(self, lines: list[str]) -> list[str]:
        return _FILL.sub(lambda match: _FILLERS[match[1]](match[2]), "\n".join(lines)).split("\n")


class Equations(Postprocessor):
    """LaTeX becomes MathML, which browsers draw themselves."""

    def run(self, text: str) -> str:
        return _EQUATION.sub(_as_mathml, text)


def makeExtension(**_: Any) -> Pages:
    """What Python-Markdown calls."""
    return Pages()


def _as_mathml(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    return convert(html.unescape(match[2]).strip(), display=display)


# -- what places are filled with ------------------------------------------------------------------------------------


def readme(name: str) -> str:
    """What stands in README.md between ``<!-- table: name -->`` and ``<!-- end -->``."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^<!-- table: {name} -->\n(.*?)^<!-- end -->$", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"README.md has no <!-- table: {name} --> ... <!-- end -->")
    return found[1].strip()


def decisions(_: str) -> str:
    """A link to every record, by its title."""
    files = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    titles = [file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for file in files]
    return "\n".join(f"- [{title}](decisions/{file.name})" for title, file in zip(titles, files, strict=True))


def colab(name: str) -> str:
    """A link that opens a notebook of examples/ in Colab; nothing while the repository has no address on GitHub."""
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    address = stated["tool"]["hatch"]["metadata"]["hooks"]["custom"]["address"]
    return in_colab(address, version(), name)


def in_colab(address: str, version: str, name: str) -> str:
    """The link to a notebook in the tree of a version.

    >>> in_colab("https://github.com/someone/hdet", "0.1.0", "a")
    '[Open a.ipynb in Colab](https://colab.research.google.com/github/someone/hdet/blob/v0.1.0/examples/a.ipynb)'
    >>> in_colab("", "0.1.0", "a")
    ''
    """
    host, _, repository = address.partition("https://github.com/")
    if host or not repository:
        return ""
    page = f"https://colab.research.google.com/github/{repository}/blob/v{version}/examples/{name}.ipynb"
    return f"[Open {name}.ipynb in Colab]({page})"


def version() -> str:
    """The version that the pages describe."""
    [found] = re.findall(r'^__version__ = "(.+)"$', (ROOT / "src/hdet/_version.py").read_text("utf-8"), re.MULTILINE)
    return str(found)


def command(name: str) -> str:
    """A command of ``hdet``: its help and its options, as the command line itself knows them."""
    from hdet.cli.app import app

    return _described(app, name)


def lab(name: str) -> str:
    """The same of ``python -m lab``."""
    from lab.cli.app import app

    return _described(app, name)


def _described(app: Any, name: str) -> str:
    import typer

    found = typer.main.get_command(app).commands[name]
    rows = [f"| {_names(one)} | {_default(one)} | {_cell(one.help or '')} |" for one in found.params]
    return "\n".join([found.help, "", "| option | default | meaning |", "| --- | --- | --- |", *rows])


def _names(parameter: Any) -> str:
    """The option's names with what they take; an argument is named by its place."""
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    names = [*parameter.opts, *parameter.secondary_opts]
    takes = f" {parameter.metavar}" if parameter.metavar else ""
    return ", ".join(f"`{name}{takes}`" for name in names)  # a bar inside code ends no cell


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):
        return _cell(parameter.show_default)
    if parameter.default is None or parameter.default is False:
        return ""
    return f"`{getattr(parameter.default, 'value', parameter.default)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


_FILLERS: Mapping[str, Any] = {"readme": readme, "decisions": decisions, "colab": colab, "command": command, "lab": lab}
