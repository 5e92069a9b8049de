"""The rules in jax against those of torch's package and against the paper, in float64, over many rounds."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from hdet.ensemble import design  # noqa: E402
from hdet.ensemble.controller import comparable  # noqa: E402
from hdet.jax import ensemble_rules as rules  # noqa: E402
from hdet.jax.ensemble import AsPrinted, Corrected, Ensemble, Knob, Normalised, State  # noqa: E402

NAN = math.nan


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(("seed", "knobs", "n"), [(0, 1, 1), (5, 3, 4), (-7, 2, 3), (10**30, 11, 2)], ids=str)
@pytest.mark.parametrize("steps", [None, 2050])
def test_replicas_stand_where_torchs_do(seed: int, knobs: int, n: int, steps: int | None) -> None:
    """In 1024 rounds; later ones repeat them. The round is an argument of the program, which is compiled once."""
    names = [f"knob{g}" for g in range(knobs)]
    ensemble = Ensemble([Knob(name, 0.0, 1.0, "linear") for name in names], n, 2, total_steps=steps, seed=seed)
    values, state = jax.jit(ensemble.values), ensemble.init()
    for k in [0, 1, 2, 3, 10, 99, 500, 1022, 1023, 1024, 1025, 1024 * 10**6 + 7]:
        expected = design.assign(design.levels(n), seed, k % 1024, knobs)
        stand = values(state._replace(round=jnp.int32(k)))
        assert np.stack([stand[name] for name in names], 1).tolist() == expected, k
    assert values._cache_size() == 1


signals_of_six = st.lists(st.floats(-1e3, 1e3) | st.sampled_from([NAN, math.inf, -math.inf]), min_size=6, max_size=6)
jax_comparable = jax.jit(rules.comparable)


@given(signals_of_six, st.lists(st.booleans(), min_size=6, max_size=6))
def test_comparable_signals(signals: list[float], live: list[bool]) -> None:
    ours, enough = jax_comparable(jnp.array(signals), jnp.array(live))
    expected = comparable([s for s, lives in zip(signals, live, strict=True) if lives])
    assert bool(enough) == (expected is not None)
    if expected is not None:
        assert [float(s) for s, lives in zip(ours, live, strict=True) if lives] == expected


KNOBS = [
    Knob("lr", lambda t: 0.3 * (1 + t) ** -0.5, spread=0.2),
    Knob("decay", 0.01, spread=0.7, scale="log", bounds=(1e-3, 0.1)),
    Knob("dropout", 0.3, spread=0.5, scale="logit", bounds=(0.02, 0.9)),
    Knob("shift", 0.0, spread=0.4, scale="linear", bounds=(-2.0, 2.0)),
    Knob("weight", -2.0, spread=0.3),
    Knob("rate", lambda t: 1.0 + 0.1 * t, spread=0.5, scale="log"),
]


def made_up(rng: random.Random, n: int, places: list[list[float]], k: int) -> list[float]:
    """Losses with a slope and noise; sometimes one or two are not finite, once all but one, once all equal."""
    losses = [1.0 + 0.2 * sum(row) * (-1) ** (k // 5) + rng.gauss(0, 0.05) for row in places]
    if k == 7:
        return [1.5] * n
    broken = n - 1 if k == 9 else rng.choice([0, 0, 0, 1, 2])
    for r in rng.sample(range(n), min(broken, n - 1)):
        losses[r] = rng.choice([NAN, math.inf, -math.inf])
    return losses


RULES = {
    "corrected": Corrected(),
    "strong": Corrected(0.01, 0.5, 2.0),
    "normalised": Normalised(),
    "bold": Normalised(0.5, 0.1, 2.0, 1.0, 1e-2),
}
CASES = [
    *(("corrected", 6, 8), ("corrected", 1, 3), ("strong", 6, 5), ("strong", 2, 2)),
    *(("normalised", 6, 8), ("normalised", 6, 3), ("normalised", 1, 2), ("bold", 2, 5), ("bold", 6, 8)),
]


@pytest.mark.parametrize(("name", "first", "n"), CASES)
def test_twenty_rounds_move_values_as_torchs_package_does(name: str, first: int, n: int) -> None:
    """Every value of every replica in every round, with replicas that are not finite."""
    T, start, rng, rule, knobs = 2, 6, random.Random(n), RULES[name], KNOBS[:first]
    ensemble = Ensemble(knobs, n, sync_every=T, total_steps=60, controller=rule, start=start, seed=4)
    specs, learned, memory = [knob.spec for knob in knobs], [knob.start() for knob in knobs], rule.init(len(knobs))

    @jax.jit
    def step(state: State, losses: Any) -> Any:
        return ensemble.values(state), ensemble.bases(state), ensemble.step((), (), state, losses)[2]

    state, largest = ensemble.init(), 0.0
    for k in range(20):
        places = design.assign(design.levels(n), 4, k, len(knobs))
        losses = made_up(rng, n, places, k)
        for t in (T * k, T * k + 1):
            bases = [f(t) * m if callable(f := knob.value) else m for knob, m in zip(knobs, learned, strict=True)]
            values, shared, state = step(state, jnp.array(losses))
            for g, (spec, base) in enumerate(zip(specs, bases, strict=True)):
                expected = [spec.value(base, row[g]) for row in places]
                assert values[spec.name].tolist() == pytest.approx(expected, rel=1e-12), (k, spec.name)
            assert [float(shared[spec.name]) for spec in specs] == pytest.approx(bases, rel=1e-12)
        live = [math.isfinite(loss) for loss in losses]
        assert state.live.tolist() == live
        signals = comparable([loss for loss in losses if math.isfinite(loss)])
        if T * (k + 1) >= start and signals is not None:
            offsets = [[s.spread * x for s, x in zip(specs, row, strict=True)] for row in places]
            update = rule.update(memory, signals, [row for row, lives in zip(offsets, live, strict=True) if lives])
            memory, before = update.state, learned
            learned = [spec.moved(m, move) for spec, m, move in zip(specs, learned, update.moves, strict=True)]
            largest = max([largest, *(abs(a / b - 1) for a, b in zip(learned, before, strict=True) if b)])
        assert state.learned.tolist() == pytest.approx(learned, rel=1e-12), k
        for ours, theirs in zip(state.memory, memory, strict=True):
            assert ours.tolist() == pytest.approx(theirs, rel=1e-9, abs=1e-9), k
    assert largest > 1e-4 or (isinstance(rule, Normalised) and n <= max(2, first))  # something has moved
    assert step._cache_size() == 1


def printed(rates: list[float], losses: list[float], v: float, K: float) -> tuple[float, float]:
    """docs/the-paper.md, "As printed", for one group: v and the new rate. f_div = 25, f_final = 1e4."""
    sigma, beta, lam, N = 0.1, 0.9, 0.5, len(rates)
    mean_loss, mean_rate = sum(losses) / N, sum(rates) / N
    e = [math.exp((mean_loss - loss) / sigma) for loss in losses]
    delta = sum(x / sum(e) * rate for x, rate in zip(e, rates, strict=True)) - mean_rate
    v = beta * v + (1 - beta) * delta
    gamma = 1 - math.exp(-math.log(25 / 1e4) / K)
    return v, mean_rate * (1 - gamma) + lam * v


@pytest.mark.parametrize("n", [4, 5])
def test_as_printed_is_the_paper(n: int) -> None:
    """Two groups, from S_warm = 12 on; the rate grows, as it must."""
    S, T, start, rng = 60, 4, 12, random.Random(0)
    schedules = [lambda t: 0.1 + 0.0 * t, lambda t: 0.02 * (1 - 0.01 * t)]
    knobs = [Knob("a", schedules[0]), Knob("b", schedules[1], spread=0.3)]
    ensemble = Ensemble(
        knobs, n, sync_every=T, total_steps=S, controller=AsPrinted(mend_gamma=False), start=start, seed=9
    )

    @jax.jit
    def step(state: State, losses: Any) -> Any:
        return ensemble.values(state), ensemble.step((), (), state, losses)[2]

    state = ensemble.init()
    v, base, K = [0.0] * 2, [0.0] * 2, (S - start) / T
    for k in range(S // T - 1):
        rho = [[1 + knob.spread * x for knob, x in zip(knobs, row, strict=True)] for row in _places(n, k)]
        losses = [1 + rng.gauss(0, 0.1) - 0.5 * row[0] for row in rho]
        for t in range(T * k, T * k + T):
            now = [schedule(t) for schedule in schedules] if t < start else base
            expected = [[b * x for b, x in zip(now, row, strict=True)] for row in rho]
            values, state = step(state, jnp.array(losses))
            np.testing.assert_allclose(np.stack([*values.values()], 1), expected, rtol=1e-12)
        after = T * (k + 1)
        if after >= start:
            for g in range(2):
                rates = [now[g] * row[g] for row in rho]  # those of the step just made
                v[g], base[g] = printed(rates, losses, v[g], K)
            assert state.learned.tolist() == pytest.approx(base, rel=1e-12)
            assert state.memory.velocity.tolist() == pytest.approx(v, rel=1e-12)
    assert base[0] > 10 * 0.1
    for _ in range(3):
        state = step(state, jnp.array(losses))[1]
    assert state.learned.tolist() == pytest.approx(base, rel=1e-12)  # S - 1 is no multiple of T


def _places(n: int, k: int) -> list[list[float]]:
    return design.assign(design.levels(n), 9, k, 2)


def test_as_printed_can_fall_below_zero() -> None:
    """The lower rate did better: the velocity is -0.5, and the rate 1 - gamma - 100 * 0.5."""
    rule = AsPrinted(meta_momentum=0.0, meta_lr=100.0)
    ensemble = Ensemble([Knob("lr", lambda t: 1.0, spread=0.5)], 2, 2, 8, rule)
    state = ensemble.init()
    for _ in range(2):
        _, _, state = ensemble.step((), (), state, jnp.array([0.0, 10.0]))
    assert state.memory.velocity.tolist() == pytest.approx([-0.5])
    assert state.learned.tolist() == pytest.approx([(25 / 1e4) ** (1 / 3) - 50.0])  # K = (8 - 2) / 2


def test_without_spread_the_normalised_rule_learns_nothing() -> None:
    seen = rules.nothing_seen(Normalised(), 2)
    rule = jax.jit(lambda *arguments: rules.normalised(Normalised(), *arguments))
    seen, moves = rule(seen, jnp.array([1.0, 2.0, 4.0]), jnp.zeros((3, 2)), jnp.ones(3, bool))
    assert moves.tolist() == [0.0, 0.0]
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in seen)
