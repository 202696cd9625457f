"""Models of flax over rows: linen's apply, and nnx split into graph and parameters."""

from typing import Any

import numpy as np
import pytest
from memory_cluster import MemoryCluster

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
optax = pytest.importorskip("optax")
pytest.importorskip("flax")

from flax import linen, nnx  # noqa: E402

import kvemb.jax as kj  # noqa: E402

DIM = 4


def batches(n: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    wanted = rng.normal(size=20).astype(np.float32)
    ids = [rng.integers(0, 20, 32) for _ in range(n)]
    return [{"item": of, "label": wanted[of]} for of in ids]


def losses_of(predict: Any, params: Any) -> list[float]:
    item = MemoryCluster("sync").table("item", DIM, kj.sgd(0.5))
    dense = optax.sgd(0.05)

    def loss_fn(params: Any, rows: Any, batch: Any) -> Any:
        return ((predict(params, rows["item"])[:, 0] - batch["label"]) ** 2).mean()

    step, state, losses = kj.embed(loss_fn, {"item": item}, optimizer=dense), dense.init(params), []
    for batch in kj.prepare(step, batches(60), consistency="exact", threads_num=1, capacity=2):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return losses


def test_a_linen_model_trains_over_rows() -> None:
    model = linen.Sequential([linen.Dense(8), linen.relu, linen.Dense(1)])
    losses = losses_of(model.apply, model.init(jax.random.key(0), jnp.zeros((1, DIM))))
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])


def test_an_nnx_model_trains_over_rows() -> None:
    rngs = nnx.Rngs(0)
    graph, params = nnx.split(nnx.Sequential(nnx.Linear(DIM, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 1, rngs=rngs)), nnx.Param)
    losses = losses_of(lambda params, rows: nnx.merge(graph, params)(rows), params)
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])
