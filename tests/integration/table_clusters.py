"""A cluster of each storage kind, and new tables of it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

import numpy as np

import kvemb
from kvemb.api import Cluster
from kvemb.api.table import Table
from kvemb.local_cluster import LocalCluster
from tests.warm_clusters import warm

NODES = {"memcached": 2, "redis": 2, "valkey": 2, "redis-cluster": 3}
PROGRAMS = {"memcached": "memcached", "redis": "redis-server", "redis-cluster": "redis-server"}
names = (f"t{i}" for i in count())


def start(kind: str, require_server: Callable[[str], str], **options: Any) -> AbstractContextManager[LocalCluster]:
    if kind in PROGRAMS:
        require_server(PROGRAMS[kind])
    return warm(kind, NODES[kind], shards=2, **options)


def new_table(cluster: Cluster, dim: int = 4, **options: object) -> Table:
    options = {"optimizer": kvemb.optim.sgd(lr=1.0), "initializer": kvemb.init.zeros()} | options
    return cluster.create_table(next(names), dim=dim, **options)  # type: ignore[arg-type]


def ids_of(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**63), 2**63, n, dtype=np.int64)
