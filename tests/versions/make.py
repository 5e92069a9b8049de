"""Write the checkpoints and journals that every later version of hdet has to load, and the values that they lead to.

    python -m tests.versions.make        # into tests/fixtures/<version>
    python -m tests.versions.make --jax  # the state of hdet.jax.auto, in the environment of `make test-jax`

Run both with the release commit of a version that changes a state, a journal or the rule: ``git diff`` shows whether it
does. Files of a version that is published never change: if there are any, ``--again`` is needed, which is for the time
before. What these runs are is in :mod:`tests.versions.runs` and :mod:`tests.jax.versions`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hdet
from hdet.rule.constants import all_numbers
from tests.versions.runs import FIXTURES, KINDS, replayed, resumed, write


def main() -> None:
    """Write the fixtures of this version."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jax", action="store_true", help="write the state of hdet.jax.auto")
    parser.add_argument("--again", action="store_true", help="replace the files of a version that is not published yet")
    arguments = parser.parse_args()
    folder = FIXTURES / hdet.__version__
    folder.mkdir(parents=True, exist_ok=True)
    there = sorted(file.name for file in folder.glob("jax.*" if arguments.jax else "*.pt"))
    if there and not arguments.again:
        parser.error(f"{folder} has {there[0]} already; add --again if hdet {hdet.__version__} is not published yet")
    if arguments.jax:
        from tests.jax.versions import write_state

        write_state(folder)
    else:
        with tempfile.TemporaryDirectory() as place:
            _write_all(folder, Path(place))


def _write_all(folder: Path, place: Path) -> None:
    """``place``: for the journals of runs that go on, which are no fixtures."""
    told: dict[str, Any] = {"numbers": all_numbers(), "runs": {}, "journals": {}}
    for name in KINDS:
        for file in (folder / f"{name}.pt", folder / f"{name}.jsonl"):
            file.unlink(missing_ok=True)
        write(name, folder)
        journal, whole = folder / f"{name}.jsonl", place / f"{name}.jsonl"
        if KINDS[name].keeps_journal:
            shutil.copy(journal, whole)
        told["runs"][name] = resumed(name, folder, whole if KINDS[name].keeps_journal else None)
        if KINDS[name].keeps_journal:
            told["journals"][name] = {"as it is": replayed(journal), "continued": replayed(whole)}
    for lock in folder.glob("*.hdet-lock"):
        lock.unlink()
    (folder / "pinned.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
