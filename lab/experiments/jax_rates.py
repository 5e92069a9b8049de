"""``hdet.jax.auto`` on four workloads of *dev*, beside ``hdet`` in torch and beside what optax.contrib has.

    python lab/experiments/jax_rates.py --seeds 2     # a quarter of an hour on two cores; needs jax and make bench-data
    python lab/experiments/jax_rates.py --table

Weights, batches and held-out losses are torch's: a model of `real` is drawn, its weights train in jax, and go back to
be evaluated. Each method runs at one setting for all workloads: hdet from the customary rate as its guess; prodigy and
mechanic on a cosine from 1, momo and schedule_free with the rates that optax has as defaults.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import torch
from real.models.tables import WideDeep
from real.optimizers import DECAY
from real.workloads import DEV, Workload
from torch import Tensor, nn

import hdet
import hdet.jax

RESULTS = Path(__file__).parent / "results" / "jax_rates.json"
CHUNK = 50
Params = dict[str, jax.Array]


# -- the models, from the weights of torch's --------------------------------------------------------------------------


def linear(w: Params, name: str, x: jax.Array) -> jax.Array:
    bias = w.get(f"{name}.bias")
    return x @ w[f"{name}.weight"].T + (0.0 if bias is None else bias)


def norm(w: Params, name: str, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def next_loss(logits: jax.Array, window: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:]).mean()


def gpt(w: Params, window: jax.Array) -> jax.Array:
    text, heads = window[:, :-1], 3
    x = w["tokens.weight"][text] + w["places.weight"][: text.shape[1]]
    seen = jnp.tril(jnp.ones((text.shape[1],) * 2, bool))
    for layer in (f"layers.{i}" for i in range(2)):
        normed = norm(w, f"{layer}.own_norm", x)
        split = (*text.shape, heads, -1)
        queries = linear(w, f"{layer}.own.queries", normed).reshape(split)
        keys, values = (y.reshape(split) for y in jnp.split(linear(w, f"{layer}.own.joint", normed), 2, -1))
        scores = jnp.einsum("bqhc,bkhc->bhqk", queries, keys) / queries.shape[-1] ** 0.5
        mixed = jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), values)
        x = x + linear(w, f"{layer}.own.out", mixed.reshape(*text.shape, -1))
        inner = jax.nn.relu(linear(w, f"{layer}.mlp_in", norm(w, f"{layer}.mlp_norm", x)))
        x = x + linear(w, f"{layer}.mlp_out", inner)
    return next_loss(linear(w, "head", norm(w, "norm", x)), window)


def gru(w: Params, window: jax.Array) -> jax.Array:
    given = linear(w, "gru.inputs", w["tokens.weight"][window[:, :-1]])

    def step(state: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        reset_in, update_in, new_in = jnp.split(row, 3, -1)
        reset, update, new = jnp.split(linear(w, "gru.memory", state), 3, -1)
        keep = jax.nn.sigmoid(update_in + update)
        fresh = jnp.tanh(new_in + jax.nn.sigmoid(reset_in + reset) * new)
        state = fresh + keep * (state - fresh)
        return state, state

    first = jnp.zeros((len(window), w["gru.memory.weight"].shape[1]))
    states = jax.lax.scan(step, first, given.swapaxes(0, 1))[1]
    return next_loss(linear(w, "head", states.swapaxes(0, 1)), window)


def factors(w: Params, users: jax.Array, items: jax.Array, ratings: jax.Array) -> jax.Array:
    product = (w["users.weight"][users] * w["items.weight"][items]).sum(1)
    out = w["mean"] + w["user_bias.weight"][users, 0] + w["item_bias.weight"][items, 0] + product
    return ((out - ratings) ** 2).mean()


def wide_deep(model: WideDeep) -> Callable[..., jax.Array]:
    sizes, crossings = model.sizes, model.crossings

    def loss(w: Params, categories: jax.Array, numbers: jax.Array, labels: jax.Array) -> jax.Array:
        columns = list(categories.T)
        crossed = [columns[a] * sizes[b] + columns[b] for a, b in crossings]
        wide = sum(w[f"wide.{i}.weight"][column, 0] for i, column in enumerate(columns + crossed))
        x = jnp.concatenate([*(w[f"deep.{i}.weight"][c] for i, c in enumerate(columns)), numbers], 1)
        for i, _ in enumerate(model.hidden):
            x = jax.nn.relu(linear(w, f"hidden.{i}", x))
        return optax.sigmoid_binary_cross_entropy(linear(w, "head", x)[:, 0] + wide, labels).mean()

    return loss


LOSSES: dict[str, Callable[[Any], Callable[..., jax.Array]]] = {
    "adult-widedeep": wide_deep,
    "movielens-factors": lambda model: factors,
    "shakespeare-gpt": lambda model: gpt,
    "shakespeare-gru": lambda model: gru,
}


# -- the methods ------------------------------------------------------------------------------------------------------


def base_of(optimizer: str, rate: Any) -> optax.GradientTransformation:
    """As in torch."""
    if optimizer == "adagrad":
        return optax.chain(optax.scale_by_rss(0.0, 1e-20), optax.scale_by_learning_rate(rate))
    return {"adamw": optax.adamw, "lion": optax.lion}[optimizer](rate, weight_decay=DECAY[optimizer])


def peers(workload: Workload) -> dict[str, Any]:
    cosine = optax.cosine_decay_schedule(1.0, workload.steps)
    guess = optax.inject_hyperparams(lambda learning_rate: base_of(workload.optimizer, learning_rate))
    return {
        "hdet.jax": hdet.jax.auto(guess(learning_rate=workload.customary), total_steps=workload.steps),
        "prodigy": optax.contrib.prodigy(cosine),
        "mechanic": optax.contrib.mechanize(base_of(workload.optimizer, cosine)),
        "momo": optax.contrib.momo_adam(),
        "schedule_free": optax.contrib.schedule_free_adamw(),
    }


class Lion(torch.optim.Optimizer):
    """torch has none."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                update = torch.lerp(momentum, p.grad, 0.1).sign_()
                momentum.lerp_(p.grad, 0.01)
                p.mul_(1 - group["lr"] * DECAY["lion"]).sub_(update, alpha=group["lr"])


def in_torch(workload: Workload, seed: int) -> dict[str, Any]:
    task = workload.task()
    model = task.model(seed)
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adagrad": torch.optim.Adagrad,
        "adamw": lambda params, lr: torch.optim.AdamW(params, lr=lr, weight_decay=DECAY["adamw"]),
        "lion": Lion,
    }
    optimizer = kinds[workload.optimizer](model.parameters(), lr=workload.customary)
    scheduler = hdet.auto(optimizer, total_steps=workload.steps)
    for t in range(workload.steps):
        loss = task.loss(model, task.batch(seed, t))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach())
    assert scheduler.found is not None
    return {"rate": scheduler.found.rate, "status": scheduler.found.status, "loss": task.evaluate(model)["loss"]}


def rows_of(task: Any, seed: int, begin: int, end: int) -> tuple[jax.Array, ...]:
    parts = zip(*(task.batch(seed, t) for t in range(begin, end)), strict=True)
    stacked = [torch.stack(list(part)) for part in parts]
    return tuple(jnp.asarray((x if x.is_floating_point() else x.int()).numpy()) for x in stacked)


def in_jax(workload: Workload, name: str, optimizer: Any, seeds: range) -> list[dict[str, Any]]:
    task = workload.task()
    loss_of = LOSSES[workload.name](task.model(0))
    optimizer = optax.with_extra_args_support(optimizer)

    @jax.jit
    def chunk(params: Params, state: Any, rows: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            params, state = carry
            loss, grads = jax.value_and_grad(loss_of)(params, *row)
            updates, state = optimizer.update(grads, state, params, value=loss)
            return (optax.apply_updates(params, updates), state), loss

        return jax.lax.scan(step, (params, state), rows)

    found = []
    for seed in seeds:
        model = task.model(seed)
        params = {key: jnp.asarray(p.detach().numpy()) for key, p in model.named_parameters()}
        state = optimizer.init(params)
        for t in range(0, workload.steps, CHUNK):
            (params, state), _ = chunk(params, state, rows_of(task, seed, t, t + CHUNK))
        last = optax.contrib.schedule_free_eval_params(state, params) if name == "schedule_free" else params
        _load(model, last)
        told = hdet.jax.found(state) if name == "hdet.jax" else None
        own = {} if told is None else {"rate": told.rate, "status": told.status, "rolled_back": told.rolled_back}
        found.append({**own, "loss": task.evaluate(model)["loss"]})
    return found


@torch.no_grad()
def _load(model: nn.Module, params: Params) -> None:
    for key, p in model.named_parameters():
        p.copy_(Tensor(jax.device_get(params[key]).copy()))


def table(results: dict[str, Any]) -> str:
    names = ["hdet (torch)", "hdet.jax", "prodigy", "mechanic", "momo", "schedule_free"]
    lines = [f"| workload | rate, torch | rate, jax | {' | '.join(names)} |", "| --- |" + " ---: |" * (len(names) + 2)]
    for workload, rows in results.items():
        rates = [", ".join(f"{run['rate']:.2g}" for run in rows[name]) for name in names[:2]]
        losses = [", ".join(f"{run['loss']:.3f}" for run in rows.get(name, [])) for name in names]
        lines.append(f"| {workload} | {' | '.join(rates + losses)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workloads", default=",".join(LOSSES))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the table of the results that there are")
    given = parser.parse_args()
    results: dict[str, Any] = json.loads(given.results.read_text()) if given.results.exists() else {}
    for workload in () if given.table else (one for one in DEV if one.name in given.workloads.split(",")):
        begun, seeds = time.perf_counter(), range(given.seeds)
        rows: dict[str, Any] = {"hdet (torch)": [in_torch(workload, seed) for seed in seeds]}
        for name, optimizer in peers(workload).items():
            rows[name] = in_jax(workload, name, optimizer, seeds)
            print(workload.name, name, rows[name], f"{time.perf_counter() - begun:.0f} s", flush=True)
            results[workload.name] = rows
            given.results.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
