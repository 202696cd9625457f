"""A part of a push as a trainer of shard 1 of 3 sends it."""

from typing import Any

import numpy as np

import kvemb.init
import kvemb.optim
from kvemb.errors import UnknownTableError
from kvemb.protocol.message_format import TableRows, digest_tables
from kvemb.protocol.messages import PushPart
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.table_def import TableDef
from tests.owners import shard_of

TABLE = TableDef("user", 2, kvemb.optim.adam(lr=0.5), kvemb.init.zeros())
OWNED = np.arange(1000, dtype=np.uint64)
THREE_SHARDS = ClusterMap.first(0, 3)
OWNED = OWNED[shard_of(OWNED, 3) == 1][:4]


def find(name: str, schema: int) -> TableDef:
    if name != TABLE.name:
        raise UnknownTableError(f"no table {name!r}; existing: user")
    return TABLE


def rows(**changes: Any) -> TableRows:
    fields = {"table": "user", "schema": TABLE.schema, "ids": OWNED, "rows": np.ones((len(OWNED), 2), np.float32)}
    return TableRows(**{**fields, **changes})


def part(*tables: TableRows, **changes: Any) -> PushPart:
    fields = {"trainer": "a", "incarnation": 1, "sequence": 1, "step": 1, "more": False}
    return PushPart(**{**fields, "tables": list(tables), "digest": digest_tables(list(tables)), **changes})
