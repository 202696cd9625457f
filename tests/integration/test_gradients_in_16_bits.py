"""Gradients that travel in 16 bits, between real processes."""

from collections.abc import Iterator

import numpy as np
import pytest

import kvemb
from kvemb.api import Cluster
from kvemb.arrays.rounding import round_nearest, to_float32
from kvemb.errors import InvalidInputError
from kvemb.local_cluster import LocalCluster
from tests.warm_clusters import warm

IDS = np.arange(1000)


@pytest.fixture(scope="module")
def two_shards() -> Iterator[LocalCluster]:
    with warm("valkey", 2, shards=2) as local:
        yield local


def sgd_table(cluster: Cluster, name: str, **options: object) -> kvemb.Table:
    options = {"optimizer": kvemb.optim.sgd(lr=1.0), "initializer": kvemb.init.zeros(), "exist_ok": True} | options
    return cluster.create_table(name, dim=4, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_gradients_are_summed_in_float32(two_shards: LocalCluster, dtype: str) -> None:
    with kvemb.connect(two_shards.url) as cluster:
        table = sgd_table(cluster, f"wire-{dtype}")
        table.set_wire_dtype(dtype)
        assert table.wire_dtype == dtype
        rng = np.random.default_rng(1)
        expected, exact = np.zeros((1000, 4), np.float32), np.zeros((1000, 4))
        for push in range(20):
            grads = rng.normal(size=(1000, 4)).astype(np.float32)
            if push % 2:
                table.push(IDS, grads)
            else:
                cluster.push({table.name: (IDS, grads)})
            cluster.flush()
            expected -= to_float32(round_nearest(grads, dtype), dtype)
            exact -= grads
        rows = table.pull(IDS)
        assert np.array_equal(rows, expected)
        assert not np.array_equal(rows, exact.astype(np.float32))
        assert np.abs(rows - exact).max() < 20 * 4 * {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
        with pytest.raises(InvalidInputError, match=r"wire_dtype is .float8."):
            table.set_wire_dtype("float8")
