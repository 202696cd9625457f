"""A step over rows with its batch on two devices of the CPU: sharded by jit, and by shard_map inside of the loss; inside of pmap it is
refused. A process of its own, for
the number of devices is settled when JAX begins.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from memory_cluster import MemoryCluster

import kvemb.jax as kj
from kvemb.errors import InvalidInputError


def loss_fn(params: Any, rows: Any, batch: Any) -> Any:
    return ((rows["item"] @ params - batch["label"]) ** 2).mean()


def pushed(loss: Any, batch: Any) -> tuple[float, np.ndarray, np.ndarray]:
    """The loss, the gradient by the parameters, and what was pushed."""
    item = MemoryCluster("sync").table("item", 3, kj.sgd(0.5), num_ids=5)
    value, grads = kj.embed(loss, {"item": item})(jnp.ones(3), batch)
    return float(value), np.asarray(grads), item.cluster.pushes[-1]["item"][1]


def main() -> None:
    assert len(jax.devices()) == 2
    mesh = Mesh(np.array(jax.devices()), ("data",))
    batch = {"item": np.arange(8) % 5, "label": np.linspace(0, 1, 8, dtype=np.float32)}
    expected = pushed(loss_fn, batch)
    on_both = {name: jax.device_put(of, NamedSharding(mesh, P("data"))) for name, of in batch.items()}

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    def mapped(params: Any, rows: Any, batch: Any) -> Any:
        return jax.lax.pmean(loss_fn(params, rows, batch), "data")

    for got in (pushed(loss_fn, on_both), pushed(mapped, batch), pushed(mapped, on_both)):
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
    with pytest.raises(InvalidInputError, match=r"inside of jax\.jit, pmap"):
        jax.pmap(lambda one: pushed(loss_fn, one)[0])({name: of.reshape(2, 4) for name, of in batch.items()})
    print("equal on", len(jax.devices()), "devices")


if __name__ == "__main__":
    main()
