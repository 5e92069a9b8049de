"""What a bug report has to say of a machine, and what will not work there."""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from hdet._version import __version__
from hdet.checks import must_be
from hdet.errors import INSTALL, REPORTS, HdetError
from hdet.files import locked, path_of
from hdet.journal.file import Journal

_CORE = ("torch", "numpy")
_FRAMEWORKS = (
    *("accelerate", "deepspeed", "equinox", "fastai", "flax", "jax", "lightning", "optax", "peft", "pytorch-lightning"),
    *("timm", "torchft", "torchtitan", "transformers", "trl", "ultralytics"),
)
_EXTRAS = (None, "cli", "report", "jax", "lightning", "transformers", "deepspeed", "torchtitan", "torchft")
"""Those of which hdet itself imports something; None: what it always needs."""
_NEED = re.compile(r"([\w.-]+)\s*>=\s*([\d.]+)(?:.*\bextra == ['\"]([\w-]+)['\"])?")
"""A requirement as an installed package states it: name, least version, extra."""


class Finding(NamedTuple):
    """One line of the answer."""

    name: str
    says: str
    wrong: Sequence[str] = ()
    """What will not work."""


def findings(journal: Path, checkpoints: Path) -> Iterator[Finding]:
    """All of them, one after the other: the first at once, and that of torch after some seconds.

    Args:
        journal: the folder in which a journal is to be written.
        checkpoints: that in which a checkpoint is.
    """
    journals, others = _folder_for(journal, "--journal"), _folder_for(checkpoints, "--checkpoints")
    yield Finding(
        "hdet", f"{__version__}, Python {platform.python_version()}, {platform.system()} {platform.release()}"
    )
    yield Finding("packages", _listed(_CORE), [*_unfit()])
    yield Finding("command line", _listed(REPORTS))
    yield Finding("frameworks", _listed(_FRAMEWORKS))
    machine = _machine()
    yield machine
    yield _written("journal", journal, journals, _try_journal)
    if not machine.wrong:
        yield _written("checkpoint", checkpoints, others, _try_checkpoint)


def _line(text: object) -> str:
    return " ".join(str(text).split())


# -- packages ----------------------------------------------------------------------------------------------------------


def _version_of(package: str) -> str | None:
    """Nothing is imported."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _listed(packages: Sequence[str]) -> str:
    found = [f"{name} {version}" for name in packages if (version := _version_of(name)) is not None]
    return ", ".join(found) or "none"


def _unfit() -> Iterator[str]:
    """A line for each package that hdet cannot use, by what its own package requires."""
    try:
        needs = [_NEED.match(line) for line in metadata.requires("hdet") or ()]
    except metadata.PackageNotFoundError:  # it is run from its sources
        return
    for name, least, extra in (need.groups() for need in needs if need is not None and need[3] in _EXTRAS):
        version = _version_of(name)
        if version is not None and _numbers(version) < _numbers(least):
            yield f"{name} {version} is older than the {least} that hdet needs; pip install --upgrade {name}"
        elif version is None and extra == "report":
            yield f"`hdet report` and `hdet compare -o` need {name}; {INSTALL}"


def _numbers(version: str) -> list[int]:
    """To compare versions by.

    >>> _numbers("2.13.0+cpu") > _numbers("2.6")
    True
    """
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]


# -- devices -----------------------------------------------------------------------------------------------------------


def _machine() -> Finding:
    """What torch sees. That a driver does not fit is a warning of torch's."""
    cores = f"{platform.machine()}, {os.cpu_count()} CPU cores"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            devices, ranks = _seen_by_torch()
        except Exception as error:  # any: a library that is missing, a wheel of another system
            wrong = f"torch cannot be imported: {type(error).__name__}: {_line(error)}; install it again"
            return Finding("devices", f"{cores}; others are unknown without torch", [wrong])
    told = [f"GPUs: {_line(one.message)}" for one in caught if "CUDA" in str(one.message)]
    if not ranks:
        told.append("several ranks: this torch was built without torch.distributed; install another build")
    return Finding("devices", f"{cores}; {devices}; ranks by {', '.join(ranks) or 'nothing'}", told)


def _seen_by_torch() -> tuple[str, list[str]]:
    """Its devices, and its means of communication."""
    import torch
    import torch.distributed as dist

    cuda: Any = torch.cuda
    found = [
        f"{one.name} ({_gib(one.total_memory)})" for one in map(cuda.get_device_properties, range(cuda.device_count()))
    ]
    found += ["Apple's (mps)"] if torch.backends.mps.is_available() else []
    found += [str(torch.xpu.get_device_name(i)) for i in range(torch.xpu.device_count())]
    built_for = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda or 'none'}"
    ranks = [name for name in ("gloo", "nccl", "mpi") if dist.is_available() and dist.is_backend_available(name)]
    return f"GPUs: {', '.join(found) or 'none'}; torch is built for {built_for}", ranks


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


# -- folders -----------------------------------------------------------------------------------------------------------


def _folder_for(path: Path, option: str) -> Path:
    """The folder itself or, if it is not there yet, the one in which it would be made."""
    found = path_of(path, option).absolute()
    while not found.exists() and found != found.parent:
        found = found.parent
    must_be("a folder", found.is_dir(), "name the folder that files are to be in", **{option: str(path)})
    return found


def _written(what: str, given: Path, folder: Path, attempt: Callable[[Path], list[str]]) -> Finding:
    """Whether such a file can be written: it is, in a folder of its own, which is removed."""
    try:
        with tempfile.TemporaryDirectory(prefix=".hdet-doctor-", dir=folder) as place:
            wrong = [f"{what} in {given}: {text}" for text in attempt(Path(place))]
        return Finding(what, f"can be written in {given}, {_gib(shutil.disk_usage(folder).free)} free", wrong)
    except (HdetError, OSError, RuntimeError) as error:
        said = f"cannot be written in {given}"
        return Finding(what, said, [f"{what} {said}: {_line(error)}; name another folder"])


def _try_journal(place: Path) -> list[str]:
    """What will not work, beside errors."""
    journal = Journal(place / "run.jsonl")
    journal.write({"run": "doctor", "kind": "header"})
    journal.close()
    with (place / "lock").open("wb", buffering=0) as file:
        has_locks = locked(file, 0.0) is not None
    return [] if has_locks else ["there are no locks, so that two runs which write to one file are not noticed"]


def _try_checkpoint(place: Path) -> list[str]:
    from hdet.checkpoint.file import newest_whole, read, write

    write(place / "run.pt", {"step": 1}, keep=1)
    read(newest_whole(place / "run.pt").file)
    return []
