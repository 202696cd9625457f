"""Which storage kinds there are: ours, and those that other distributions bring."""

import pytest
from memory_store import MemoryStore

from kvemb.config import StorageConfig
from kvemb.errors import ConfigError
from kvemb.stores import storage_kinds
from kvemb.stores.storage_kinds import open_store

IN_MEMORY = StorageConfig("memory", ("registry:1",))


def test_a_kind_that_nobody_brings_is_refused_with_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_kinds, "entry_points", lambda group: ())
    with pytest.raises(ConfigError, match=r"storage\.kind: got 'memory', expected one of memcached, redis, redis-cluster, valkey"):
        open_store(IN_MEMORY, role="trainer")


def test_a_kind_of_another_distribution_is_found_by_its_entry_point(memory_kind: None) -> None:
    with open_store(IN_MEMORY, role="trainer") as store:
        assert isinstance(store, MemoryStore)
    with pytest.raises(ConfigError, match="expected one of memcached, memory, redis, redis-cluster, valkey"):
        open_store(StorageConfig("tape", ("registry:1",)), role="trainer")
