"""What a trainer does in the tests of faults: one table of whole numbers, pushes that add, pulls that check."""

import time
from collections.abc import Callable

import numpy as np

import kvemb
from kvemb.client.ack import Ack
from kvemb.errors import KvembError
from kvemb.net.deadline import Deadline
from kvemb.protocol.message_format import TableRows, digest_tables
from kvemb.protocol.messages import PushPart
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.slots import N_SLOTS
from kvemb.schema.table_def import TableDef
from tests.owners import shard_of

PATIENCE_S = 100.0
DIM = 4


def counting_table(cluster: kvemb.Cluster, name: str) -> kvemb.Table:
    """Rows of zeros to which pushes of -1 add one."""
    return cluster.create_table(
        name,
        dim=DIM,
        optimizer=kvemb.optim.sgd(lr=1.0),
        initializer=kvemb.init.zeros(),
        exist_ok=True,
    )


def add(table: kvemb.Table, ids: np.ndarray, much: float = 1.0) -> Ack:
    """Push so that every row grows."""
    return table.push(ids, np.full((len(ids), DIM), -much, np.float32), timeout_s=PATIENCE_S)


def require(table: kvemb.Table, ids: np.ndarray, much: float) -> None:
    """Every weight of every row has that value."""
    rows = table.pull(ids, timeout_s=PATIENCE_S)
    assert np.unique(rows).tolist() == [much]


def eventually(holds: Callable[[], bool], what: str) -> None:
    """Wait until it holds; errors of a cluster that is still recovering count as "not yet"."""
    deadline, last = Deadline.after(PATIENCE_S), ""
    while not deadline.expired:
        try:
            if holds():
                return
        except KvembError as error:
            last = f"{type(error).__name__}: {error}"
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {PATIENCE_S} s; last: {last}")


def nodes_of(table: kvemb.Table, n_nodes: int, ids: np.ndarray) -> np.ndarray:
    """The number of the node that holds each id: of our cluster map, or of a Redis Cluster whose slots were dealt out evenly, in order."""
    config = table.cluster.config.storage
    slots = table.definition.keys(ids.astype(np.uint64), pages=config.kind != "memcached").slots()
    if config.kind != "redis-cluster":
        return np.asarray(ClusterMap.first(len(config.nodes), 1).slot_nodes[slots])
    bounds = np.array([N_SLOTS * node // n_nodes for node in range(1, n_nodes)])
    return np.searchsorted(bounds, slots, side="right")


def raw_part(
    definition: TableDef, ids: np.ndarray, trainer: str, incarnation: int, sequence: int, *, much: float = 1.0, more: bool = False
) -> PushPart:
    """A part that adds to rows, with whatever identity."""
    ids = np.sort(ids.astype(np.uint64))
    grads = np.full((len(ids), definition.dim), -much, np.float32)
    rows = TableRows(definition.name, definition.schema, ids, grads)
    return PushPart(trainer, incarnation, sequence, sequence, more, [rows], digest_tables([rows]))


def ids_of_shard(shard: int, n_shards: int, n: int) -> np.ndarray:
    """The first n ids that belong to a shard: int64."""
    ids = np.arange(40 * n, dtype=np.uint64)
    return ids[shard_of(ids, n_shards) == shard][:n].astype(np.int64)
