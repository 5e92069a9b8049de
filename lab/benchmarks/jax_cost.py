"""What ``hdet.jax.auto`` costs under ``jit``: a training step with it over one with the plain optimizer.

A whole round is timed, from step 300 on: 60 steps, of which eight are sampled and the last ends the round. The two take
turns; a ratio is the median over pairs of neighbours. On a busy CPU, the ratio of CPU times changes less than that of
wall times. ``train_step`` is a loop over a jitted step, ``scan`` the same inside ``lax.scan``, which spares Python's
part of a step; ``optimizer`` is the update alone, without a model. ``compile_s`` is what a user waits for the first
step: seconds, of which the step itself takes none to speak of, with three matrices, and no compiled program kept.

    python lab/benchmarks/jax_cost.py --width 2200 --blocks 3 --json results.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import optax

import hdet.jax
from hdet.jax.state import state_in

BEGIN, LENGTH = 300, 60
"""A round of a long run."""


def weights_of(width: int, layers: int = 2) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), layers)
    return [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]


def loss_of(params: list[jax.Array], x: jax.Array) -> jax.Array:
    out = x
    for weight in params:
        out = jnp.tanh(out @ weight)
    return jnp.mean((out - x) ** 2)


def plain_adam() -> Any:
    return optax.with_extra_args_support(optax.adam(1e-4))


def our_adam() -> Any:
    return hdet.jax.auto(optax.adam(1.0), total_steps=10_000)


class Contestant:
    """A training loop with one optimizer."""

    def __init__(self, optimizer: Any, params: list[jax.Array], x: jax.Array, *, alone: bool, scans: bool) -> None:
        self.params, self.x, self.state = [jnp.array(p) for p in params], x, optimizer.init(params)

        def step(params: Any, state: Any, x: jax.Array) -> Any:
            if alone:
                loss, grads = jnp.float32(1.0), [p * 1e-3 for p in params]
            else:
                loss, grads = jax.value_and_grad(loss_of)(params, x)
            updates, state = optimizer.update(grads, state, params, value=loss)
            return optax.apply_updates(params, updates), state

        def many(params: Any, state: Any, x: jax.Array) -> Any:
            return jax.lax.scan(lambda both, _: (step(*both, x), None), (params, state), None, length=LENGTH)[0]

        self.step, self.many = (jax.jit(one, donate_argnums=(0, 1)) for one in (step, many))
        self.scans = scans

    def make(self, steps: int) -> tuple[float, float]:
        """CPU and wall seconds of a step."""
        jax.block_until_ready((self.params, self.state))
        cpu, wall = time.process_time(), time.perf_counter()
        is_whole = self.scans and steps == LENGTH
        for _ in range(1 if is_whole else steps):
            self.params, self.state = (self.many if is_whole else self.step)(self.params, self.state, self.x)
        jax.block_until_ready((self.params, self.state))
        return (time.process_time() - cpu) / steps, (time.perf_counter() - wall) / steps

    def begin_round(self) -> None:
        """As if the run had come to step 300."""
        state = state_in(self.state)
        round = state.memory.round._replace(begun=BEGIN, end=BEGIN + LENGTH)
        steps = state.steps._replace(made=jnp.asarray(BEGIN, jnp.int32))
        self.state = state.remembering(round=round)._replace(steps=steps)


def first_step(optimizer: Any, width: int = 64) -> float:
    """Seconds until the first step is made: traced and compiled anew."""
    ours = Contestant(optimizer, weights_of(width, layers=3), jnp.ones((8, width)), alone=False, scans=False)
    return round(ours.make(1)[1], 2)


def contest(width: int, batch: int, blocks: int, *, alone: bool = False, scans: bool = False) -> dict[str, Any]:
    """Both in turn."""
    params = weights_of(width)
    x = jax.random.normal(jax.random.key(1), (batch, width))
    plain = Contestant(plain_adam(), params, x, alone=alone, scans=scans)
    ours = Contestant(our_adam(), params, x, alone=alone, scans=scans)
    begun = time.process_time()
    plain.make(3)
    plain_compiles, begun = time.process_time() - begun, time.process_time()
    ours.make(3)
    ours_compiles = time.process_time() - begun
    ours.make(9)  # the first step is measured by then
    rows = []
    for _ in range(blocks + 1):  # the first one compiles the scan
        ours.begin_round()
        rows.append((ours.make(LENGTH), plain.make(LENGTH)))
    cpu, wall = ([(one[i], other[i]) for one, other in rows[1:]] for i in (0, 1))
    return {
        "weights": sum(p.size for p in params),
        "batch": None if alone else batch,
        "cpu_ratio": round(median(a / b for a, b in cpu), 4),
        "wall_ratio": round(median(a / b for a, b in wall), 4),
        "plain_cpu_seconds": round(median(b for _, b in cpu), 6),
        "plain_wall_seconds": round(median(b for _, b in wall), 6),
        "compile_cpu_seconds": round(ours_compiles, 1),
        "plain_compile_cpu_seconds": round(plain_compiles, 1),
        "rounds": blocks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2300)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    compile_s = {"plain": first_step(plain_adam()), "hdet": first_step(our_adam())}
    found = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "compile_s": compile_s,
        "train_step": contest(given.width, given.batch, given.blocks),
        "scan": contest(given.width, given.batch, given.blocks, scans=True),
        "optimizer": contest(given.width, given.batch, given.blocks, alone=True),
    }
    print(json.dumps(found, indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
