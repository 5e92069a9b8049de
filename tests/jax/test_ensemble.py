"""Whole runs in jax against the slow reference of tests/ensemble, and what happens to weights at the end of a round."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

import hdet  # noqa: E402
from hdet.errors import ArgumentError  # noqa: E402
from hdet.jax.ensemble import AsPrinted, Corrected, Ensemble, Knob, State  # noqa: E402
from tests.ensemble import twin as reference  # noqa: E402
from tests.models import batch, groups_of, two_layer  # noqa: E402
from tests.processes import run_ranks  # noqa: E402

S, T, ALPHA, S_WARM = 100, 12, 0.3, 36
MAX_LR = {"adam": [0.02, 0.01, 0.03], "sgd": [0.05, 0.03, 0.08]}


@pytest.fixture
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


# -- whole runs -------------------------------------------------------------------------------------------------------


def simulated(kind: str, N: int, auto_lr: bool, exponential: bool) -> reference.History:
    """The reference, with torch's gradients."""
    settings = reference.Settings(
        N=N,
        S=S,
        T=T,
        alpha=ALPHA,
        schedules=[reference.OneCycle(max_lr, S) for max_lr in MAX_LR[kind]],
        S_warm=S_WARM if auto_lr else None,
        exponential=exponential,
        seed=5,
    )
    model = two_layer()
    groups = groups_of(model)

    def loss_and_grad(theta: reference.Theta, t: int, r: int) -> tuple[float, reference.Theta]:
        with torch.no_grad():
            for xs, ys in zip(groups, theta, strict=True):
                for x, y in zip(xs, ys, strict=True):
                    x.copy_(y)
        x, y = batch(t, r)
        loss = mse_loss(model(x), y)
        grads = iter(torch.autograd.grad(loss, [p for group in groups for p in group]))
        return loss.item(), [[next(grads) for _ in group] for group in groups]

    theta0 = [[p.detach().clone() for p in group] for group in groups]
    rule = reference.Adam if kind == "adam" else reference.Momentum
    return reference.simulate(settings, theta0, loss_and_grad, rule)


def one_cycle(max_lr: float, highest: float = 25.0, lowest: float = 1e-4) -> Any:
    """torch's OneCycle of a rate, for traced steps; the twin has it in plain floats."""

    def eta(t: Any) -> Any:
        top = 0.3 * S - 1
        low, floor = max_lr / highest, max_lr / highest * lowest
        rise = low + (max_lr - low) / 2 * (1 - jnp.cos(jnp.pi * t / top))
        return jnp.where(
            t <= top, rise, floor + (max_lr - floor) / 2 * (1 + jnp.cos(jnp.pi * (t - top) / (S - 1 - top)))
        )

    return eta


def momentum(t: Any) -> Any:
    top = 0.3 * S - 1
    fall = 0.85 + 0.1 / 2 * (1 + jnp.cos(jnp.pi * t / top))
    return jnp.where(t <= top, fall, 0.95 - 0.1 / 2 * (1 + jnp.cos(jnp.pi * (t - top) / (S - 1 - top))))


def loss_of(w: list[list[Any]], x: Any, y: Any) -> Any:
    (first, bias), (second,), (last,) = w
    return jnp.mean((jnp.tanh(x @ first.T + bias) @ second.T + last - y) ** 2)


def update(kind: str, mu: Any, n: Any, grad: Any, m: Any, s: Any) -> tuple[Any, Any, Any]:
    """Momentum and Adam of the reference, for one array: the update, and what is remembered."""
    if kind == "sgd":
        m = jnp.where(n == 1, grad, mu * m + grad)
        return m, m, s
    m, s = mu * m + (1 - mu) * grad, 0.999 * s + 0.001 * grad * grad
    return (m / (1 - mu**n)) / (jnp.sqrt(s / (1 - 0.999**n)) + 1e-8), m, s


def trained(kind: str, N: int, ensemble: Ensemble) -> tuple[list[Any], list[Any], list[State], list[Any]]:
    """The same in jax, on the mean of the replicas' gradients: rates, weights, states, losses of every step."""

    def train_step(w: Any, memory: Any, knobs: Any, t: Any, x: Any, y: Any) -> Any:
        loss, grad = jax.value_and_grad(loss_of)(w, x, y)
        grad, rates = jax.lax.pmean(grad, "replica"), [knobs[f"lr{g}"] for g in range(3)]
        new_w, new_memory = [], []
        for g, (ws, grads, memories) in enumerate(zip(w, grad, memory, strict=True)):
            rows = [update(kind, momentum(t), t + 1, d, *old) for d, old in zip(grads, memories, strict=True)]
            new_w.append([p - rates[g] * u for p, (u, _, _) in zip(ws, rows, strict=True)])
            new_memory.append([(m, s) for _, m, s in rows])
        return new_w, new_memory, loss

    @jax.jit
    def step(w: Any, memory: Any, state: State, x: Any, y: Any) -> Any:
        knobs = ensemble.values(state)
        run = jax.vmap(train_step, in_axes=(0, 0, 0, None, 0, 0), axis_name="replica")
        w, memory, losses = run(w, memory, knobs, state.step, x, y)
        return *ensemble.step(w, memory, state, losses), knobs, losses

    w = ensemble.copies([[jnp.asarray(p.detach().numpy()) for p in group] for group in groups_of(two_layer())])
    memory = [[(jnp.zeros_like(p), jnp.zeros_like(p)) for p in group] for group in w]
    state, history = ensemble.init(), ([], [], [], [])
    for t in range(S):
        xs, ys = zip(*(batch(t, r) for r in range(N)), strict=True)
        x, y = (jnp.asarray(torch.stack(rows).numpy()) for rows in (xs, ys))
        w, memory, state, knobs, losses = step(w, memory, state, x, y)
        for sequence, value in zip(history, (knobs, w, state, losses), strict=True):
            sequence.append(value)
    assert step._cache_size() == 1  # rounds are counted in the state
    return history


CASES = [("sgd", 4, True, False), ("sgd", 5, True, True), ("adam", 3, True, False), ("adam", 4, True, True)]


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize(
    ("kind", "N", "auto_lr", "exponential"), [*CASES, ("sgd", 1, True, False), ("sgd", 3, False, False)]
)
def test_a_run_agrees_with_the_reference(kind: str, N: int, auto_lr: bool, exponential: bool) -> None:
    knobs = [Knob(f"lr{g}", one_cycle(max_lr), spread=ALPHA) for g, max_lr in enumerate(MAX_LR[kind])]
    controller = Corrected() if auto_lr else None
    decay = "exponential" if exponential else "schedule"
    ensemble = Ensemble(knobs, N, T, S, controller, start=S_WARM, decay=decay, seed=5)
    expected = simulated(kind, N, auto_lr, exponential)
    rates, weights, states, losses = trained(kind, N, ensemble)
    k = 0
    for t in range(S):
        ours = np.stack([rates[t][f"lr{g}"] for g in range(3)], 1)
        np.testing.assert_allclose(ours, expected.eta[t], rtol=1e-12, err_msg=f"rates of step {t}")
        np.testing.assert_allclose(losses[t], expected.loss[t], rtol=1e-12, err_msg=f"losses of step {t}")
        for g in range(3):
            for i, leaf in enumerate(weights[t][g]):
                theirs = np.stack([expected.theta[t][r][g][i].numpy() for r in range(N)])
                np.testing.assert_allclose(leaf, theirs, rtol=1e-12, atol=1e-12, err_msg=f"weights of step {t}")
        if int(states[t].round) > k:
            np.testing.assert_allclose(states[t].memory.velocity, expected.v[k], rtol=1e-10, atol=1e-14)
            if not exponential:
                np.testing.assert_allclose(states[t].learned, expected.m[k], rtol=1e-12)
            k = int(states[t].round)
    assert k == len(expected.m)
    if auto_lr and N > 1:
        assert any(abs(v) > 1e-6 for v in expected.v[-1])  # there was a signal


def test_scan_and_resuming_make_the_same_run() -> None:
    """All steps in one scan; or half of them, through the host's memory, and the other half: bit for bit."""
    knobs = [Knob("lr", optax.cosine_decay_schedule(0.1, 40)), Knob("pull", 0.1, spread=0.5, scale="log")]
    ensemble = Ensemble(knobs, 3, sync_every=4, total_steps=40, controller=Corrected(meta_lr=2.0))
    adam = optax.scale_by_adam()

    def train_step(w: Any, memory: Any, knobs: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((w - x) ** 2) + knobs["pull"] * jnp.sum(w**2))(w)
        updates, memory = adam.update(grad, memory, w)
        return w - knobs["lr"] * updates, memory, loss

    def step(carry: Any, x: Any) -> Any:
        w, memory, state = carry
        w, memory, losses = jax.vmap(train_step)(w, memory, ensemble.values(state), x)
        return ensemble.step(w, memory, state, losses, probe=lambda w: jnp.mean((w - 1) ** 2)), losses

    batches = 1 + jax.random.normal(jax.random.key(0), (40, 3, 8, 2))
    w = ensemble.copies(jnp.zeros(2))
    start = w, jax.vmap(adam.init)(w), ensemble.init()
    whole, _ = jax.lax.scan(step, start, batches)
    half, _ = jax.lax.scan(step, start, batches[:18])
    again, _ = jax.lax.scan(step, jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), half), batches[18:])
    assert jax.tree.structure(whole) == jax.tree.structure(again)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(whole[2].round) == 11  # 4, 8, ..., 36, 39 and 40
    np.testing.assert_array_equal(whole[0], jnp.broadcast_to(whole[0][0], (3, 2)))
    assert float(ensemble.bases(whole[2])["pull"]) != pytest.approx(0.1, rel=1e-3)


def torch_arm(rank: int, policy: str | None, steps: int) -> tuple[list[float], list[list[np.ndarray]]]:
    """One of two replicas in torch, each with gradients of its own: the rate and the weights of every step."""
    model = two_layer()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ensemble = hdet.Ensemble(optimizer, sync_every=4, group=hdet.arms(2), optimizer_state=policy)  # type: ignore[arg-type]
    rates, weights = [], []
    for t in range(steps):
        x, y = batch(t, rank)
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        ensemble.step(loss)
        weights.append([p.detach().numpy().copy() for p in model.parameters()])
    return rates, weights


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("policy", [None, "average", "keep", "reset"])
def test_optimizer_states_are_treated_as_in_torch(policy: str | None) -> None:
    """Two rounds of Adam, and three steps of a third, at torch's rates; by default moments are averaged."""
    steps, adam = 11, optax.scale_by_adam()
    arms = run_ranks(torch_arm, 2, policy, steps)
    ensemble = Ensemble([Knob("lr", 0.01)], 2, 4, optimizer_state=adam.init if policy == "reset" else policy)

    def train_step(w: Any, memory: Any, rate: Any, x: Any, y: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: loss_of([w[:2], w[2:3], w[3:]], x, y))(w)
        updates, memory = adam.update(grad, memory)
        return jax.tree.map(lambda p, u: p - rate * u, w, updates), memory, loss

    @jax.jit
    def step(w: Any, memory: Any, state: State, rates: Any, x: Any, y: Any) -> Any:
        return ensemble.step(*(found := jax.vmap(train_step)(w, memory, rates, x, y))[:2], state, found[2])

    w = ensemble.copies([jnp.asarray(p.detach().numpy()) for p in two_layer().parameters()])
    memory, state = jax.vmap(adam.init)(w), ensemble.init()
    for t in range(steps):
        xs, ys = zip(*(batch(t, r) for r in range(2)), strict=True)
        rates = jnp.array([rates[t] for rates, _ in arms])
        w, memory, state = step(w, memory, state, rates, *(jnp.asarray(torch.stack(rows).numpy()) for rows in (xs, ys)))
        for i, leaf in enumerate(w):
            np.testing.assert_allclose(leaf, [rows[t][i] for _, rows in arms], rtol=1e-9, atol=1e-12, err_msg=str(t))
    assert int(state.round) == 2


# -- the end of a round -----------------------------------------------------------------------------------------------


def simple(n: int = 4, **arguments: Any) -> Ensemble:
    return Ensemble([Knob("lr", 0.1)], n, **{"sync_every": 1, "total_steps": 10, **arguments})


def test_a_replica_that_is_not_finite_takes_the_mean_of_the_others() -> None:
    """Replica 1 has a NaN loss, replica 2 infinite weights; integers and keys belong to each replica."""
    ensemble = simple(optimizer_state="keep")
    weights = {"w": jnp.array([[1.0], [9.0], [jnp.inf], [4.0]]), "half": jnp.arange(4, dtype=jnp.bfloat16)}
    own = jnp.array([1.0, jnp.nan, 5.0, 2.0]), jnp.arange(4), jax.random.split(jax.random.key(0), 4)
    weights, (memory, count, keys), state = ensemble.step(
        weights, own, ensemble.init(), jnp.array([1.0, jnp.nan, 1.0, 1.0])
    )
    assert state.live.tolist() == [True, False, False, True]
    assert weights["w"].ravel().tolist() == [2.5] * 4
    assert weights["half"].tolist() == [1.5] * 4
    assert weights["half"].dtype == jnp.bfloat16
    assert memory.tolist() == [1.0, 1.5, 1.5, 2.0]  # live ones keep their own
    assert count.tolist() == [0, 1, 2, 3]
    assert bool(jnp.all(keys == own[2]))


def test_optimizer_states_are_averaged_kept_or_made_anew() -> None:
    """Replica 1 was left out, and its NaN reaches no other. Counts are nobody's mean."""
    weights, losses = jnp.array([[1.0], [9.0], [3.0]]), jnp.array([1.0, jnp.nan, 1.0])
    own = {"moment": jnp.array([1.0, jnp.nan, 5.0]), "count": jnp.array([7, 7, 7])}
    for policy, moments, count in [
        (None, [3.0] * 3, 7),
        ("average", [3.0] * 3, 7),
        ("keep", [1.0, 3.0, 5.0], 7),
        (lambda w: {"moment": w[0] / 4, "count": jnp.zeros((), int)}, [0.5] * 3, 0),  # of the mean weights
    ]:
        ensemble = simple(3, optimizer_state=policy)
        _, found, _ = jax.jit(ensemble.step)(weights, own, ensemble.init(), losses)
        assert found["moment"].tolist() == moments, policy
        assert found["count"].tolist() == [count] * 3
        _, found, state = ensemble.step(weights, own, ensemble.init(), jnp.full(3, jnp.nan))
        assert not state.live.any()
        assert found["count"].tolist() == [7] * 3  # nothing changes if all have diverged
        assert found["moment"][::2].tolist() == [1.0, 5.0]


def test_half_precision_is_summed_in_float32() -> None:
    """256 + 1 is no bfloat16: sums in half precision would lose what one replica adds."""
    weights, _, _ = simple().step(jnp.array([256, 1, 1, 2], jnp.bfloat16), (), simple().init(), jnp.ones(4))
    assert weights.tolist() == [65.0] * 4


def test_if_no_replica_is_finite_weights_stay_and_the_state_says_so() -> None:
    ensemble, weights = simple(2), jnp.array([1.0, 3.0])
    before = ensemble.init()
    after, own, state = ensemble.step(weights, weights, before, jnp.array([jnp.nan, jnp.inf]))
    assert after.tolist() == own.tolist() == [1.0, 3.0]
    assert state.live.tolist() == [False, False]
    assert state.learned.tolist() == before.learned.tolist()


def test_a_single_replica_goes_on_whatever_its_loss() -> None:
    ensemble = simple(1)
    weights, _, state = ensemble.step(jnp.array([jnp.nan]), (), ensemble.init(), jnp.array([jnp.nan]))
    assert state.live.tolist() == [True]
    assert bool(jnp.isnan(weights[0]))
    assert ensemble.values(state)["lr"].tolist() == ensemble.values(ensemble.init())["lr"].tolist()


def test_without_losses_replicas_are_averaged_and_nothing_moves() -> None:
    ensemble = simple(3)
    weights, _, state = ensemble.step(jnp.array([1.0, 2.0, 6.0]), (), ensemble.init(), None)
    assert weights.tolist() == [3.0] * 3
    assert state.learned.tolist() == ensemble.init().learned.tolist()
    assert int(state.round) == 1


def test_a_probe_is_compared_in_place_of_losses() -> None:
    ensemble = simple(2, sync_every=2, controller=Corrected(meta_momentum=0.0))
    weights, moved = jnp.array([0.0, 1.0]), []
    for sign in (1, -1):
        state = ensemble.init()
        for _ in range(2):
            w, _, state = ensemble.step(weights, (), state, jnp.ones(2), probe=lambda w, sign=sign: sign * w)
        moved.append(float(ensemble.bases(state)["lr"]))
        assert w.tolist() == [0.5, 0.5]
    assert moved[0] < 0.1 < moved[1]  # replica 1 has the higher rate


def test_rounds_end_where_torchs_do() -> None:
    ensemble = simple(2, sync_every=4, total_steps=10)
    step = jax.jit(lambda state: ensemble.step((), (), state, jnp.ones(2))[2])
    state, ends = ensemble.init(), []
    for t in range(1, 13):
        k = int(state.round)
        state = step(state)
        ends += [t] if int(state.round) > k else []
    assert ends == [4, 8, 9, 10, 12]
    assert [t for t in range(11) if ensemble.rounds.ends_at(t)] == [4, 8, 9, 10]


def test_a_run_of_unknown_length() -> None:
    ensemble = Ensemble([Knob("lr", 0.1)], 2, sync_every=3)
    state = ensemble.init()
    step = jax.jit(lambda state: ensemble.step((), (), state, jnp.ones(2))[2])
    for _ in range(7):
        state = step(state)
    assert int(state.round) == 2


# -- bad input --------------------------------------------------------------------------------------------------------

LR = [Knob("lr", 0.1)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Knob("lr", "fast"), "value"),
        (lambda: Knob("lr", math.nan), "base value"),
        (lambda: Knob("lr", 0.0), "scale"),
        (lambda: Knob("p", 1.5, scale="logit"), "base value"),
        (lambda: Knob("lr", 0.1, spread=1.5), "spread"),
        (lambda: Knob("lr", 0.1, scale="cubic"), "scale"),
        (lambda: Knob("p", 0.1, spread=0.5, scale="linear", bounds=(0.0, 0.3)), "bounds"),
        (lambda: Knob("lr", lambda t: 0.1, bounds=(0.0, 1.0)), "without bounds"),
        (lambda: Knob("lr", lambda t: 0.1, scale="linear"), "scale"),
        (lambda: Ensemble([], 4, 10), "knobs"),
        (lambda: Ensemble(LR * 2, 4, 10), "knobs"),
        (lambda: Ensemble(LR, 0, 10), "replicas"),
        (lambda: Ensemble(LR, 4), "sync_every"),
        (lambda: Ensemble(LR, 4, 0), "sync_every"),
        (lambda: Ensemble(LR, 4, 10, 0), "total_steps"),
        (lambda: Ensemble(LR, 4, 10, 100, start=100), "start"),
        (lambda: Ensemble(LR, 4, 10, decay="linear"), "decay"),
        (lambda: Ensemble(LR, 4, 10, decay="exponential"), "total_steps"),
        (lambda: Ensemble(LR, 4, 10, optimizer_state="reset"), 'a function, but got optimizer_state="?.reset'),
        (lambda: Ensemble(LR, 4, 10, optimizer_state=["keep"]), "optimizer_state"),
        (lambda: Ensemble([Knob("lr", lambda t: 0.1)], 4, 10, controller=AsPrinted()), "total_steps"),
        (lambda: Ensemble(LR, 4, 10, 100, controller=AsPrinted()), "schedules for AsPrinted"),
        (
            lambda: simple().step(jnp.zeros((3, 2)), (), simple().init(), None),
            r"rows.*losses\)\[0\] has the shape \(3, 2\)",
        ),
        (lambda: simple().step((), {"m": jnp.zeros(())}, simple().init(), None), r"\[1\]\['m'\] has the shape \(\)"),
        (lambda: simple().step((), (), simple().init(), jnp.ones(())), r"\[2\] has the shape \(\)"),
        (lambda: simple().step((), (), simple().init(), jnp.ones((4, 1))), r"\[2\] has the shape \(4, 1\)"),
    ],
)
def test_bad_input_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=f"(?s){words}.*;"):
        make()
