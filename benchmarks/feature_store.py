"""A peer of `serve`: Feast's online store on Redis, asked for the same rows; in this process, where `feast[redis]` is installed."""

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.peers import PeerAbsentError

_WRITTEN_AT_ONCE = 10_000


@contextmanager
def feast_rows(port: int, ids: np.ndarray, rows: np.ndarray) -> Iterator[Callable[[np.ndarray], np.ndarray]]:
    """Write rows, float32 [n, dim], of n ids into a server as one feature, an array of numbers; yield a look-up of ids: float32 [m, dim].

    Raises:
        PeerAbsentError: Feast is not installed.
    """
    try:
        import pandas as pd
        from feast import Entity, FeatureStore, FeatureView, Field, FileSource, RepoConfig, ValueType
        from feast.infra.online_stores.redis import RedisOnlineStoreConfig
        from feast.types import Array, Float32, Int64
    except ImportError as error:
        raise PeerAbsentError(f"Feast: pip install 'feast[redis]' ({error})") from error
    with TemporaryDirectory() as folder:
        now, entity = datetime.datetime.now(datetime.UTC), Entity(name="id", join_keys=["id"], value_type=ValueType.INT64)
        source = FileSource(path=str(Path(folder) / "none.parquet"), timestamp_field="at")
        pd.DataFrame({"id": ids[:1], "weights": [rows[0]], "at": [now]}).to_parquet(source.path)
        fields = [Field(name="id", dtype=Int64), Field(name="weights", dtype=Array(Float32))]
        view = FeatureView(name="rows", entities=[entity], schema=fields, source=source, ttl=datetime.timedelta(0))
        online = RedisOnlineStoreConfig(connection_string=f"localhost:{port}")
        store: Any = FeatureStore(
            config=RepoConfig(
                project="bench",
                provider="local",
                registry=str(Path(folder) / "registry.db"),
                online_store=online,
                entity_key_serialization_version=3,
            )
        )
        store.apply([entity, view])
        for at in range(0, len(ids), _WRITTEN_AT_ONCE):
            some = slice(at, at + _WRITTEN_AT_ONCE)
            store.write_to_online_store("rows", pd.DataFrame({"id": ids[some], "weights": list(rows[some]), "at": now}))

        def look_up(wanted: np.ndarray) -> np.ndarray:
            asked = [{"id": id_} for id_ in wanted.tolist()]
            return np.array(store.get_online_features(features=["rows:weights"], entity_rows=asked).to_dict()["weights"], np.float32)

        yield look_up
