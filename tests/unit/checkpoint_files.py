"""Makes checkpoints of made-up rows for tests, without a cluster."""

import numpy as np
from numpy.typing import NDArray

from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.checkpoint_manifest import ERASED, IDS, MANIFEST, BaseCheckpoint, CheckpointManifest, Cut
from kvemb.checkpoint.format.manifest_json import encode_manifest
from kvemb.checkpoint.format.parquet_blocks import RowBlock
from kvemb.checkpoint.writer import Fragment, SaveInfo, ShardWriter, assemble
from kvemb.init import uniform
from kvemb.optim import adam
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.record import make_version
from kvemb.schema.table_def import TableDef
from tests.owners import shard_of

CLUSTER_ID = "c" * 32
USER = TableDef("user", 4, adam(), uniform())


def ids_of(values: object) -> NDArray[np.uint64]:
    """Ascending uint64 ids."""
    return np.unique(np.asarray(values, dtype=np.uint64))


def block_of(definition: TableDef, ids: NDArray[np.uint64], version: int, value: float = 1.0) -> RowBlock:
    """Rows whose weights and state tell id and value."""
    n, record = len(ids), definition.record
    from kvemb.arrays.rounding import round_nearest

    weights = (ids % np.uint64(97)).astype(np.float32)[:, None] + np.full((n, definition.dim), value, np.float32)
    state = np.full((n, record.state_size), value, np.float32)
    records = record.encode(ids, np.full(n, version, np.uint64), round_nearest(weights, definition.dtype), state)
    return RowBlock.of_records(definition, ids, records, False)


def save(
    url: str,
    ids: object,
    *,
    k: int,
    definition: TableDef = USER,
    n_shards: int = 2,
    base: BaseCheckpoint | None = None,
    erased: object = (),
    all_ids: object | None = None,
    value: float | None = None,
    weights_only: bool = False,
    cluster: str = "demo",
    part_bytes: int = 64 << 20,
    step_rows: int = 1 << 16,
) -> CheckpointManifest:
    """Write a whole checkpoint; its rows have version (1, k) and the value k unless given. Return its manifest."""
    storage, save_id = CheckpointStorage(url, pause=lambda _: None), f"{k:032x}"
    fragments = [
        _shard(storage, save_id, shard, n_shards, definition, k, ids, erased, all_ids, value, weights_only, part_bytes, step_rows)
        for shard in range(n_shards)
    ]
    manifest = assemble(
        SaveInfo(save_id, cluster, CLUSTER_ID, k, weights_only, base, {"step": k}, ClusterMap.first(0, n_shards).shard_runs), fragments
    )
    storage.write(MANIFEST, encode_manifest(manifest))
    return manifest


def _shard(
    storage: CheckpointStorage, save_id: str, shard: int, n_shards: int, definition: TableDef, k: int, ids: object, erased: object,
    all_ids: object | None, value: float | None, weights_only: bool, part_bytes: int, step_rows: int,
) -> Fragment:  # fmt: skip
    with ShardWriter(storage, save_id, Cut(shard, 1, k), weights_only=weights_only, part_bytes=part_bytes) as writer:
        parts = writer.parts_of(definition)
        mine = _own(ids, shard, n_shards)
        for at in range(0, len(mine), step_rows):
            parts.add(block_of(definition, mine[at : at + step_rows], make_version(1, k), float(k if value is None else value)))
        parts.close()
        if len(_own(erased, shard, n_shards)):
            writer.add_ids(definition, ERASED, _own(erased, shard, n_shards))
        if all_ids is not None:
            writer.add_ids(definition, IDS, _own(all_ids, shard, n_shards))
        return writer.finish([(definition, 10 * k + shard)])


def _own(ids: object, shard: int, n_shards: int) -> NDArray[np.uint64]:
    them = ids_of(ids)
    return them[shard_of(them, n_shards) == shard]
