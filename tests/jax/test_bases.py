"""Which optimizers a search is put around: those whose updates are a rate times something, without another schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax
from optax import contrib

import hdet
import hdet.jax
from tests.jax.test_auto import weights

COSINE = optax.cosine_decay_schedule(1.0, 100)
LABELS = {"w": "main", "b": "rest", "v": "main"}
ONLY_W = {"w": True, "b": False, "v": False}
injected = optax.inject_hyperparams
Make = Callable[[], Any]


def clipped(learning_rate: Any) -> optax.GradientTransformation:
    return optax.chain(optax.adam(learning_rate), optax.clip(1.0))


def multi_steps(base: optax.GradientTransformation) -> optax.GradientTransformation:
    found: optax.GradientTransformation = optax.MultiSteps(base, 4).gradient_transformation()
    return found


def by_hand(rate: Any) -> optax.GradientTransformation:
    """Not optax's own: the rate is an array, and the sign is turned inside the step."""
    return optax.stateless(lambda gradients, _: jax.tree.map(lambda g: -rate * jnp.tanh(g), gradients))


def halved_if_long(updates: Any, params: Any) -> Any:
    """A clip of one's own: it chooses by the length of what comes after the rate."""
    length = sum(jnp.sum(u * u) for u in jax.tree.leaves(updates))
    return jax.lax.cond(length > 1, lambda tree: jax.tree.map(lambda u: 0.5 * u, tree), lambda tree: tree, updates)


def halved_every_step() -> optax.GradientTransformation:
    return optax.scale_by_schedule(lambda t: -(0.5**t))


TAKEN: dict[str, Make] = {
    **{
        name: partial(getattr(optax, name), 1.0)
        for name in (
            *("adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan", "amsgrad"),
            *("lamb", "lars", "lion", "nadam", "nadamw", "novograd", "optimistic_gradient_descent", "radam", "rmsprop"),
            *("sgd", "sign_sgd", "sm3", "yogi"),
        )
    },
    **{name: partial(getattr(contrib, name), 1.0) for name in ("acprop", "ademamix", "adopt", "muon")},
    "nesterov": lambda: optax.sgd(1.0, 0.9, nesterov=True),
    "adafactor with momentum": lambda: optax.adafactor(1.0, momentum=0.9, weight_decay_rate=1e-3),
    "a small rate": lambda: optax.adam(1e-3),
    "an array": lambda: optax.adam(jnp.asarray(1.0)),
    "by hand": lambda: by_hand(jnp.asarray(0.5)),
    "without line search": lambda: optax.lbfgs(1.0, linesearch=None),
    "in parts": lambda: optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(1e-4), optax.scale(-1.0)),
    "decay by a schedule": lambda: optax.chain(
        optax.scale_by_adam(), optax.add_decayed_weights(COSINE), optax.scale(-1.0)
    ),
    "clip first": lambda: optax.chain(optax.clip(1.0), optax.sgd(1.0)),
    "clip norms first": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1.0)),
    "adaptive clip first": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.adam(1.0)),
    "zero nans first": lambda: optax.chain(optax.zero_nans(), optax.adam(1.0)),
    "zero nans last": lambda: optax.chain(optax.adam(1.0), optax.zero_nans()),
    "scaled": lambda: optax.chain(optax.adam(1.0), optax.scale(0.5)),
    "momentum last": lambda: optax.chain(optax.adam(1.0), optax.trace(0.9)),
    "averaged": lambda: optax.chain(optax.adam(1.0), optax.ema(0.9)),
    "frozen": lambda: optax.chain(optax.adam(1.0), optax.masked(optax.set_to_zero(), ONLY_W)),
    "masked": lambda: optax.masked(optax.adam(1.0), ONLY_W),
    "partition": lambda: optax.partition({"main": optax.adam(1.0), "rest": optax.sgd(0.1)}, LABELS),
    "accumulated": lambda: multi_steps(optax.adam(1.0)),
    "if finite": lambda: optax.apply_if_finite(optax.adam(1.0), 3),
    "injected": lambda: injected(optax.adam)(learning_rate=1e-3),
    "injected with decay": lambda: injected(optax.adamw)(learning_rate=1e-3, weight_decay=0.1),
    "injected lars": lambda: injected(optax.lars)(learning_rate=1e-3),
    "injected muon": lambda: injected(contrib.muon)(learning_rate=1e-3),
    "injected, b1 by a schedule": lambda: injected(optax.adam)(learning_rate=1e-3, b1=COSINE),
    "injected, accumulated": lambda: multi_steps(injected(optax.adam)(learning_rate=1e-3)),
    "injected, if finite": lambda: optax.apply_if_finite(injected(optax.lion)(learning_rate=1e-3), 3),
    "injected, partition": lambda: optax.partition(
        {"main": injected(optax.adam)(learning_rate=1e-3), "rest": injected(optax.sgd)(learning_rate=0.1)}, LABELS
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_bases_that_are_taken(name: str) -> None:
    """When ``auto`` is called and when a state is made, also inside ``jit``."""
    optimizer = hdet.jax.auto(TAKEN[name](), total_steps=100)
    optimizer.init(weights())
    jax.eval_shape(optimizer.init, weights())


class Refused(NamedTuple):
    make: Make
    words: str


APART, OWN, FIRST = (
    "schedule apart: hdet.jax.auto",
    "a rate of its own, .* asks for value=.* optax.adam",
    "put it first: optax.chain",
)
FOUND = r"must not find a rate of its own"
REFUSED: dict[str, Refused] = {
    "no optimizer": Refused(lambda: 3.0, "must be an optax optimizer"),
    "adam by a schedule": Refused(lambda: optax.adam(COSINE), APART),
    "momentum by a schedule": Refused(lambda: optax.sgd(COSINE, 0.9), APART),
    "adafactor by a schedule": Refused(lambda: optax.adafactor(COSINE), APART),
    "muon by a schedule": Refused(lambda: contrib.muon(COSINE), APART),
    "a schedule in parts": Refused(lambda: optax.chain(optax.scale_by_adam(), halved_every_step()), APART),
    "a schedule accumulated": Refused(lambda: multi_steps(optax.adam(COSINE)), APART),
    "a schedule if finite": Refused(lambda: optax.apply_if_finite(optax.adam(COSINE), 3), APART),
    "a schedule masked": Refused(lambda: optax.masked(optax.adam(COSINE), ONLY_W), APART),
    "a schedule of some": Refused(
        lambda: optax.partition({"main": optax.adam(1.0), "rest": optax.sgd(COSINE)}, LABELS), APART
    ),
    "an injected schedule": Refused(lambda: injected(optax.adam)(learning_rate=COSINE), APART),
    "polyak": Refused(optax.polyak_sgd, OWN),
    "polyak first": Refused(lambda: optax.chain(optax.scale_by_polyak(1.0), optax.sgd(1.0)), OWN),
    "clip last": Refused(lambda: clipped(1.0), FIRST),
    "clip last, a small rate": Refused(lambda: clipped(1e-3), FIRST),
    "clip last, an array": Refused(lambda: clipped(jnp.asarray(1.0)), FIRST),
    "clip last, by hand": Refused(lambda: optax.chain(by_hand(jnp.asarray(0.5)), optax.clip(1.0)), FIRST),
    "clip last, sgd": Refused(lambda: optax.chain(optax.sgd(1.0), optax.clip(1.0)), FIRST),
    "clip norms last": Refused(lambda: optax.chain(optax.adam(1.0), optax.clip_by_global_norm(1.0)), FIRST),
    "adaptive clip last": Refused(lambda: optax.chain(optax.lion(1.0), optax.adaptive_grad_clip(0.1)), FIRST),
    "clip, then scaled": Refused(lambda: optax.chain(clipped(1.0), optax.scale(0.5)), FIRST),
    "clip, accumulated": Refused(lambda: multi_steps(clipped(1.0)), FIRST),
    "clip, if finite": Refused(lambda: optax.apply_if_finite(clipped(1.0), 3), FIRST),
    "clip some": Refused(lambda: optax.partition({"main": optax.adam(1.0), "rest": clipped(1.0)}, LABELS), FIRST),
    "normalised last": Refused(lambda: optax.chain(optax.adam(1.0), contrib.normalize()), FIRST),
    "halved if long": Refused(lambda: optax.chain(optax.adam(1.0), optax.stateless(halved_if_long)), FIRST),
    "decay last": Refused(lambda: optax.chain(optax.adam(1.0), optax.add_decayed_weights(-1e-4)), FIRST),
    "not negative": Refused(lambda: optax.chain(optax.adam(1.0), optax.keep_params_nonnegative()), FIRST),
    "fromage": Refused(lambda: optax.fromage(1.0), FIRST),
    "sam": Refused(lambda: contrib.sam(optax.sgd(1.0), optax.sgd(0.1)), FIRST),
    "injected clip last": Refused(lambda: injected(clipped)(learning_rate=1e-3), FIRST),
    "injected, then clip": Refused(
        lambda: optax.chain(injected(optax.adam)(learning_rate=1e-3), optax.clip(1.0)), FIRST
    ),
    "injected fromage": Refused(lambda: injected(optax.fromage)(learning_rate=1e-3), FIRST),
    "some injected": Refused(
        lambda: optax.partition({"main": injected(optax.adam)(learning_rate=1e-3), "rest": optax.sgd(0.1)}, LABELS),
        FIRST,
    ),
    "an injected rate of 0": Refused(lambda: injected(optax.adam)(learning_rate=0.0), "above 0 and finite"),
    "rprop": Refused(lambda: optax.rprop(1.0), FOUND),
    "injected rprop": Refused(lambda: injected(optax.rprop)(learning_rate=1e-3), FOUND),
    "line search": Refused(optax.lbfgs, FOUND),
    "plateau": Refused(lambda: optax.chain(optax.adam(1.0), contrib.reduce_on_plateau()), FOUND),
    "schedule_free": Refused(lambda: contrib.schedule_free(optax.sgd(1.0), 1.0, b1=0.9), FOUND),
    "mechanize": Refused(lambda: contrib.mechanize(optax.sgd(1.0)), FOUND),
    **{
        name: Refused(getattr(contrib, name), FOUND)
        for name in ("cocob", "dadapt_adamw", "dog", "dowg", "momo", "prodigy")
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_bases_that_are_refused(name: str) -> None:
    """When ``auto`` is called; or when a state is made, if a base cannot do with other params than its own."""
    make, words = REFUSED[name]
    base = make()
    with pytest.raises(hdet.ArgumentError, match=words):
        hdet.jax.auto(base, total_steps=100).init(weights())
    with pytest.raises(hdet.ArgumentError, match=words):
        jax.eval_shape(lambda: hdet.jax.auto(base, total_steps=100).init(weights()))


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def layers(count: int) -> dict[str, Any]:
    return {f"layer{i}": {"w": jnp.ones((2, 2)), "b": jnp.ones(2)} for i in range(count)}


def test_a_base_for_certain_layers_is_looked_at_with_the_params() -> None:
    """Its labels fit this tree only, or its mask shows nothing on two weights; each layer is looked at."""
    labels = {name: "rest" if name == "layer1" else "main" for name in layers(200)}
    taken = {"main": optax.adam(1.0), "rest": optax.sgd(0.1)}
    hdet.jax.auto(optax.partition(taken, labels), total_steps=100).init(layers(200))
    parts = {"main": optax.adam(1.0), "rest": clipped(1.0)}
    masked = optax.chain(optax.adamw(1.0), optax.masked(optax.clip(1.0), matrices))
    for base in (optax.partition(parts, labels), masked):
        with pytest.raises(hdet.ArgumentError, match=FIRST):
            hdet.jax.auto(base, total_steps=100).init(layers(200))
