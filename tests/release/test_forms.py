"""The forms for issues: they are well formed, and what they ask for exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from hdet.cli.app import app
from tests.release.tree import ROOT

FOLDER = ROOT / ".github" / "ISSUE_TEMPLATE"
FORMS = sorted(path for path in FOLDER.glob("*.yml") if path.name != "config.yml")


def form(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def asked(name: str) -> set[str]:
    """The labels of what a form demands."""
    fields = form(FOLDER / name)["body"]
    return {one["attributes"]["label"] for one in fields if one.get("validations", {}).get("required")}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_well_formed(path: Path) -> None:
    found = form(path)
    assert set(found) == {"name", "description", "labels", "body"}
    fields = [one for one in found["body"] if one["type"] != "markdown"]
    for one in fields:
        assert set(one) <= {"type", "id", "attributes", "validations"}
        assert one["type"] == "textarea"
        assert set(one["attributes"]) <= {"label", "description", "render"}
    ids = [one["id"] for one in fields]
    assert len(set(ids)) == len(ids)
    assert any(one.get("validations") == {"required": True} for one in fields)


def test_there_is_one_for_each_kind_and_no_other_way() -> None:
    assert [path.stem for path in FORMS] == ["bug", "question", "wrong-rate"]
    assert form(FOLDER / "config.yml") == {"blank_issues_enabled": False}


def test_they_ask_for_what_is_needed_to_answer() -> None:
    assert "What does `hdet doctor` print?" in asked("bug.yml")
    rate = asked("wrong-rate.yml")
    assert {"What does `hdet export run.jsonl` write?", "What does `hdet doctor` print?"} <= rate
    assert any("`print(scheduler.found)`" in label for label in rate)


def test_the_commands_that_they_name_exist() -> None:
    known = set(typer.main.get_command(app).commands)
    named = {name for path in FORMS for name in re.findall(r"`hdet (\w+)", path.read_text(encoding="utf-8"))}
    assert "export" in named
    assert named - {"doctor"} <= known


@pytest.mark.parametrize("path", [*FORMS, ROOT / "SECURITY.md", ROOT / ".github" / "pull_request_template.md"])
def test_files_that_they_name_exist(path: Path) -> None:
    named = re.findall(r"[\w/-]+\.md\b", path.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_what_is_kept_up_to_date_is_there() -> None:
    updates = form(ROOT / ".github" / "dependabot.yml")["updates"]
    assert {one["package-ecosystem"]: one["directory"] for one in updates} == {"github-actions": "/", "pip": "/"}
