"""The learning rate is found in a run with equinox, of a length that nobody knows until ``finish`` is called.

python examples/jax_equinox.py [--steps 400]
"""

from __future__ import annotations

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import hdet.jax


def batch(t: int) -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), t), (64, 8))
    return x, jnp.sin(2.0 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]


def loss_of(model: eqx.nn.MLP, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    model = eqx.nn.MLP(8, 1, width_size=64, depth=1, activation=jnp.tanh, key=jax.random.key(0))
    optimizer = optax.chain(optax.clip_by_global_norm(10.0), hdet.jax.auto(optax.lion(1.0)))  # auto is the last part
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, state):  # type: ignore[no-untyped-def]
        loss, grads = eqx.filter_value_and_grad(loss_of)(model, *batch)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = optimizer.update(grads, state, params, value=loss)
        return loss, eqx.apply_updates(model, updates), state

    losses = []
    for t in range(steps):
        if t == steps // 2:  # the rate falls from here on
            state = hdet.jax.finish(state, steps - t)
        loss, model, state = step(batch(t), model, state)
        losses.append(float(loss))
    print(f"loss {losses[0]:.3f} -> {sum(losses[-20:]) / 20:.3f}")
    print(hdet.jax.found(state))


if __name__ == "__main__":
    main()
