"""docs/ tells the truth: its blocks run, its commands parse, its tables and pictures are the code's and the data's."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
import sys
import tomllib
from fractions import Fraction
from importlib import import_module
from pathlib import Path

import pytest

import hdet
from hdet.rule.constants import DEFAULT, LIMITS
from tests.code_blocks import Block, blocks, commands, failures, missing_package
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
QUESTIONS = sorted((DOCS / "questions").glob("*.md"))
PAGES = [*sorted(DOCS.glob("*.md")), *QUESTIONS]


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).with_suffix("").as_posix().replace("/", "-")


def _scripts() -> dict[str, list[Block]]:
    """The blocks of a page are one script; each of the README's, the reference's and each framework's is alone."""
    pages = {name_of(page): blocks(page) for page in PAGES if blocks(page)}
    rows = {name: pages.pop(name) for name in ("frameworks", "reference")} | {"README": blocks(ROOT / "README.md")}
    apart = {f"{name}-line-{block.line}": [block] for name, parts in rows.items() for block in parts}
    return {**pages, **apart}


SCRIPTS = _scripts()


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return failures(SCRIPTS, tmp_path_factory.mktemp("docs"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_blocks_of_a_page_run_one_after_another(name: str, failed: dict[str, str]) -> None:
    package = missing_package(SCRIPTS[name])
    if package is not None:
        pytest.skip(f"needs {package}")
    assert name not in failed, failed[name]


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_commands_parse(page: Path) -> None:
    typer = pytest.importorskip("typer")
    from hdet.cli.app import app
    from lab.cli.app import app as lab

    known = typer.main.get_command(app).commands
    for name, *arguments in commands(page, "hdet"):
        known[name].make_context(name, arguments)  # raises for what the command does not know
    known = typer.main.get_command(lab).commands
    for words in commands(page, "python"):
        if words[:2] == ["-m", "lab"]:
            known[words[2]].make_context(words[2], words[3:])


@pytest.mark.parametrize(("program", "module", "fill"), [("hdet", "hdet", "command"), ("python -m lab", "lab", "lab")])
def test_the_command_line_has_a_row_and_a_section_for_every_command(program: str, module: str, fill: str) -> None:
    typer = pytest.importorskip("typer")
    known = list(typer.main.get_command(import_module(f"{module}.cli.app").app).commands)
    text = _text("command-line.md")
    assert re.findall(rf"^\| `{program} (\w+)[^`]*` \|", text, re.MULTILINE) == known
    sections = re.findall(rf"^#+ {program} (\w+)\n+<!-- fill: {fill} (\w+) -->$", text, re.MULTILINE)
    assert sections == [(name, name) for name in known]


def test_the_first_script_is_short_and_needs_the_library_alone() -> None:
    script = blocks(DOCS / "getting-started.md")[0]
    assert len(script.source.splitlines()) <= 24
    assert set(re.findall(r"^(?:import|from) (\w+)", script.source, re.MULTILINE)) == {"torch", "hdet"}


def test_the_reference_of_the_scheduler_has_every_argument() -> None:
    described = (inspect.getdoc(hdet.OneCycleLR) or "").partition("Args:\n")[2]
    named = {
        name
        for names in re.findall(r"^ {4}(\w[\w,\s]*?):", described, re.MULTILINE)
        for name in re.findall(r"\w+", names)
    }
    assert named == set(inspect.signature(hdet.OneCycleLR).parameters)


def test_the_table_of_constants_is_the_code() -> None:
    """Those of the rule and of the judge of losses, as far as a search uses them."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([\d., e/-]+) \| \w", _text("how-it-works.md"), re.MULTILINE)
    found = {}
    for names, values in rows:
        pairs = zip(re.findall(r"\w+", names), values.split(","), strict=True)
        found |= {name: float(Fraction(value.strip())) for name, value in pairs}
    limits = {name: value for name, value in LIMITS._asdict().items() if name not in ("leap", "as_bad")}  # a guard's
    assert found == pytest.approx({**DEFAULT._asdict(), **limits})


def test_the_table_of_extras_has_all_of_them() -> None:
    table = _text("getting-started.md").partition("| extra |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", table, re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", " ".join(rows)))
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert named == set(stated["project"]["optional-dependencies"])


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"^ +- [^:]+: ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


def public_names() -> list[str]:
    """Of hdet, its knobs, jax and integrations. Those of packages that need not be installed are read, not imported."""
    names = [f"hdet.{name}" for name in hdet.__all__ if name not in ("__version__", "knobs")]
    names += [f"hdet.knobs.{name}" for name in hdet.knobs.__all__ if name != "Knob"]
    source = ROOT / "src" / "hdet"
    for file in (source / "jax" / "__init__.py", source / "jax" / "ensemble.py", *source.glob("integrations/*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        stated = [one for one in tree.body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "__all__"]
        listed = [name for one in stated for name in ast.literal_eval(one.value)]
        made = {one.name for one in tree.body if isinstance(one, ast.ClassDef | ast.FunctionDef)}
        if file.stem == "__init__":
            made = set(listed)  # made elsewhere in its package
        if file.name not in ("auto_lr.py", "checkpoints.py"):  # what integrations share
            module = ".".join(file.relative_to(source.parent).with_suffix("").parts).removesuffix(".__init__")
            names += [f"{module}.{name}" for name in listed if name in made]
    return names


def test_public_names_are_found() -> None:
    names = public_names()
    assert {"hdet.auto", "hdet.knobs.lr", "hdet.jax.found", "hdet.jax.ensemble.Ensemble"} <= set(names)
    assert {"hdet.integrations.lightning.AutoLR", "hdet.integrations.accelerate.prepare"} <= set(names)


@pytest.mark.parametrize("name", public_names())
def test_the_reference_has_every_public_name_with_an_example_that_runs(name: str) -> None:
    """A block after its name, which runs above or with its framework's tests, or a doctest in its docstring."""
    sections = re.split(r"^(?=::: |#)", _text("reference.md"), flags=re.MULTILINE)
    (section,) = [one for one in sections if re.match(rf"::: {re.escape(name)}$", one, re.MULTILINE)]
    if not re.search(r"^```py(?:thon)?$", section, re.MULTILINE):
        assert name.count(".") <= 2, "a docstring that may need a package"
        where, _, last = name.rpartition(".")
        known = {"hdet": hdet, "hdet.knobs": hdet.knobs}[where]
        assert ">>> " in (inspect.getdoc(getattr(known, last)) or "")


@pytest.mark.parametrize("page", QUESTIONS, ids=lambda page: page.stem)
def test_an_answer_fits_on_a_screen(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert len(text.splitlines()) <= 45
    assert len(text) <= 2800


def test_the_drawings_are_those_of_the_script(tmp_path: Path) -> None:
    subprocess.run([sys.executable, DOCS / "make_cycle.py", tmp_path], check=True, timeout=PATIENCE)
    for drawn in sorted(tmp_path.glob("*.svg")):
        assert drawn.read_text(encoding="utf-8") == (DOCS / "images" / drawn.name).read_text(encoding="utf-8")


def test_the_front_picture_is_that_of_its_data(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, DOCS / "make_front_picture.py", tmp_path / "front.svg"], check=True, timeout=PATIENCE
    )
    assert (tmp_path / "front.svg").read_text() == (DOCS / "images" / "front.svg").read_text()


def test_the_picture_of_the_parts_is_that_of_the_script(tmp_path: Path) -> None:
    made = tmp_path / "components.svg"
    subprocess.run([sys.executable, DOCS / "make_components.py", made], check=True, timeout=PATIENCE)
    assert made.read_text(encoding="utf-8") == (DOCS / "images" / made.name).read_text(encoding="utf-8")
    named = set(re.findall(r"\bhdet\.(\w+)", made.read_text(encoding="utf-8"))) - {"jax"}
    assert named == {"auto", "Guard", "OneCycleLR", "Ensemble", "save", "load"} <= set(hdet.__all__)


def test_the_tables_of_results_are_those_of_their_data(tmp_path: Path) -> None:
    """Of README.md and of every page that docs/make_results.py fills."""
    for name in ("docs", "lab"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "README.md", tmp_path)
    subprocess.run([sys.executable, tmp_path / "docs" / "make_results.py"], check=True, timeout=PATIENCE)
    asked = [f"docs/questions/{page.name}" for page in QUESTIONS]
    made = [f"docs/{name}.md" for name in ("results", "real-data", "cost", "the-paper", "study", "algoperf")]
    for page in (*made, "README.md", *asked):
        assert (tmp_path / page).read_text(encoding="utf-8") == (ROOT / page).read_text(encoding="utf-8"), page


def test_pictures_and_pages_that_are_linked_exist() -> None:
    for page in PAGES:
        words = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", words)
        assert not [link for link in links if "://" not in link and not (page.parent / link).exists()], page.name


def _text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")
