"""The kinds of storage: the one list that the command line, local clusters, tests and docs take them from, and where each one's class is.

Backends of other distributions register under the entry-point group `kvemb.stores`. The command line reads the list before it does
anything: nothing heavy is imported here.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from kvemb.errors import ConfigError

if TYPE_CHECKING:
    from kvemb.config import StorageConfig
    from kvemb.stores.store import Store


class StorageKind(NamedTuple):
    """One kind of storage that this distribution brings: its store's class, and its server's program."""

    store: str  # "module:Class" of its store
    program: str  # its server's program, as a system that has it installed calls it
    least_nodes: int = 1  # the fewest servers that make a cluster


# Not entry points, so that a source checkout works without being installed.
KINDS: Mapping[str, StorageKind] = MappingProxyType(
    {
        "valkey": StorageKind("kvemb.stores.standalone.redis_store:RedisStore", "valkey-server"),
        "redis": StorageKind("kvemb.stores.standalone.redis_store:RedisStore", "redis-server"),
        "redis-cluster": StorageKind("kvemb.stores.redis_cluster.redis_cluster_store:RedisClusterStore", "redis-server", least_nodes=3),
        "memcached": StorageKind("kvemb.stores.standalone.memcached_store:MemcachedStore", "memcached"),
    }
)
"""By the name that kvemb.yaml says."""
DEFAULT_KIND = "valkey"


def open_store(config: "StorageConfig", *, role: str) -> "Store":
    """Make the store of a storage section; it connects at `Store.open`."""
    return _store_class(config.kind)(config, role)


def _store_class(kind: str) -> "type[Store]":
    if kind in KINDS:
        module, _, name = KINDS[kind].store.partition(":")
        found: type[Store] = getattr(import_module(module), name)
        return found
    from importlib.metadata import entry_points  # it imports much: e-mail's format, zip files

    plugins = {entry.name: entry for entry in entry_points(group="kvemb.stores")}
    if kind not in plugins:
        raise ConfigError(f"storage.kind: got {kind!r}, expected one of {', '.join(sorted(set(KINDS) | set(plugins)))}")
    loaded: type[Store] = plugins[kind].load()
    return loaded
