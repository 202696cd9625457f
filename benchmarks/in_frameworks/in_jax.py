"""DeepFM in JAX, parameters by optax: with its embeddings among the parameters, and with rows of kvemb tables."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kvemb
from benchmarks.in_frameworks.problem import EPSILON, Contender, Loop, Problem
from benchmarks.in_frameworks.stored_tables import AHEAD, MAX_UNAPPLIED, stored_tables
from kvemb.jax import adam, embed, prepare

VERSIONS = {"jax": jax.__version__, "optax": optax.__version__}


def contenders(problem: Problem, where: str) -> dict[str, Contender]:
    """JAX's own, ours, and ours with rows pulled ahead; `where` is the cluster's URL."""
    cluster = kvemb.connect(where)
    return {"own": _own(problem), "ours": _ours(problem, cluster, ""), "ours, ahead": _ours(problem, cluster, ".ahead")}


def _own(problem: Problem) -> Loop:
    optimizer = _adam(problem)
    params = {**_dense(problem), **{name: jnp.asarray(rows) for name, rows in problem.rows.items()}}
    state = optimizer.init(params)

    def loss_of(params: Any, batch: Any) -> Any:
        at = batch["positions"]
        return _loss(params, {"linear": params["linear"][at], "factors": params["factors"][at]}, batch)

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    compiled = jax.jit(step, donate_argnums=(0, 1))

    def train(batch: Any) -> Any:
        nonlocal params, state
        params, state, loss = compiled(params, state, batch)
        return loss

    batches = _batches(problem, {"positions": problem.positions})
    return Loop(lambda indices: [batches[i] for i in indices], train, lambda: jax.block_until_ready((params, state)) and None)


def _ours(problem: Problem, cluster: Any, suffix: str) -> Loop:
    tables = stored_tables(cluster, problem, f"jax{suffix}", adam(float(problem.lr), eps=EPSILON))
    optimizer = _adam(problem)
    params = _dense(problem)
    state = optimizer.init(params)
    step = embed(_loss, tables, optimizer=optimizer, max_unapplied=MAX_UNAPPLIED)

    def train(batch: Any) -> Any:
        nonlocal params, state
        params, state, loss = step(params, state, batch)
        return loss

    def settle() -> None:
        jax.block_until_ready((params, state))
        cluster.flush()

    batches = _batches(problem, {"linear": problem.ids, "factors": problem.ids})
    turn: list[Any] = []
    loader = prepare(step, turn, **AHEAD) if suffix else turn

    def load(indices: Any) -> Any:
        turn[:] = [batches[i] for i in indices]
        return loader

    return Loop(load, train, settle)


def _loss(params: Any, rows: Any, batch: Any) -> Any:
    logits = _logits(params, rows["linear"], rows["factors"], batch["values"])
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, batch["labels"]))


def _logits(params: Any, weights: Any, vectors: Any, values: Any) -> Any:
    first_order = jnp.sum(weights[..., 0] * values, axis=1)
    vectors = vectors * values[..., None]
    second_order = 0.5 * jnp.sum(jnp.square(jnp.sum(vectors, axis=1)) - jnp.sum(jnp.square(vectors), axis=1), axis=1)
    hidden = vectors.reshape(len(vectors), -1)
    for at in range(2):
        hidden = jax.nn.relu(hidden @ params[f"kernel{at}"] + params[f"bias{at}"])
    return first_order + second_order + (hidden @ params["kernel2"] + params["bias2"])[:, 0]


def _dense(problem: Problem) -> dict[str, Any]:
    kernels = {f"kernel{at}": jnp.asarray(kernel) for at, kernel in enumerate(problem.kernels)}
    return {**kernels, **{f"bias{at}": jnp.zeros(kernel.shape[1]) for at, kernel in enumerate(problem.kernels)}}


def _adam(problem: Problem) -> Any:
    return optax.adam(float(problem.lr), eps=EPSILON)


def _batches(problem: Problem, more: dict[str, np.ndarray[Any, Any]]) -> list[dict[str, Any]]:
    arrays = {"values": problem.values, "labels": problem.labels, **more}
    return [{name: array[i] for name, array in arrays.items()} for i in range(len(problem.labels))]
