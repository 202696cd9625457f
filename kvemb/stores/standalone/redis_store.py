"""Standalone Redis and Valkey nodes: rows by RESP on links of our own."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvemb.config import StorageConfig
from kvemb.errors import ConfigError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Link
from kvemb.net.tls_link import connector_of
from kvemb.schema.bucket_limits import BucketLimits
from kvemb.schema.keys import Containers, RowKeys
from kvemb.schema.table_def import TableDef
from kvemb.stores.redis_server import compare_and_set, redis_admin
from kvemb.stores.redis_server.redis_login import RedisAccess, RoleLinks
from kvemb.stores.redis_server.stored_rows import count_rows, read_limits, rows_on, set_limits
from kvemb.stores.row_io import HeldRows
from kvemb.stores.standalone.node_links import NodeServer
from kvemb.stores.standalone.node_store import NodeStore
from kvemb.stores.store import Capabilities
from kvemb.stores.store_nodes import NodeStats
from kvemb.stores.store_repair import StoreRepair
from kvemb.wire.resp.resp_codec import RespCodec


class RedisServer(NodeServer):
    """The operations special to Redis and Valkey; see `NodeServer`."""

    capabilities = Capabilities(cas=False, pages=True)

    def __init__(self, access: RedisAccess, role: str) -> None:
        self._access, self._links, self._asked = access, RoleLinks(access, role), redis_admin.CommandsAsked(access, role)

    def open_link(self, address: str, deadline: Deadline) -> Link:
        return self._links.open(address, deadline)

    def dropped(self, link: Link) -> None:
        self._links.dropped(link)

    def inspect(self, address: str, deadline: Deadline) -> tuple[str, int]:
        fields = redis_admin.info(address, self._access, deadline)
        if fields.get("cluster_enabled") == "1":
            raise ConfigError(f"storage.kind: node {address} is part of a Redis Cluster; use kind redis-cluster")
        redis_admin.require_safe(address, fields, self._access.config)
        self._asked.require(address, fields["run_id"], deadline)
        return fields["run_id"], redis_admin.number_in(address, fields, "n_keys")

    def swap(self, address: str, key: bytes, old: bytes | None, new: bytes, run_id: str, deadline: Deadline) -> bool:
        return bool(compare_and_set.swap(address, self._access, [(key, old, new)], run_id, deadline)[0])

    def kill_other_writers(self, addresses: Iterable[str], deadline: Deadline) -> int:
        return self._links.kill_others(addresses, deadline)

    def keys_on(self, address: str, slots: NDArray[np.bool_], deadline: Deadline) -> Iterator[RowKeys]:
        return rows_on(address, self._access, slots, deadline)

    def make_way(self, address: str, keys: Sequence[bytes], wanted: Containers, run_id: str, deadline: Deadline, *, clear: bool) -> int:
        return compare_and_set.make_way(address, self._access, keys, wanted, run_id, deadline, clear=clear)

    def held_on(self, address: str, repair: StoreRepair, tables: Sequence[TableDef], deadline: Deadline) -> list[HeldRows | None]:
        return count_rows(repair, address, self._access, tables, deadline)

    def bucket_limits(self, address: str, deadline: Deadline) -> BucketLimits:
        return read_limits(address, self._access, deadline)

    def set_bucket_limits(self, address: str, limits: BucketLimits, deadline: Deadline) -> None:
        set_limits(address, self._access, limits, deadline)

    def settings(self, address: str, deadline: Deadline) -> dict[str, str]:
        return redis_admin.settings(address, self._access, deadline)

    def stats(self, address: str, deadline: Deadline) -> NodeStats:
        return redis_admin.node_stats(address, redis_admin.info(address, self._access, deadline), self._access.config)


class RedisStore(NodeStore):
    """Nodes of Redis >= 6 or Valkey >= 7 that know nothing of each other."""

    capabilities = RedisServer.capabilities

    def __init__(self, config: StorageConfig, role: str) -> None:
        super().__init__(config, role, RespCodec(), RedisServer(RedisAccess(config, connector_of(config.tls)), role))
