"""What XLA makes of ``hdet.jax.auto`` on a CPU: little enough to compile in a few seconds."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax

import hdet.jax

LOOPS = ["busy", "sampled", "ended", "led elsewhere", "losses", "first slot", "second slot"]
"""What :func:`hdet.jax.numbers.when` does with trees of weights, or with long arrays."""


def compiled() -> str:
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}  # too much for a small loop
    optimizer = hdet.jax.auto(optax.adam(1.0), total_steps=1000)

    def step(grads: Any, state: Any, params: Any) -> Any:
        return optimizer.update(grads, state, params, value=jnp.float32(1.0))

    text: str = jax.jit(step).lower(params, optimizer.init(params), params).compile().as_text()
    return text


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other backends have no small loops")
def test_all_that_is_called_apart_is_one_kernel_each() -> None:
    """A loop that reads and writes 1 kB or more, or sorts, would be a kernel for each number that comes out of it."""
    text = compiled()
    one_kernel = text.count('xla_cpu_small_call="true"')
    assert one_kernel >= 20
    assert text.count(" while(") - one_kernel == len(LOOPS)
