"""Releases a copy of this working tree to nobody: tag, build, install, use, uninstall.

    python tools/rehearse_release.py                               # some minutes
    python tools/rehearse_release.py --make test-wheel --make test-oldest --make test-newest     # hours

The copy gets a made-up address and what else tools/release.py asks for. release.yml builds it. Then the files alone are
installed into an empty environment, README's blocks are pasted and the scripts of the sdist's examples/ are run by the
lines that they name, if what they import is there. What all that needs is kept in build/rehearsal, so that only the
first rehearsal asks a registry. The last lines are a table for the record.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tools.release import INSTALLING, NOT_YET  # noqa: E402  # a script's path has tools/ alone
from tools.run_workflow import Failed, Runner, read, runners_environment  # noqa: E402  # a script's path has tools/ alone

ADDRESS = "https://github.com/someone/hdet"
"""Made up, for rehearsals and tests: the repository has no address yet."""
_WHEELS = ROOT / "build" / "rehearsal"
_BESIDE = ["scikit-learn"]
"""What the examples need beside hdet: it has the digits."""


# -- a repository that could be released ------------------------------------------------------------------------------


def copy_to(folder: Path, address: str = ADDRESS, names: Sequence[str] = ()) -> Path:
    """Copy some files, or all that git knows or would add, with the address in its place."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", *names]
    found = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, found):
        if (ROOT / name).is_file():  # not one that was removed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    _rewrite(folder / "pyproject.toml", r'^address = ".*"$', f'address = "{address}"')
    return folder


def ready(folder: Path, names: Sequence[str] = ()) -> Path:
    """The same, with nothing left that tools/release.py refuses."""
    copy_to(folder, names=names)
    _rewrite(folder / "CHANGELOG.md", r"^## .+$", f"## [{version_of(folder)}] - 2026-12-31")
    for name in INSTALLING:
        _rewrite(folder / name, NOT_YET, "from PyPI")
    _rewrite(folder / "CITATION.cff", r"^license: .+$", rf"\g<0>\nrepository-code: {ADDRESS}")
    return folder


def tagged(folder: Path, tag: str | None = None) -> Path:
    """The same as a repository of its own, with a tag, by default that of its version."""
    ready(folder)
    git = ["git", "-c", "user.name=someone", "-c", "user.email=someone@example.org"]
    tag = tag or f"v{version_of(folder)}"
    for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "Released"], ["tag", tag]):
        subprocess.run([*git, *words], cwd=folder, check=True)
    return folder


def version_of(folder: Path) -> str:
    """What is in _version.py."""
    text = (folder / "src/hdet/_version.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


def _rewrite(file: Path, line: str, written: str) -> None:
    """Replace the first line of a kind."""
    text, found = re.subn(line, written, file.read_text(encoding="utf-8"), count=1, flags=re.MULTILINE)
    if not found:
        raise Failed(f"{file.name} has no line such as {line}")
    file.write_text(text, encoding="utf-8")


# -- what a user does -------------------------------------------------------------------------------------------------


def commands_in(script: Path) -> list[list[str]]:
    """The lines of a script's docstring that run it, without options in brackets; none if some need each other."""
    described = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    lines = re.findall(rf"^ *((?:python|torchrun) .*examples/{script.name}[^\[\n]*)", described, re.MULTILINE)
    words = [shlex.split(line, comments=True) for line in lines]
    return [] if any("&" in one for one in words) else words


def imports_of(script: Path) -> set[str]:
    """The packages that a script imports, without Python's own."""
    tree = list(ast.walk(ast.parse(script.read_text(encoding="utf-8"))))
    plain = {alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names}
    plain |= {node.module for node in tree if isinstance(node, ast.ImportFrom) and node.module}
    return {name.partition(".")[0] for name in plain} - sys.stdlib_module_names


def left_behind(before: Iterable[Path], after: Iterable[Path]) -> list[Path]:
    """New files, without what Python keeps of other packages' code."""
    return sorted(one for one in {*after} - {*before} if "__pycache__" not in one.parts or "hdet" in one.parts)


class Rehearsal:
    """The steps, and how long each took.

    Args:
        folder: empty; everything happens there.
        wheels: where the files of other packages are kept.
    """

    def __init__(self, folder: Path, wheels: Path) -> None:
        self.folder, self.wheels = folder, wheels
        self.rows: list[str] = []
        self.env = runners_environment()

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        print(f"== {what}", flush=True)
        began = time.monotonic()
        yield
        self.rows.append(f"| {what} | {time.monotonic() - began:.0f} s |")

    def call(self, *command: object, cwd: Path | None = None) -> None:
        """Run a command of the environment, or of this machine."""
        done = subprocess.run([str(part) for part in command], cwd=cwd or self.folder, env=self.env)
        if done.returncode:
            raise Failed(f"{shlex.join(map(str, command))} ended with {done.returncode}")

    def run(self, targets: Sequence[str]) -> None:
        """Everything, and then some targets of the Makefile at the tag.

        Raises:
            Failed: a step did; no later one is run.
        """
        source, runs = self.folder / "source", self.folder / "runs"
        with self.step("a copy with an address, a changelog with its day, and the tag"):
            tagged(source)
        tag = f"v{version_of(source)}"
        with self.step("the job build of release.yml: nothing refused, sdist, wheel, `twine check --strict`"):
            workflow = read(source / ".github/workflows/release.yml")
            Runner(source, runs, tag=tag, dry=False, python=sys.executable).run(workflow, "build")
        [wheel], [sdist] = (list((runs / "artifacts/dist").glob(f"*{end}")) for end in (".whl", ".tar.gz"))
        self._use(wheel, sdist, source)
        for target in targets:
            with self.step(f"`make {target}`"):
                self.call("make", target, *([f"WHEEL={wheel}"] if target == "test-wheel" else []), cwd=source)

    def _use(self, wheel: Path, sdist: Path, source: Path) -> None:
        stated = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))
        extras = stated["project"]["optional-dependencies"]
        needed = [*stated["project"]["dependencies"], *extras["cli"], *extras["report"], *_BESIDE]
        at = self.folder / "env"
        self.call(sys.executable, "-m", "venv", at)
        self.env["PATH"] = f"{at / 'bin'}{os.pathsep}{self.env['PATH']}"
        pip = ["python", "-m", "pip", "--quiet"]
        if not self.wheels.is_dir():
            with self.step("other packages fetched, once"):
                build = stated["build-system"]["requires"]
                self.call(*pip, "download", "-c", source / "constraints.txt", "-d", self.wheels, *needed, *build)
        from_files = [*pip, "install", "--no-index", "--find-links", self.wheels]
        with self.step("an empty environment with what hdet needs, from files"):
            self.call(*from_files, *needed)
        before = set(at.rglob("*"))
        with self.step("the sdist installed with no network, imported, uninstalled: nothing is left"):
            self.call(*from_files, "--no-deps", sdist)
            self.call("python", "-c", "import hdet; hdet.auto")
            self._uninstall(pip, at, before)
        with self.step("the wheel installed with no network"):
            self.call(*from_files, f"{wheel}[cli,report]")
        unpacked = self.folder / "unpacked"
        with tarfile.open(sdist) as packed:
            packed.extractall(unpacked, filter="data")
        [unpacked] = unpacked.iterdir()
        self._paste(unpacked / "README.md")
        self._examples(unpacked)
        with self.step("uninstalled: nothing is left"):
            self._uninstall(pip, at, before)

    def _uninstall(self, pip: Sequence[str], at: Path, before: set[Path]) -> None:
        self.call(*pip, "uninstall", "--yes", "hdet")
        if left := left_behind(before, at.rglob("*")):
            raise Failed(f"uninstalling left {', '.join(map(str, left))}")

    def _paste(self, readme: Path) -> None:
        """Each block of Python as a script in an empty folder, and the commands on the journal of the first."""
        code = re.findall(r"^```python\n(.*?)^```$", readme.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        for number, block in enumerate(code):
            here = self.folder / f"block-{number}"
            here.mkdir()
            (here / "script.py").write_text(block, encoding="utf-8")
            with self.step(f"block {number + 1} of README.md"):
                self.call("python", "script.py", cwd=here)
        with self.step("`hdet export` and `hdet report` of its journal"):
            self.call("hdet", "export", "run.jsonl", "-o", "schedule.csv", cwd=self.folder / "block-0")
            self.call("hdet", "report", "run.jsonl", cwd=self.folder / "block-0")

    def _examples(self, unpacked: Path) -> None:
        known = {"examples", "hdet", "numpy", "sklearn", "torch"}
        for script in sorted((unpacked / "examples").glob("*.py")):
            if missing := imports_of(script) - known:
                self.rows.append(f"| examples/{script.name}: left out, needs {', '.join(sorted(missing))} | |")
                continue
            with self.step(f"examples/{script.name}, every line of its docstring that runs it"):
                for command in commands_in(script):
                    self.call(*command, cwd=unpacked)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", action="append", default=[], help="then run this target at the tag; may be repeated")
    parser.add_argument("--wheels", type=Path, default=_WHEELS, help="where other packages are kept (%(default)s)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        rehearsal = Rehearsal(Path(folder), given.wheels.resolve())
        try:
            rehearsal.run(given.make)
        except (Failed, OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"rehearse_release: {error}")
        print("\n".join(["| step | took |", "| --- | ---: |", *rehearsal.rows]))


if __name__ == "__main__":
    main()
