"""What MkDocs does not do by itself: equations as MathML, pages filled from the code, the list of decisions.

Everything happens while the site is built; no page needs a script or a network for it.
"""

import html
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parents[1]
_EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_FILL = re.compile(r"^<!-- fill: (\w+) ([\w-]+) -->$", re.MULTILINE)


def on_config(config: Any) -> None:
    """Replace each folder that ``nav`` names, at any depth, by the list of its files."""
    _list_folders(config.nav, Path(config.docs_dir))


def _list_folders(nav: list[dict[str, Any]], docs: Path) -> None:
    for entry in nav:
        for title, path in entry.items():
            if isinstance(path, list):
                _list_folders(path, docs)
            elif path.endswith("/"):
                entry[title] = sorted(f"{path}{file.name}" for file in (docs / path).glob("*.md"))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill the places that a page marks with ``<!-- fill: what name -->``."""
    if page.file.src_uri.startswith("decisions/"):
        return markdown.replace("][", "]\\[")  # x[r][g] there is no reference to a heading "g"
    return _FILL.sub(lambda match: _FILLERS[match[1]](match[2]), markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Equations as MathML, which browsers draw themselves; those of docstrings too."""
    return _EQUATION.sub(_as_mathml, content)


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


_FILLERS: Mapping[str, Any] = {"readme": readme, "command": command, "lab": lab}
