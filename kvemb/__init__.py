"""Train embedding tables larger than one machine's memory on rows that live in memcached, Redis or Valkey.

    import kvemb
    with kvemb.connect("kvemb.yaml") as cluster: ...

Everything here is imported at first use: importing the package loads no framework, and gRPC only when a cluster with
parameter servers is opened.

Example: a tour of the public API, on a real cluster of this machine that is cleaned up at its end. On a cluster of your own,
give `kvemb.connect` the path of its kvemb.yaml.

    >>> import kvemb, numpy as np
    >>> started = kvemb.local(store="valkey", nodes=1, shards=1)
    >>> cluster = kvemb.connect(started.start())      # in a program: with kvemb.local(...) as url:
    >>> users = cluster.create_table("user", dim=4, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())

    A row exists from its first push on; until then a pull computes its first value and writes nothing.

    >>> users.pull([7, 8, 7]).shape, len(users)
    ((3, 4), 0)

    Gradients of duplicate ids are summed. `wait`: the parameter servers have it. `flush`: every client sees it.

    >>> ack = users.push([7, 8, 7], np.ones((3, 4)))
    >>> ack.wait(timeout_s=30)
    >>> users.flush()
    >>> users.pull([7, 8])
    array([[-2., -2., -2., -2.],
           [-1., -1., -1., -1.]], dtype=float32)

    Run-time values may change at any step. Versions tell how stale a gradient was. Several tables travel together.

    >>> users.set_hyper(lr=0.5)
    >>> words = cluster.create_table("word", dim=2, optimizer=kvemb.optim.adam(), dtype="float16", exist_ok=True)
    >>> rows, versions = users.pull([7], return_versions=True)
    >>> ids = kvemb.hash_ids(["embedding", "server"])
    >>> ack = cluster.push({"user": ([7], rows), "word": (ids, np.ones((2, 2)))}, versions={"user": versions})
    >>> ack.wait_applied(timeout_s=30)
    >>> ack.staleness
    Staleness(changed_fraction=0.0, batches_elapsed=0)
    >>> {name: rows.shape for name, rows in cluster.pull({"user": [7], "word": ids}).items()}
    {'user': (1, 4), 'word': (2, 2)}

    Assign, erase, export and len go through the parameter servers too.

    >>> users.assign([9], np.full((1, 4), 3.0))
    >>> users.erase([7, 1000])
    1
    >>> ids, rows = users.export()
    >>> sorted(ids.tolist()), len(users), cluster.tables()
    ([8, 9], 2, ['user', 'word'])

    Wrong input is refused before anything is sent.

    >>> users.push([7.5], np.ones((1, 4)))
    Traceback (most recent call last):
    kvemb.errors.InvalidInputError: table 'user': ids have dtype float64, expected integers. ...

    >>> cluster.close()
    >>> started.stop()
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvemb import admit, columns, errors, evict, init, jax, keras, optim, serve, tensorflow, torch
    from kvemb.api import Cluster, connect, nodes
    from kvemb.api.table import Table
    from kvemb.arrays.hashing import hash_ids
    from kvemb.errors import KvembError
    from kvemb.local_cluster import local
    from kvemb.process import json_log_formatter

__all__ = [
    "Cluster",
    "KvembError",
    "Table",
    "admit",
    "columns",
    "connect",
    "errors",
    "evict",
    "hash_ids",
    "init",
    "jax",
    "json_log_formatter",
    "keras",
    "local",
    "nodes",
    "optim",
    "serve",
    "tensorflow",
    "torch",
]

_MODULES = ("admit", "columns", "errors", "evict", "init", "jax", "keras", "optim", "serve", "tensorflow", "torch")
_HOMES = {
    "Cluster": "kvemb.api",
    "KvembError": "kvemb.errors",
    "Table": "kvemb.api.table",
    "connect": "kvemb.api",
    "hash_ids": "kvemb.arrays.hashing",
    "json_log_formatter": "kvemb.process",
    "local": "kvemb.local_cluster",
    "nodes": "kvemb.api",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"kvemb.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'kvemb' has no attribute {name!r}")
    found: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__"]
