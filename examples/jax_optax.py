"""The learning rate of an optax optimizer is found in the run: plain jax, one ``lax.scan`` for the whole run.

python examples/jax_optax.py [--steps 400]
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import optax

import hdet.jax


def loss_of(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean((hidden @ params["v"] - y) ** 2)


def batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(key, (64, 8))
    return x, jnp.sin(2.0 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    first, second, key = jax.random.split(jax.random.key(0), 3)
    params = {
        "w": jax.random.normal(first, (8, 64)) / 8**0.5,
        "b": jnp.zeros(64),
        "v": jax.random.normal(second, (64, 1)) / 8.0,
    }
    optimizer = hdet.jax.auto(optax.adam(1.0), total_steps=steps)  # 1.0: the search has the rate

    @jax.jit
    def train(params, state):  # type: ignore[no-untyped-def]
        def step(carry, t):  # type: ignore[no-untyped-def]
            params, state = carry
            loss, grads = jax.value_and_grad(loss_of)(params, *batch(jax.random.fold_in(key, t)))
            updates, state = optimizer.update(grads, state, params, value=loss)
            return (optax.apply_updates(params, updates), state), loss

        return jax.lax.scan(step, (params, state), jnp.arange(steps))

    (params, state), losses = train(params, optimizer.init(params))
    print(f"loss {losses[0]:.3f} -> {losses[-20:].mean():.3f}")
    print(hdet.jax.found(state))


if __name__ == "__main__":
    main()
