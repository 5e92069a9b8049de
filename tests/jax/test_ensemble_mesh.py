"""Replicas over a mesh of eight devices do what they do on one: one process with eight host devices checks it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE

pytest.importorskip("jax")

ROOT = Path(__file__).resolve().parents[2]
EIGHT = "--xla_force_host_platform_device_count=8"
STEPS, EVERY = 30, 5
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def run(n: int, controller: Any, how: str, shared: bool = True, policy: str | None = None) -> tuple[Any, Any]:
    """Train n replicas with two knobs: weights and states after every step. Replica 2 breaks in the third round.

    ``policy``: what becomes of optimizer states; "reset": they are made anew.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    from hdet.jax.ensemble import AsPrinted, Ensemble, Knob

    pull = (lambda t: 0.1) if isinstance(controller, AsPrinted) else 0.1
    knobs = [Knob("lr", optax.cosine_decay_schedule(0.1, STEPS), 0.4), Knob("pull", pull, 0.5, "log")]
    optimizer, axis = optax.scale_by_adam(), "replica" if how == "shard_map" else None
    kept = optimizer.init if policy == "reset" else policy
    ensemble = Ensemble(knobs, n, EVERY, STEPS, controller, seed=1, optimizer_state=kept)

    def loss_of(params: Any, values: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"] - x[:, 0]) ** 2) + values["pull"] * params["b"] ** 2

    def update(params: Any, memory: Any, grads: Any, values: Any) -> Any:
        updates, memory = optimizer.update(grads, memory, params)
        return optax.apply_updates(params, jax.tree.map(lambda u: -values["lr"] * u, updates)), memory

    def step(params: Any, memory: Any, state: Any, x: Any, broken: Any) -> Any:
        values = ensemble.values(state, axis)
        losses, grads = jax.vmap(jax.value_and_grad(loss_of))(params, values, x)
        grads = ensemble.shared(grads, axis) if shared else grads
        params, memory = jax.vmap(update)(params, memory, grads, values)
        return ensemble.step(params, memory, state, losses + broken, probe=lambda p: p["b"] ** 2, axis=axis)

    params = ensemble.copies({"w": jnp.linspace(-1, 1, 4), "b": jnp.zeros(())})
    memory, state = jax.vmap(optimizer.init)(params), ensemble.init()
    rows, specs, mesh = P("replica"), ensemble.specs("replica"), None
    if how == "arrays":  # XLA finds out what to exchange
        mesh = jax.make_mesh((8,), ("replica",), axis_types=(AxisType.Auto,))
    if how == "shard_map":
        mesh = jax.make_mesh((8,), ("replica",))
        step = jax.shard_map(step, mesh=mesh, in_specs=(rows, rows, specs, rows, rows), out_specs=(rows, rows, specs))

    def placed(tree: Any, specs: Any) -> Any:
        return jax.device_put(tree, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)) if mesh else tree

    (params, memory), state = placed((params, memory), rows), placed(state, specs)
    # Without shard_map XLA chooses where results lie: here they lie where they were, and one program serves all steps.
    places = jax.tree.map(lambda x: x.sharding, (params, memory, state)) if how == "arrays" else None
    step, history, lowered = jax.jit(step, out_shardings=places), [], []

    def listen(event: str, _: float, fun_name: str = "", **more: Any) -> None:
        if event.endswith("jaxpr_to_mlir_module_duration"):
            lowered.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    for t in range(STEPS):
        x = jax.random.normal(jax.random.key(t), (n, 6, 4))
        broken = jnp.zeros(n).at[2].set(jnp.nan if t == 12 else 0.0)
        x, broken = placed((x, broken), rows)
        params, memory, state = step(params, memory, state, x, broken)
        history.append(jax.tree.map(np.asarray, (params, memory, state)))
    assert lowered.count("jit(step)") == 1, lowered
    return history, (step, (params, memory, state, x, broken))


def compare(how: str, n: int, controller: Any, shared: bool = True, policy: str | None = None) -> None:
    import jax
    import numpy as np

    expected, _ = run(n, controller, "vmap", shared, policy)
    found, (_, last) = run(n, controller, how, shared, policy)
    for t, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12, err_msg=f"step {t}")
    lived = [history[2].live.tolist() for history in found]
    assert lived[14] == [r != 2 for r in range(n)]
    assert lived[-1] == [True] * n
    moved = found[-1][2].learned / found[0][2].learned
    assert max(abs(moved - 1)) > 1e-3  # the controller was heard
    assert len(last[0]["w"].sharding.device_set) == 8


@case
def shard_map_published() -> None:
    from hdet.jax.ensemble import Corrected

    compare("shard_map", 8, Corrected())


@case
def shard_map_two_replicas_a_device_normalised() -> None:
    from hdet.jax.ensemble import Normalised

    compare("shard_map", 16, Normalised(), policy="reset")


@case
def shard_map_own_gradients_as_printed() -> None:
    from hdet.jax.ensemble import AsPrinted

    compare("shard_map", 8, AsPrinted(meta_lr=2.0), shared=False, policy="keep")


@case
def sharded_arrays_without_shard_map() -> None:
    from hdet.jax.ensemble import Corrected

    compare("arrays", 8, Corrected())


@case
def steps_inside_a_round_do_not_communicate() -> None:
    """With gradients of their own: all that the devices exchange stands in the branch that ends a round."""
    from hdet.jax.ensemble import Corrected

    _, (step, arguments) = run(8, Corrected(), "shard_map", shared=False)
    text = step.lower(*arguments).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    assert "all-reduce" in text
    assert "conditional" in entry
    assert not [word for word in ("all-reduce", "all-gather", "collective-permute", "all-to-all") if word in entry]


def main() -> None:
    import jax

    jax.config.update("jax_enable_x64", True)
    assert jax.device_count() == 8
    found = {}
    for name, function in CASES.items():
        try:
            function()
            found[name] = "as on one device"
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps(found))


@pytest.fixture(scope="module")
def on_eight_devices() -> dict[str, str]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} {EIGHT}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.jax.test_ensemble_mesh"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, str] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CASES)
def test_on_eight_devices(name: str, on_eight_devices: dict[str, str]) -> None:
    assert on_eight_devices[name] == "as on one device", on_eight_devices[name]


if __name__ == "__main__":
    main()
