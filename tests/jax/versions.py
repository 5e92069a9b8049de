"""A small run of ``hdet.jax.auto`` whose state is kept in ``tests/fixtures``, and loaded by later versions of hdet.

It must stay as it is. The state is a file of numpy's, with an array for each name in the tree, as any tool may write.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_flatten_with_path

import hdet.jax

STEPS, CUT = 120, 40
Params = dict[str, Any]
_INDEX = np.arange(16 * 4, dtype=np.float64).reshape(16, 4)


def _params() -> Params:
    w = np.sin(np.arange(32.0).reshape(4, 8))
    return {"w": jnp.asarray(w / 2, jnp.float32), "b": jnp.zeros(8), "v": jnp.asarray(np.cos(w[:1].T), jnp.float32)}


def _batch(t: int) -> Any:
    return jnp.asarray(2 * np.sin(1 + _INDEX * (1 + 0.37 * t)), jnp.float32)


def _loss_of(params: Params, x: Any) -> Any:
    out = jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]
    return jnp.mean((out[:, 0] - jnp.sin(x).sum(1)) ** 2)


def _optimizer() -> optax.GradientTransformationExtraArgs:
    return hdet.jax.auto(optax.inject_hyperparams(optax.adam)(learning_rate=1e-5), STEPS)


def _trained(params: Params, state: Any, begin: int, end: int) -> tuple[Params, Any]:
    optimizer = _optimizer()

    @jax.jit
    def step(params: Params, state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(_loss_of)(params, x)
        updates, state = optimizer.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    for t in range(begin, end):
        params, state = step(params, state, _batch(t))
    return params, state


def _told(params: Params, state: Any) -> dict[str, Any]:
    found = hdet.jax.found(state)
    return {"loss": float(_loss_of(params, _batch(STEPS))), "found": found.rate, "status": found.status}


def write_state(folder: Path) -> None:
    """Train until the cut, save, and note what the run then reaches."""
    tree = _trained(_params(), _optimizer().init(_params()), 0, CUT)
    np.savez(folder / "jax.npz", **{keystr(path): np.asarray(leaf) for path, leaf in tree_flatten_with_path(tree)[0]})
    (folder / "jax.json").write_text(json.dumps(_told(*_trained(*tree, CUT, STEPS))) + "\n", encoding="utf-8")


def state_of(file: Path) -> tuple[Params, Any]:
    """What was saved, as a tool restores it by the names in the file."""
    params, empty = _params(), _optimizer().init(_params())
    with np.load(file) as saved:
        names = {name.split("'")[1] for name in saved if ".vectors[" in name}
        fresh = {name: empty.vectors.get(name, jnp.zeros(())) for name in names}
        leaves, tree = tree_flatten_with_path((params, empty._replace(vectors=fresh)))
        return tree.unflatten([jnp.asarray(saved[keystr(path)]) for path, _ in leaves])  # type: ignore[no-any-return]


def resumed(file: Path) -> dict[str, Any]:
    """What the run reaches that goes on from there."""
    return _told(*_trained(*state_of(file), CUT, STEPS))
