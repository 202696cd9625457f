"""The contract's models in JAX: on tables, and on arrays with optax."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kvemb.jax as kj

RULES = {"sgd": kj.sgd(0.5), "adagrad": kj.adagrad(0.1), "adam": kj.adam(0.01)}
PLAIN = {"sgd": optax.sgd(0.5), "adagrad": optax.adagrad(0.1), "adam": optax.adam(0.01)}
REPEATS = True


def loss_of(params: Any, rows: Any, batch: Any) -> Any:
    return (((rows["user"] * rows["item"]).sum(1) - batch["label"]) ** 2).mean()


def bag_loss(params: Any, rows: Any, batch: Any) -> Any:
    return (((rows["word"].sum(2) * batch["weight"]).sum(1) - batch["label"]) ** 2).mean()


class Trained:
    """Two tables, and a step over them."""

    def __init__(self, tables: Mapping[str, Any]) -> None:
        self._step = kj.embed(loss_of, tables)

    def step(self, batch: Any) -> float:
        return float(self._step({}, batch)[0])

    def forget(self) -> None:
        """Nothing is kept."""

    def evaluated(self, batch: Any) -> float:
        return float(self._step.evaluate({}, batch))

    def ahead(self, data: Iterable[Any], **options: Any) -> Iterable[Any]:
        return kj.prepare(self._step, data, threads_num=1, capacity=2, **options)

    def exported(self, tables: Mapping[str, Any], batch: Any) -> float:
        rows = {name: jnp.asarray(table.pull(np.arange(table.definition.num_ids))) for name, table in tables.items()}
        return float(loss_of({}, {name: rows[name][batch[name]] for name in rows}, batch))


class TrainedBags:
    """A table of bags: ids [b, n] that 0 fills up, and a weight for each."""

    def __init__(self, table: Any) -> None:
        self._step = kj.embed(bag_loss, {"word": table}, padding_id=0)

    def step(self, batch: Any) -> float:
        return float(self._step({}, batch)[0])


def on_its_own(rows: Mapping[str, Any], data: list[dict[str, Any]], kind: str) -> list[float]:
    key = {name: ("user" if rows["user"] is rows["item"] else name) for name in rows}
    params = {key[name]: jnp.asarray(of) for name, of in rows.items()}
    state, losses = PLAIN[kind].init(params), []

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda params: loss_of({}, {n: params[key[n]][batch[n]] for n in key}, batch))(params)
        updates, state = PLAIN[kind].update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for batch in data:
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return losses


def turn_loss(params: Any, rows: Any, batch: Any) -> Any:
    return sum(batch["on"][name] * ((of.sum(1) - batch["label"]) ** 2).mean() for name, of in rows.items())


def turned(step: Any, data: list[Any]) -> None:
    for tower, batch in data:
        step(batch | {"on": {name: float(name == tower) for name in ("user", "item")}})


def turns(tables: Mapping[str, Any], data: list[Any]) -> None:
    step = kj.embed(turn_loss, tables)
    turned(lambda batch: step({}, batch), data)


def turns_alone(rows: Mapping[str, Any], data: list[Any]) -> dict[str, Any]:
    params, optimizer = {name: jnp.asarray(of) for name, of in rows.items()}, PLAIN["adam"]
    state = optimizer.init(params)

    def step(batch: Any) -> None:
        nonlocal params, state
        grads = jax.grad(lambda params: turn_loss({}, {name: params[name][batch[name]] for name in params}, batch))(params)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)

    turned(step, data)
    return params
