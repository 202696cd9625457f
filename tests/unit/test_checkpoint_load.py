"""Watching a load from outside, without shards."""

from types import SimpleNamespace
from uuid import uuid4

import pytest
from memory_store import MemoryStore

from kvemb.checkpoint.load import Loading, _watch
from kvemb.config import StorageConfig
from kvemb.errors import CheckpointError
from kvemb.net.deadline import Deadline


def test_a_load_of_which_no_shard_comes_any_further_is_watched_no_longer_than_asked_for() -> None:
    with MemoryStore(StorageConfig("memory", (f"{uuid4().hex}:1",)), role="trainer") as store:
        store.provision(b"c" * 16, b"g" * 8, Deadline.after(5))
        store.open(Deadline.after(5))
        loading = Loading(SimpleNamespace(numbers=(0, 1)), store, {}, 5.0)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=r"no shard has come any further for 0\.05 s: .* The load stays decided"):
            _watch(loading, "1" * 32, 0.05, None)
