"""Standalone Redis and Valkey nodes: rows by RESP on links of our own, administration by redis-py."""

from kvemb.config import StorageConfig
from kvemb.errors import ConfigError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Link
from kvemb.stores import redis_admin
from kvemb.stores.base import Capabilities, NodeStats
from kvemb.stores.node_store import NodeStore
from kvemb.wire.resp import RespCodec

MAX_VALUE_BYTES = 512 << 20  # proto-max-bulk-len's default


class RedisStore(NodeStore):
    """Nodes of Redis >= 6 or Valkey >= 7 that know nothing of each other."""

    def __init__(self, config: StorageConfig, role: str) -> None:
        super().__init__(config, role, RespCodec(multi_get=True))
        self._in_doubt: dict[str, set[str]] = {}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(cas=False, max_record_bytes=MAX_VALUE_BYTES)

    def stats(self, deadline: Deadline) -> list[NodeStats]:
        self._pool.require_open()
        return [self.stats_or_error(address, deadline) for address in self.addresses]

    def _node_stats(self, address: str, deadline: Deadline) -> NodeStats:
        return redis_admin.node_stats(address, redis_admin.info(address, self.config, deadline))

    def _open_link(self, address: str, deadline: Deadline) -> Link:
        return redis_admin.open_link(address, self.config, self.role, self._in_doubt.setdefault(address, set()), deadline)

    def _inspect(self, address: str, deadline: Deadline) -> tuple[str, int]:
        fields = redis_admin.info(address, self.config, deadline)
        if fields.get("cluster_enabled"):
            raise ConfigError(f"storage.kind: node {address} is part of a Redis Cluster; use kind redis-cluster")
        redis_admin.require_safe(address, fields, self.config)
        return str(fields["run_id"]), int(fields["n_keys"])

    def _dropped(self, link: Link) -> None:
        # A SET on this connection may still sit in the server's buffers; see `redis_admin.open_link`.
        self._in_doubt.setdefault(link.address, set()).add(link.connection_id)
