"""``hdet.jax.auto`` in float32: what may be given, what is refused, and that nothing is traced twice."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hdet
import hdet.jax
from hdet.jax.rule import code_of
from hdet.rule.enums import Event

STEPS = 120
Params = dict[str, jax.Array]


def weights(dtype: Any = jnp.float32) -> Params:
    rng = np.random.default_rng(0)
    found = {"w": rng.normal(size=(6, 8)) * 0.5, "b": np.zeros(8), "v": rng.normal(size=(8, 1)) * 0.5}
    return {name: jnp.asarray(x, dtype) for name, x in found.items()}


def data() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(STEPS, 16, 6))
    y = np.sin(x[..., :1] * x[..., 1:2]) + x[..., 2:3] + 0.1 * rng.normal(size=(STEPS, 16, 1))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def loss_of(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) @ params["v"] - y) ** 2)


class Loop:
    """A step under ``jit``, with a state that is donated, and how often it was traced."""

    def __init__(self, optimizer: optax.GradientTransformationExtraArgs) -> None:
        self.optimizer, self.traced, self.losses = optimizer, 0, []  # type: ignore[var-annotated]
        self.step = jax.jit(self._step, donate_argnums=(0, 1))

    def _step(self, params: Params, state: Any, x: jax.Array, y: jax.Array, scale: jax.Array) -> Any:
        self.traced += 1
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        updates, state = self.optimizer.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    def train(
        self, params: Params, state: Any, begin: int = 0, end: int = STEPS, wrong: dict[int, float] | None = None
    ) -> Any:
        xs, ys = data()
        for t in range(begin, end):
            scale = jnp.asarray((wrong or {}).get(t, 1.0))
            params, state, loss = self.step(params, state, xs[t], ys[t], scale)
            assert all(bool(jnp.isfinite(p).all()) for p in params.values()), t
            self.losses.append(float(loss))
        return params, state


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop(hdet.jax.auto(optax.adam(1.0), total_steps=STEPS))


def test_it_trains_and_nothing_is_traced_twice(loop: Loop) -> None:
    _, state = loop.train(weights(), loop.optimizer.init(weights()))
    assert loop.traced == 1
    found = hdet.jax.found(state)
    assert (found.status, found.rolled_back) == ("unsure", 0)
    assert 1e-3 < found.rate < 1.0
    assert np.mean(loop.losses[-10:]) < 0.6 * np.mean(loop.losses[:3])
    assert str(found).startswith("found 0.")


def test_it_is_back_at_earlier_weights_however_far_they_were(loop: Loop) -> None:
    """A first step of 1e6 times the gradient throws weights away in float32, for Adam only by the rate; SGD by all."""
    optimizer = hdet.jax.auto(optax.sgd(1.0), total_steps=STEPS)
    own, params = Loop(optimizer), weights()
    before = {name: np.asarray(p) for name, p in params.items()}
    after, state = own.train(params, optimizer.init(weights()), 0, 1, {0: 1e9})
    assert state.memory.notes.event == code_of(Event.RESTARTED)
    after, state = own.train(after, state, 1, 2)  # puts right what rounding has left
    assert state.memory.round.returns == -1
    for name, p in after.items():
        np.testing.assert_allclose(p, before[name], rtol=1e-6, atol=1e-9)
    after, state = own.train(after, state, 2, STEPS, {50: np.nan})
    assert state.memory.notes.rolled_back == 1
    assert own.traced == 1


def test_bfloat16_weights_come_back_exactly() -> None:
    optimizer = hdet.jax.auto(optax.sgd(1.0), total_steps=STEPS)
    own, params = Loop(optimizer), weights(jnp.bfloat16)
    state = optimizer.init(params)
    params, state = own.train(params, state, 0, 26)
    kept = jax.tree.map(np.asarray, state.slots[int(state.memory.snapshots.last)][0])
    params, state = own.train(params, state, 26, 30, {27: np.nan})
    assert state.memory.notes.event == code_of(Event.BAD_BATCH)
    for name, p in params.items():
        assert p.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(p, np.float32), np.asarray(kept[name], np.float32))


def test_multiplied_and_injected_rates_are_one(loop: Loop) -> None:
    """Inside a chain, too, whose other parts are before it."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(100.0),
        hdet.jax.auto(optax.inject_hyperparams(optax.adam)(learning_rate=1.0), total_steps=STEPS),
    )
    own = Loop(optimizer)
    _, state = own.train(weights(), optimizer.init(weights()), 0, 40)
    plain = Loop(loop.optimizer)
    plain.step = loop.step
    _, other = plain.train(weights(), loop.optimizer.init(weights()), 0, 40)
    np.testing.assert_allclose(own.losses, plain.losses, rtol=1e-4)
    assert hdet.jax.found(state).rate == pytest.approx(hdet.jax.found(other).rate, rel=1e-4)


def test_too_short() -> None:
    optimizer = hdet.jax.auto(optax.sgd(0.1), total_steps=39)
    found = hdet.jax.found(optimizer.init(weights()))
    assert (found.status, found.rates) == ("too short", ())


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"total_steps": 0}, "total_steps must be"),
        ({"total_steps": 2**30}, "total_steps must be"),
        ({"total_steps": 1e3}, "total_steps must be"),
        ({"total_steps": 100, "rollback": 1}, "rollback must be"),
        ({"total_steps": 100, "highest": -1.0}, "highest must be"),
        ({"total_steps": 100, "schedule": 0.1}, "schedule must be a function"),
        ({"total_steps": 100, "schedule": lambda t: t * 0.0}, "not always 0"),
        ({"total_steps": 100, "schedule": lambda t: jnp.log(t - 5.0)}, "one finite number"),
        ({"schedule": optax.constant_schedule(1.0)}, "give total_steps"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], words: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(hdet.ArgumentError, match=words):
            hdet.jax.auto(optax.adam(1.0), **arguments)


def test_updates_that_are_refused(loop: Loop) -> None:
    params, update = weights(), loop.optimizer.update
    state = loop.optimizer.init(params)
    with pytest.raises(hdet.ArgumentError, match="params must be given"):
        update(params, state)
    with pytest.raises(hdet.ArgumentError, match="value must be one real number"):
        update(params, state, params, value=jnp.ones(2))
    with pytest.raises(hdet.ArgumentError, match="value must be one real number"):
        update(params, state, params, value=1j)
    with pytest.raises(hdet.ArgumentError, match="params must have the arrays"):
        update(params, state, {"w": params["w"]})
    with pytest.raises(hdet.ArgumentError, match="grads must have the arrays"):
        update({**params, "v": params["w"]}, state, params)
    with pytest.raises(hdet.ArgumentError, match="state must be that of"):
        update(params, optax.adam(1.0).init(params), params)
    with pytest.raises(hdet.ArgumentError, match="floating-point"):
        loop.optimizer.init({"n": jnp.arange(3)})


def test_a_finish_that_is_refused(loop: Loop) -> None:
    state = loop.optimizer.init(weights())
    for steps in (0, -1, 1.0, 2**30):
        with pytest.raises(hdet.ArgumentError, match="steps must be"):
            hdet.jax.finish(state, steps)  # type: ignore[arg-type]
    with pytest.raises(hdet.ArgumentError, match="before the run ends"):
        hdet.jax.finish(state._replace(steps=state.steps._replace(made=jnp.asarray(STEPS))), 3)
    with pytest.raises(hdet.ArgumentError, match="outside jit"):
        jax.jit(lambda state: hdet.jax.finish(state, 3))(state)
    with pytest.raises(hdet.ArgumentError, match="state must have the state of one"):
        hdet.jax.found(optax.adam(1.0).init(weights()))


@pytest.mark.parametrize("schedule", [optax.constant_schedule(1.0), optax.cosine_decay_schedule(1.0, STEPS)])
def test_a_schedule_is_not_finished(schedule: optax.Schedule) -> None:
    """It has an end of its own, as in torch; a state knows of it, also inside a chain and after a restart."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), hdet.jax.auto(optax.adam(1.0), total_steps=STEPS, schedule=schedule)
    )
    state = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), jax.jit(optimizer.init)(weights()))
    with pytest.raises(hdet.ArgumentError, match=r"without schedule=.*schedule of 120 steps; .*hdet.jax.auto\(base"):
        hdet.jax.finish(state, 10)
