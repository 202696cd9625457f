"""One of two processes that train together: rows by kvemb, the dense part averaged by JAX's own collectives.

Arguments: the cluster's URL, the rank, the address of JAX's coordinator. It prints losses, parameters and rows as JSON.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import kvemb
import kvemb.jax as kj

N_ITEMS, DIM, N_PROCESSES, RATE = 20, 4, 2, 0.5
RULE = optax.adam(0.05)


def loss_fn(params: Any, rows: Any, batch: Any) -> Any:
    return ((rows["item"] @ params["w"] + params["b"] - batch["label"]) ** 2).mean()


def first_params() -> dict[str, Any]:
    return {"w": jnp.linspace(-1.0, 1.0, DIM), "b": jnp.zeros(())}


def batches() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [{"item": rng.integers(0, N_ITEMS, 16), "label": rng.normal(size=16).astype(np.float32)} for _ in range(10)]


def main(url: str, rank: int, coordinator: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, N_PROCESSES, rank)
    with kvemb.connect(url, trainer=f"rank{rank}", timeout_s=120) as cluster:
        item = cluster.create_table("item", dim=DIM, optimizer=kj.sgd(RATE), initializer=kvemb.init.zeros(), reduce="mean", exist_ok=True)
        step, params, losses = kj.embed(loss_fn, {"item": item}), first_params(), []
        state = RULE.init(params)
        for batch in batches():
            loss, grads = step(params, {name: of[rank::N_PROCESSES] for name, of in batch.items()})
            grads = jax.tree.map(lambda of: of.mean(axis=0), multihost_utils.process_allgather(grads))
            updates, state = RULE.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            losses.append(float(loss))
        made = {
            "losses": losses,
            "w": np.asarray(params["w"]).tolist(),
            "b": float(params["b"]),
            "rows": item.pull(range(N_ITEMS)).tolist(),
        }
        print(json.dumps(made), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
