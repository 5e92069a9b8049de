"""``hdet doctor``: what it says of a machine, and what it finds wrong with one."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import hdet
from hdet.cli import doctor
from tests.cli.command import HDET, hdet_here, run, started


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Versions to be pretended; None: not installed."""
    pretended: dict[str, str | None] = {"plotly": "6.0", "jinja2": "3.1", "rich": "14.0", "typer": "0.20"}
    needs = ["torch>=2.6", 'plotly>=5.20; extra == "report"', 'lightning>=2.4; extra == "lightning"']
    needs += ['scikit-learn>=99; extra == "dev"', 'hdet[test,cli]; extra == "dev"']

    def version(name: str) -> str:
        found = pretended.get(name, str(torch.__version__) if name == "torch" else None)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: needs)
    return pretended


def test_it_says_what_a_report_needs_and_leaves_nothing(
    tmp_path: Path, installed: dict[str, str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    installed |= {"lightning": "2.5.1", "jax": "0.7.0", "numpy": numpy.__version__}
    said = hdet_here(capsys, "doctor", "--checkpoints", "new/folder")
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    assert lines[0].startswith(f"hdet: {hdet.__version__}, Python {platform.python_version()}, {platform.system()}")
    assert lines[1] == f"packages: torch {torch.__version__}, numpy {numpy.__version__}"
    assert lines[2:4] == [
        "command line: jinja2 3.1, plotly 6.0, rich 14.0, typer 0.20",
        "frameworks: jax 0.7.0, lightning 2.5.1",
    ]
    assert f"{os.cpu_count()} CPU cores" in lines[4]
    assert ("GPUs: none" in lines[4]) is (torch.cuda.device_count() == 0)
    assert "gloo" in lines[4]
    assert lines[5].startswith("journal: can be written in ., ")
    assert lines[6].startswith("checkpoint: can be written in new/folder, ")
    assert len(lines) == 7
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("package", "version", "words"),
    [
        (
            "lightning",
            "2.3.9",
            "lightning 2.3.9 is older than the 2.4 that hdet needs; pip install --upgrade lightning",
        ),
        ("plotly", None, "`hdet report` and `hdet compare -o` need plotly; run `pip install"),
        ("plotly", "5.3", "plotly 5.3 is older than the 5.20 that hdet needs; pip"),
    ],
)
def test_packages_that_do_not_fit(
    package: str,
    version: str | None,
    words: str,
    installed: dict[str, str | None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    installed[package] = version
    said = hdet_here(capsys, "doctor", "--json")
    assert said.code == 1
    (wrong,) = said.json["will_not_work"]
    assert wrong.startswith(words)
    assert f"will not work: {wrong}\n" in said.err
    assert said.err.endswith("hdet: things that will not work: 1; the lines above name them\n")
    assert list(said.json["found"]) == [
        *("hdet", "packages", "command line", "frameworks", "devices", "journal", "checkpoint"),
    ]


def test_folders_that_cannot_be_written(
    tmp_path: Path, installed: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root, only a file in the way refuses."""
    (tmp_path / "file").touch()
    said = hdet_here(capsys, "doctor", "--journal", "file/below")
    assert (said.code, said.out) == (2, "")
    assert said.complaint.startswith(
        "hdet: --journal must be a folder, but got --journal='file/below'; name the folder"
    )

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(doctor.Journal, "write", full)
    monkeypatch.setattr("hdet.checkpoint.file.write", full)
    said = hdet_here(capsys, "doctor")
    assert said.code == 1
    for what in ("journal", "checkpoint"):
        assert f"\n{what}: cannot be written in .\n" in said.out
        assert f"will not work: {what} cannot be written in .: [Errno 28] No space left on device; name" in said.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_file_system_without_locks(
    installed: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "locked", lambda *_: None)
    said = hdet_here(capsys, "doctor")
    assert (said.code, "will not work: journal in .: there are no locks, so that two runs" in said.out) == (1, True)


def test_a_driver_that_does_not_fit(
    installed: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_found() -> int:
        import warnings

        warnings.warn("CUDA initialization: the NVIDIA driver is too old", UserWarning, stacklevel=1)
        return 0

    monkeypatch.setattr(torch.cuda, "device_count", none_found)
    said = hdet_here(capsys, "doctor")
    assert (said.code, "will not work: GPUs: CUDA initialization: the NVIDIA driver is too old" in said.out) == (
        1,
        True,
    )


def test_a_torch_that_cannot_be_imported() -> None:
    code = "import sys; sys.modules['torch'] = None; from hdet.cli import main; main(['doctor'])"
    said = run(sys.executable, "-c", code)
    assert said.code == 1
    assert "; others are unknown without torch\n" in said.out
    assert "will not work: torch cannot be imported: ModuleNotFoundError: " in said.out
    assert "journal: can be written" in said.out
    assert "checkpoint: " not in said.out


def test_the_first_lines_do_not_wait_for_torch() -> None:
    """torch hangs here, as it may on a broken driver."""
    code = """if True:
        import sys, time
        class Hangs:
            def find_spec(self, name, *_):
                if name == "torch":
                    time.sleep(3600)
        sys.meta_path.insert(0, Hangs())
        from hdet.cli import main
        main(["doctor"])
    """
    with started(sys.executable, "-uc", code) as process:
        assert process.stdout is not None
        names = [process.stdout.readline().partition(":")[0] for _ in range(4)]
        process.kill()
    assert names == ["hdet", "packages", "command line", "frameworks"]


def test_through_the_real_entry_point() -> None:
    said = run(*HDET, "doctor", "--json")
    assert said.json["found"]["hdet"].startswith(f"{hdet.__version__}, Python ")
    assert said.code == (1 if said.json["will_not_work"] else 0)
