"""recipe/recipe.yaml, for conda-forge, says what pyproject.toml says."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml

import hdet
from tests.release.tree import ROOT

RECIPE = ROOT / "recipe" / "recipe.yaml"
STATED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ON_CONDA_FORGE = {"torch": "pytorch"}
"""Packages that have another name there."""


@pytest.fixture
def recipe() -> dict[str, Any]:
    """Without its context: ``${{ name }}`` is what that says."""
    text = RECIPE.read_text(encoding="utf-8")
    context = yaml.safe_load(text)["context"]
    found = yaml.safe_load(re.sub(r"\$\{\{ (\w+) \}\}", lambda name: str(context[name[1]]), text))
    assert isinstance(found, dict)
    return found


def as_conda_writes(requirement: str) -> str:
    """``torch>=2.6`` is ``pytorch >=2.6``.

    >>> as_conda_writes("torch>=2.6")
    'pytorch >=2.6'
    """
    name, bound = re.fullmatch(r"([\w-]+)(.*)", requirement).groups()  # type: ignore[union-attr]
    return f"{ON_CONDA_FORGE.get(name, name)} {bound}".strip()


def test_it_has_the_sections_of_the_format_and_no_others(recipe: dict[str, Any]) -> None:
    sections = ["schema_version", "context", "package", "source", "build", "requirements", "tests", "about", "extra"]
    assert list(recipe) == sections
    assert recipe["schema_version"] == 1
    assert recipe["build"]["noarch"] == "python"


def test_name_version_license_and_summary_are_the_packages(recipe: dict[str, Any]) -> None:
    project = STATED["project"]
    assert recipe["package"] == {"name": project["name"], "version": hdet.__version__}
    assert recipe["about"]["license"] == project["license"]
    assert [recipe["about"]["license_file"]] == project["license-files"]
    assert recipe["about"]["summary"] == project["description"]


def test_requirements_are_the_packages(recipe: dict[str, Any]) -> None:
    project, requirements = STATED["project"], recipe["requirements"]
    python = project["requires-python"]
    assert requirements["run"] == [f"python {python}", *map(as_conda_writes, project["dependencies"])]
    build = map(as_conda_writes, STATED["build-system"]["requires"])
    assert requirements["host"] == [f"python {python.removeprefix('>=')}.*", "pip", *build]
    assert recipe["tests"][0]["python"]["python_version"] == f"{python.removeprefix('>=')}.*"
    scripts = [f"{name} = {what}" for name, what in project["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == scripts


def test_the_source_is_the_sdist_on_pypi(recipe: dict[str, Any]) -> None:
    source = recipe["source"]
    assert source["url"] == f"https://pypi.org/packages/source/h/hdet/hdet-{hdet.__version__}.tar.gz"
    assert re.fullmatch(r"[0-9a-f]{64}", source["sha256"])
    assert "recipe/recipe.yaml" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), "who fills in the sha256"


def test_rattler_build_reads_it() -> None:
    """Not in the extra release: it takes 83 MB."""
    rattler = pytest.importorskip("rattler_build", reason="needs rattler_build: pip install py-rattler-build")
    [rendered] = rattler.Stage0Recipe.from_file(RECIPE).render(rattler.VariantConfig())
    assert rendered.recipe.package.name == "hdet"
