"""The workflows: what they may do, and that their steps run, as far as a machine without the host can tell."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tools.rehearse_release import ready, tagged
from tools.release import refusals
from tools.run_workflow import Failed, Runner, expanded, jobs_of, read

import hdet
from tests.release.tree import ROOT

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
STATED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PYTHONS = [line.rpartition(" ")[2] for line in STATED["project"]["classifiers"] if "Python :: 3." in line]
CI, RELEASE = read(FOLDER / "ci.yml"), read(FOLDER / "release.yml")
TAG = f"v{hdet.__version__}"
ASKED = (
    *("pyproject.toml", "src/hdet/_version.py", "CHANGELOG.md", "CITATION.cff", "recipe/recipe.yaml", "README.md"),
    "docs/getting-started.md",
)
"""What tools/release.py reads."""


def steps_of(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


# -- what they say ----------------------------------------------------------------------------------------------------


def test_actions_are_pinned_by_commit_or_listed() -> None:
    """The commit is followed by the version that it is. Those that could not be looked up are in CONTRIBUTING.md."""
    listed = re.findall(r"^- `([\w./-]+@v[\d.]+)`$", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE)
    uses = [one for path in WORKFLOWS for one in re.findall(r"uses: (.+)$", path.read_text("utf-8"), re.MULTILINE)]
    assert len(uses) == len([step for path in WORKFLOWS for step in steps_of(read(path)) if "uses" in step]) > 0
    assert {one for one in uses if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one)} == set(listed)


def test_only_publishing_may_do_more_than_read() -> None:
    granted = {
        (path.stem, name): job.get("permissions", read(path)["permissions"])
        for path in WORKFLOWS
        for name, job in read(path)["jobs"].items()
    }
    assert granted.pop(("release", "publish")) == {"id-token": "write"}
    assert list(granted.values()) == [{"contents": "read"}] * len(granted)
    assert "secrets." not in "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)


def test_every_python_that_is_claimed_is_tried() -> None:
    for workflow in (CI, RELEASE):
        assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == PYTHONS
    nightly = {row["target"]: row["python"] for row in CI["jobs"]["nightly"]["strategy"]["matrix"]["include"]}
    assert (nightly["test-oldest"], nightly["test-newest"]) == (PYTHONS[0], PYTHONS[-1])


def test_every_kind_of_test_is_run() -> None:
    """What `make test-all` does, and what has an environment of its own."""
    run = {row.values["matrix.target"] for row in jobs_of(CI, {}) if "matrix.target" in row.values}
    run |= {step["run"].removeprefix("make ") for step in steps_of(CI) if "run" in step}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(test[\w-]*|lint|docs):.*##", makefile, re.MULTILINE))
    assert targets - {"test-all", "test-wheel"} <= run


def test_a_tag_is_published_after_its_tests_and_by_trust_alone() -> None:
    jobs = RELEASE["jobs"]
    assert RELEASE["on"] == {"push": {"tags": ["v*"]}}
    assert (jobs["test"]["needs"], jobs["publish"]["needs"]) == ("build", "test")
    assert jobs["publish"]["environment"]["name"] == "pypi"
    last = jobs["publish"]["steps"][-1]
    assert last["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert last["with"] == {"attestations": "true"}


# -- what is refused --------------------------------------------------------------------------------------------------


def test_nothing_can_be_published_from_here() -> None:
    assert any(why.startswith("address in pyproject.toml is empty") for why in refusals(TAG))


def test_a_tag_that_is_ready_is_not_refused(tmp_path: Path) -> None:
    here = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "someone/hdet"}
    assert refusals(TAG, ready(tmp_path, ASKED), here) == []


@pytest.mark.parametrize(
    ("tag", "repository", "file", "line", "written", "refused"),
    [
        ("v9.9.9", "someone/hdet", None, "", "", f"the tag is v9.9.9, and the version {hdet.__version__}"),
        (hdet.__version__, "someone/hdet", None, "", "", f"the tag is {hdet.__version__}, and"),
        (TAG, "fork/hdet", None, "", "", "but this is https://github.com/fork/hdet"),
        (TAG, "someone/hdet", "pyproject.toml", 'address = ".+"', 'address = ""', "address in pyproject.toml is empty"),
        (TAG, "someone/hdet", "CHANGELOG.md", "## .+", "## [Unreleased]", "CHANGELOG.md begins with ## [Unreleased]"),
        (TAG, "someone/hdet", "CITATION.cff", "repository-code: .+hdet", "", "CITATION.cff has another address"),
        (
            TAG,
            "someone/hdet",
            "recipe/recipe.yaml",
            "  version: .+",
            "  version: 9.9.9",
            "recipe.yaml has version 9.9.9",
        ),
        (TAG, "someone/hdet", "README.md", "#.+", "# from PyPI, once 0.1.0 is there", "README.md says from PyPI, once"),
    ],
    ids=["another tag", "no v", "a fork", "no address", "no day", "citation", "recipe", "not on PyPI yet"],
)
def test_a_tag_that_is_not_ready_is_refused(
    tag: str, repository: str, file: str | None, line: str, written: str, refused: str, tmp_path: Path
) -> None:
    ready(tmp_path, ASKED)
    if file is not None:
        text, found = re.subn(f"^{line}$", written, (tmp_path / file).read_text("utf-8"), count=1, flags=re.MULTILINE)
        assert found == 1
        (tmp_path / file).write_text(text, encoding="utf-8")
    here = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": repository}
    [why] = refusals(tag, tmp_path, here)
    assert refused in why


# -- that they run ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_steps_of_ci_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All jobs, each in a clone; make prints its commands."""
    runner = Runner(tagged(tmp_path / "source"), tmp_path / "runs", tag=None, dry=True, python=sys.executable)
    runner.run(CI)
    assert runner.left_out == []
    said = capfd.readouterr().out
    assert said.count("-m pytest ") >= len(PYTHONS) + 7
    assert "build/oldest/bin/python -m pip install 'torch==" in said


@pytest.mark.slow
def test_the_steps_of_a_release_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Really, but for the tests of the wheel, whose commands are printed, and for publishing."""
    source = tagged(tmp_path / "source")
    Runner(source, tmp_path / "runs", tag=TAG, dry=False, python=sys.executable).run(RELEASE, "build")
    said = capfd.readouterr().out
    assert f"{TAG} can be published" in said
    assert said.count("PASSED") == 2
    wheel = f"hdet-{hdet.__version__}-py3-none-any.whl"
    assert {file.name for file in (tmp_path / "runs" / "artifacts" / "dist").iterdir()} == {
        wheel,
        f"hdet-{hdet.__version__}.tar.gz",
    }
    rest = Runner(source, tmp_path / "runs", tag=TAG, dry=True, python=sys.executable)
    rest.run(RELEASE, "test")
    assert capfd.readouterr().out.count(f"cp dist/{wheel} build/wheel/") == len(PYTHONS)
    rest.run(RELEASE, "publish")
    assert rest.left_out == ["pypa/gh-action-pypi-publish"]


@pytest.mark.slow
def test_a_release_stops_at_the_first_refusal(tmp_path: Path) -> None:
    source = tagged(tmp_path / "source", "v9.9.9")
    workflow = {**RELEASE, "jobs": {"build": RELEASE["jobs"]["build"]}}
    runner = Runner(source, tmp_path / "runs", tag="v9.9.9", dry=True, python=sys.executable)
    with pytest.raises(Failed, match=r"a step ended with 1: python tools/release.py"):
        runner.run(workflow)
    assert not (tmp_path / "runs" / "artifacts").exists()


def test_an_expression_that_is_not_known_is_refused() -> None:
    assert expanded("a ${{ matrix.python }} b", {"matrix.python": "3.11"}) == "a 3.11 b"
    with pytest.raises(Failed, match=r"\$\{\{ secrets.TOKEN \}\} is not known here"):
        expanded("${{ secrets.TOKEN }}", {})


def test_rows_and_order_of_jobs() -> None:
    matrix = {"python": ["1", "2"], "include": [{"python": "3"}]}
    jobs = {"b": {"needs": "a", "steps": []}, "a": {"steps": [], "strategy": {"matrix": matrix}}}
    assert [job.name for job in jobs_of({"jobs": jobs}, {})] == ["a (1)", "a (2)", "a (3)", "b"]
    with pytest.raises(Failed, match="need each other"):
        list(jobs_of({"jobs": {"a": {"needs": "b", "steps": []}, "b": {"needs": ["a"], "steps": []}}}, {}))


def test_a_job_that_is_not_there_is_no_success(tmp_path: Path) -> None:
    runner = Runner(ROOT, tmp_path / "runs", tag=None, dry=True, python=sys.executable)
    with pytest.raises(Failed, match="there is no job 'tset'; there are lint, test, jax, docs, nightly"):
        runner.run(CI, "tset")


def test_a_file_that_is_no_workflow_is_refused(tmp_path: Path) -> None:
    for text, words in (("on: push\njobs: [", "cannot be read: .*line 2"), ("[]", "must have the keys on and jobs")):
        (tmp_path / "ci.yml").write_text(text, encoding="utf-8")
        with pytest.raises(Failed, match=f"(?s){words}"):
            read(tmp_path / "ci.yml")
