"""Weights that are shared out over eight devices train as on one, by a program that is compiled once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

from tests.patience import PATIENCE

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, optax, hdet.jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tests.jax.test_auto import Loop, weights
assert len(jax.devices()) == 8
mesh = Mesh(np.array(jax.devices()).reshape(8), ("x",))
spec = {"w": P(None, "x"), "b": P("x"), "v": P("x", None)}
optimizer = hdet.jax.auto(optax.sgd(1.0, momentum=0.9), total_steps=120)
wrong = {30: np.nan, 50: 1e6}

def own():
    return {name: jax.device_put(x, NamedSharding(mesh, spec[name])) for name, x in weights().items()}

lowered = []

def listen(event, seconds, *, fun_name="", **more):
    if event.endswith("jaxpr_to_mlir_module_duration") and "_step" in fun_name:
        lowered.append(fun_name)

jax.monitoring.register_event_duration_secs_listener(listen)
alone, together = Loop(optimizer), Loop(optimizer)
first, one = alone.train(weights(), optimizer.init(weights()), 0, 60, wrong)
params = own()
state = optimizer.init(params)
lowered.clear()
second, many = together.train(params, state, 0, 60, wrong)
assert len(lowered) == 1, lowered
assert many.memory.notes.rolled_back == one.memory.notes.rolled_back >= 1
np.testing.assert_allclose(together.losses, alone.losses, rtol=2e-3)
for name in spec:
    for tree in (second, many.origin, many.total, many.slots[0][0]):
        assert tree[name].sharding.is_equivalent_to(NamedSharding(mesh, spec[name]), tree[name].ndim), name
        assert len(tree[name].addressable_shards) == 8
second, many = together.train(second, hdet.jax.finish(many, 20), 60, 65)
assert len(lowered) == 1, lowered
print("equal", hdet.jax.found(many))
"""


def test_on_eight_devices() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("equal found")
