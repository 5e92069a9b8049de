"""Runs the jobs of a workflow without a runner: each in a fresh clone, with the interpreter and files it would have.

    python tools/run_workflow.py .github/workflows/ci.yml --dry                # every make prints what it would do
    python tools/run_workflow.py .github/workflows/ci.yml --job lint
    python tools/run_workflow.py .github/workflows/release.yml --tag v0.1.0    # what is committed at a tag

Shell steps are run as they stand. Checking out, choosing a Python and passing files between jobs are done as the host
does them; any other action, and any secret, is named and left out. Every job is run, whatever its ``if``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
_EXPRESSION = re.compile(r"\$\{\{ *(.+?) *\}\}")
_NOT_OURS = ("PYTHON", "PYTEST", "VIRTUAL_ENV", "MAKE", "MFLAGS", "GITHUB_", "PIP_CONSTRAINT")
"""Variables that a runner does not have, by how they begin."""


class Failed(Exception):
    """A step failed, or asks for what cannot be done here."""


class Job(NamedTuple):
    """One row of a job's matrix."""

    name: str
    steps: list[dict[str, Any]]
    env: dict[str, str]
    values: dict[str, str]
    """What expressions such as ``matrix.python`` stand for."""


def read(path: Path) -> dict[str, Any]:
    """A workflow; every scalar is a text, as expressions see it."""
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise Failed(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or not {"on", "jobs"} <= set(found):
        raise Failed(f"{path} is no workflow: it must have the keys on and jobs")
    return found


def jobs_of(workflow: Mapping[str, Any], values: Mapping[str, str]) -> Iterator[Job]:
    """Each row of each job, after those that it needs."""
    left: dict[str, Any] = dict(workflow["jobs"])
    while left:
        ready = [name for name, job in left.items() if not set(_names(job.get("needs", []))) & set(left)]
        if not ready:
            raise Failed(f"the jobs {', '.join(left)} need each other")
        for name in ready:
            job = left.pop(name)
            for row in _rows(job.get("strategy", {}).get("matrix", {})):
                label = f"{name} ({', '.join(row.values())})" if row else name
                known = {**values, **{f"matrix.{key}": value for key, value in row.items()}}
                yield Job(label, job["steps"], {**workflow.get("env", {}), **job.get("env", {})}, known)


def _names(needs: str | list[str]) -> list[str]:
    return [needs] if isinstance(needs, str) else needs


def _rows(matrix: Mapping[str, Any]) -> list[dict[str, str]]:
    """Every combination, and the rows that are written out."""
    lists = {key: value for key, value in matrix.items() if key != "include"}
    together = [dict(zip(lists, row, strict=True)) for row in itertools.product(*lists.values())] if lists else []
    return [*together, *matrix.get("include", [])] or [{}]


def expanded(text: str, values: Mapping[str, str]) -> str:
    """A text with its expressions replaced.

    Raises:
        Failed: an expression is not known here.
    """

    def value(found: re.Match[str]) -> str:
        room, _, name = found[1].partition(".")
        if room == "vars":  # those of this machine
            return os.environ.get(name, "")
        if found[1] not in values:
            raise Failed(f"{found[0]} is not known here; known are vars.NAME, {', '.join(sorted(values))}")
        return values[found[1]]

    return _EXPRESSION.sub(value, text)


def runners_environment() -> dict[str, str]:
    """The variables of this process, without those of what runs here."""
    return {key: value for key, value in os.environ.items() if not key.startswith(_NOT_OURS)}


class Runner:
    """Runs jobs one after another, in folders of their own.

    Args:
        source: the repository.
        folder: where clones, interpreters and the files that jobs pass on are.
        tag: which commit is checked out; that of ``HEAD`` if None.
        dry: every ``make`` only prints its commands.
        python: an interpreter for all jobs; if None, each has the version that it asks for.
    """

    def __init__(self, source: Path, folder: Path, tag: str | None, dry: bool, python: str | None) -> None:
        self.source, self.folder, self.tag, self.dry, self.python = source, folder, tag, dry, python
        self.left_out: list[str] = []
        """Actions that were not run."""
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, workflow: Mapping[str, Any], only: str | None = None) -> None:
        """Every job, or those of one name.

        Raises:
            Failed: a step did; no later one is run. Or no job has this name.
        """
        if only is not None and only not in workflow["jobs"]:
            raise Failed(f"there is no job {only!r}; there are {', '.join(workflow['jobs'])}")
        branch = "main" if self.tag is None else self.tag
        for job in jobs_of(workflow, {"github.ref": f"refs/heads/{branch}", "github.event_name": "push"}):
            if only in (None, job.name.partition(" (")[0]):
                self._run_job(job, branch)

    def _run_job(self, job: Job, branch: str) -> None:
        here = Path(tempfile.mkdtemp(prefix="job-", dir=self.folder))
        values = {**job.values, "github.workspace": str(here)}
        env = runners_environment()
        env |= {"CI": "true", "GITHUB_ACTIONS": "true", "GITHUB_REF_NAME": branch, "GITHUB_WORKSPACE": str(here)}
        env |= {key: expanded(value, values) for key, value in job.env.items()}
        if self.dry:
            env["MAKEFLAGS"] = "n"
        for step in job.steps:
            print(f"== {job.name}: {step.get('name') or step.get('uses') or step['run']}", flush=True)
            if "run" in step:
                own = {key: expanded(value, values) for key, value in step.get("env", {}).items()}
                self._shell(job.name, expanded(step["run"], values), here, env | own)
            else:
                given = {key: expanded(value, values) for key, value in step.get("with", {}).items()}
                self._action(step["uses"].partition("@")[0], given, here, env)

    def _shell(self, job: str, script: str, here: Path, env: Mapping[str, str]) -> None:
        """As a runner does it: bash, which stops at the first command that fails."""
        done = subprocess.run(["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script], cwd=here, env=env)
        if done.returncode:
            raise Failed(f"{job}: a step ended with {done.returncode}: {script.strip()}")

    def _action(self, name: str, given: Mapping[str, str], here: Path, env: dict[str, str]) -> None:
        passed = self.folder / "artifacts"
        match name:
            case "actions/checkout":
                wanted = [] if self.tag is None else ["--branch", self.tag]
                clone = ["git", "-c", "advice.detachedHead=false", "clone", "--quiet", *wanted, str(self.source), "."]
                subprocess.run(clone, cwd=here, check=True)
            case "actions/setup-python":
                interpreter = self.python or f"python{given['python-version']}"
                if shutil.which(interpreter) is None:
                    raise Failed(f"{interpreter} is not on the path: install it, or give --python")
                own = (
                    Path(interpreter).name if self.dry else here.name
                )  # make installs nothing then: they can share one
                at = self.folder / f"venv-{own}"
                if not at.exists():
                    subprocess.run([interpreter, "-m", "venv", at], check=True)
                env["PATH"] = f"{at / 'bin'}{os.pathsep}{env['PATH']}"
            case "actions/upload-artifact":
                if not (here / given["path"]).is_dir():
                    raise Failed(f"there is nothing at {given['path']} to pass on")
                shutil.copytree(here / given["path"], passed / given["name"])
            case "actions/download-artifact":
                if not (passed / given["name"]).is_dir():
                    raise Failed(f"no job has passed on {given['name']}")
                shutil.copytree(passed / given["name"], here / given["path"], dirs_exist_ok=True)
            case _:
                print("   left out: it needs the host")
                self.left_out.append(name)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workflow", type=Path)
    parser.add_argument("--job", help="only this one")
    parser.add_argument("--tag", help="check out this tag; what HEAD is if left out")
    parser.add_argument("--dry", action="store_true", help="every make prints what it would do")
    parser.add_argument("--python", help="an interpreter for all jobs, whatever version they ask for")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="workflow-") as folder:
        try:
            Runner(ROOT, Path(folder), given.tag, given.dry, given.python).run(read(given.workflow), given.job)
        except (Failed, OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"run_workflow: {error}")


if __name__ == "__main__":
    main()
