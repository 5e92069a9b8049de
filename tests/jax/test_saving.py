"""A run that is saved by orbax and resumed is bit-equal to one that is not, from inside a round too."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

import hdet
import hdet.jax
import hdet.jax.state as states
from hdet.rule import constants
from tests.jax.test_auto import STEPS, Loop, weights

WRONG = {50: np.nan, 75: 1e5}


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop(hdet.jax.auto(optax.adam(1.0), total_steps=STEPS))


@pytest.mark.parametrize("at", [1, 27, 52, 77, 118])
def test_a_run_is_resumed_bit_for_bit(loop: Loop, at: int, tmp_path: Path) -> None:
    params, state = loop.train(weights(), loop.optimizer.init(weights()), 0, at, WRONG)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", (params, state))
    with ocp.StandardCheckpointer() as checkpointer:
        empty = (weights(), loop.optimizer.init(weights()))
        resumed = checkpointer.restore(tmp_path / "state", empty)
    there = loop.train(params, state, at, STEPS, WRONG)
    here = loop.train(*resumed, at, STEPS, WRONG)
    assert jax.tree.structure(there) == jax.tree.structure(here)
    for one, other in zip(jax.tree.leaves(there), jax.tree.leaves(here), strict=True):
        np.testing.assert_array_equal(one, other)
    assert hdet.jax.found(here[1]).rolled_back >= 1


def test_a_state_of_other_constants_is_refused_before_a_step_is_traced(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, params = loop.optimizer.init(weights()), weights()
    for cache in (states.rule_id, states._places):
        cache.cache_clear()
    with monkeypatch.context() as later:
        later.setattr(constants, "DEFAULT", constants.DEFAULT._replace(max_growth=3.0))
        later.setattr(states, "__version__", "0.9.0")
        for ask in (lambda: loop.optimizer.update(params, state, params), lambda: hdet.jax.found(state)):
            with pytest.raises(
                hdet.ArgumentError, match=r"which is that of hdet 0\.9\.0, but got one of [0-9a-f]{8}: its"
            ):
                ask()
    for cache in (states.rule_id, states._places):
        cache.cache_clear()
    assert hdet.jax.found(state).status == "searching"


def test_no_step_calls_the_host(loop: Loop) -> None:
    params = weights()
    text = str(jax.make_jaxpr(loop.optimizer.update)(params, loop.optimizer.init(params), params))
    assert "callback" not in text
    assert "while" in text
