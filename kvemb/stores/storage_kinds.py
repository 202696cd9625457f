"""Finds the class of a storage kind: backends register under the entry-point group `kvemb.stores`."""

from importlib import import_module
from importlib.metadata import entry_points

from kvemb.config import StorageConfig
from kvemb.errors import ConfigError
from kvemb.stores.store import Store

# The kinds of this distribution, so that a source checkout works without being installed.
_OWN = {
    "redis": "kvemb.stores.standalone.redis_store:RedisStore",
    "valkey": "kvemb.stores.standalone.redis_store:RedisStore",
    "redis-cluster": "kvemb.stores.redis_cluster.redis_cluster_store:RedisClusterStore",
    "memcached": "kvemb.stores.standalone.memcached_store:MemcachedStore",
}


def open_store(config: StorageConfig, *, role: str) -> Store:
    """Make the store of a storage section; it connects at `Store.open`.

    Args:
        config: the storage section.
        role: who asks: "trainer", or "shard:<n>" for the one process that writes shard n's rows.

    Raises:
        ConfigError: no backend of that kind is registered; the message lists those that are.
    """
    return _store_class(config.kind)(config, role)


def _store_class(kind: str) -> type[Store]:
    if kind in _OWN:
        module, _, name = _OWN[kind].partition(":")
        found: type[Store] = getattr(import_module(module), name)
        return found
    plugins = {entry.name: entry for entry in entry_points(group="kvemb.stores")}
    if kind not in plugins:
        raise ConfigError(f"storage.kind: got {kind!r}, expected one of {', '.join(sorted(set(_OWN) | set(plugins)))}")
    loaded: type[Store] = plugins[kind].load()
    return loaded
