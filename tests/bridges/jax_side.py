"""The contract's model in JAX: on tables, and on arrays with optax."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import kvemb.jax as kj

RULES = {"sgd": kj.sgd(0.5), "adagrad": kj.adagrad(0.1), "adam": kj.adam(0.01)}
PLAIN = {"sgd": optax.sgd(0.5), "adagrad": optax.adagrad(0.1), "adam": optax.adam(0.01)}


def loss_of(params: Any, rows: Any, batch: Any) -> Any:
    return (((rows["user"] * rows["item"]).sum(1) - batch["label"]) ** 2).mean()


def on_tables(tables: dict[str, Any], data: list[dict[str, Any]], ahead: str | None = None) -> list[float]:
    step = kj.embed(loss_of, tables)
    batches: Any = data if ahead is None else kj.prepare(step, data, consistency=ahead, threads_num=1, capacity=2)
    return [float(step({}, batch)[0]) for batch in batches]


def on_its_own(rows: dict[str, Any], data: list[dict[str, Any]], kind: str) -> list[float]:
    key = {name: ("user" if rows["user"] is rows["item"] else name) for name in rows}
    params = {key[name]: jnp.asarray(of) for name, of in rows.items()}
    state, losses = PLAIN[kind].init(params), []
    of_rows = jax.value_and_grad(lambda params, batch: loss_of({}, {n: params[key[n]][batch[n]] for n in key}, batch))
    for batch in data:
        loss, grads = of_rows(params, batch)
        updates, state = PLAIN[kind].update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses


def evaluated(tables: dict[str, Any], batch: dict[str, Any]) -> float:
    return float(kj.embed(loss_of, tables).evaluate({}, batch))
