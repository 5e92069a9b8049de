"""The learning rate is found in a run with flax nnx; the state is saved in the middle by orbax, and the run goes on.

python examples/jax_flax.py [--steps 200] [--folder DIRECTORY]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx

import hdet.jax


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 64, rngs=rngs)
        self.last = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.tanh(self.first(x)))


def batch(t: int) -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), t), (64, 8))
    return x, jnp.sin(2.0 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]


@nnx.jit
def step(model: Model, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, grads, value=loss)
    return loss


def made(steps: int) -> tuple[Model, nnx.Optimizer]:
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, hdet.jax.auto(optax.adamw(1.0), total_steps=steps), wrt=nnx.Param)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=None)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp())
    model, optimizer = made(given.steps)
    first = step(model, optimizer, *batch(0))
    for t in range(1, given.steps // 2):
        step(model, optimizer, *batch(t))

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute() / "half", nnx.to_pure_dict(nnx.state((model, optimizer))))
    model, optimizer = made(given.steps)  # as in another process
    with ocp.StandardCheckpointer() as checkpointer:
        empty = nnx.state((model, optimizer))
        nnx.replace_by_pure_dict(empty, checkpointer.restore(folder.absolute() / "half", nnx.to_pure_dict(empty)))
        nnx.update((model, optimizer), empty)

    losses = [step(model, optimizer, *batch(t)) for t in range(given.steps // 2, given.steps)]
    print(f"loss {first:.3f} -> {jnp.stack(losses[-20:]).mean():.3f}")
    print(hdet.jax.found(nnx.as_pure(optimizer.opt_state)))


if __name__ == "__main__":
    main()
