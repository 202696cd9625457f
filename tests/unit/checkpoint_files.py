"""Makes checkpoints of made-up rows for tests, without a cluster; also those of earlier formats."""

from collections.abc import Iterator

import fsspec
import numpy as np
import pytest
from numpy.typing import NDArray

from kvemb.checkpoint.chain import Chain, open_chain
from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.checkpoint_manifest import ERASED, IDS, MANIFEST, BaseCheckpoint, CheckpointManifest, Cut
from kvemb.checkpoint.format.manifest_json import decode_manifest, encode_manifest
from kvemb.checkpoint.format.parquet_blocks import RowBlock
from kvemb.checkpoint.writer import Fragment, SaveInfo, ShardWriter, assemble
from kvemb.init import uniform
from kvemb.optim import adam
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.record import make_version
from kvemb.schema.slots import from_runs
from kvemb.schema.table_def import TableDef

CLUSTER_ID = "c" * 32
USER = TableDef("user", 4, adam(), uniform())


def ids_of(values: object) -> NDArray[np.uint64]:
    """Ascending uint64 ids."""
    return np.unique(np.asarray(values, dtype=np.uint64))


def in_order(values: object, definition: TableDef = USER) -> NDArray[np.uint64]:
    """Unique uint64 ids in the order of their keys."""
    ids = ids_of(values)
    return ids[np.argsort(definition.order.keys(ids))]


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
    slots: tuple[int, ...] = (),
) -> CheckpointManifest:
    """Write a whole checkpoint; its rows have version (1, k) and the value k unless given. Return its manifest.

    Slots are those of a new cluster unless given, as runs. Its save began at second k, and the shards were cut at k + 1.
    """
    slots = slots or ClusterMap.first(0, n_shards).shard_runs
    storage, save_id = CheckpointStorage(url, pause=lambda _: None), f"{k:032x}"
    fragments = [
        _shard(
            storage,
            save_id,
            shard,
            n_shards,
            definition,
            k,
            ids,
            erased,
            all_ids,
            value,
            weights_only,
            part_bytes,
            step_rows,
            slots,
        )
        for shard in range(n_shards)
    ]
    manifest = assemble(SaveInfo(save_id, cluster, CLUSTER_ID, k, weights_only, base, {"step": k}, slots, k + 1), fragments)
    data = encode_manifest(manifest)
    storage.write(MANIFEST, data)
    return decode_manifest(data, MANIFEST)


def _shard(
    storage: CheckpointStorage, save_id: str, shard: int, n_shards: int, definition: TableDef, k: int, ids: object, erased: object,
    all_ids: object | None, value: float | None, weights_only: bool, part_bytes: int, step_rows: int,
    slots: tuple[int, ...],
) -> Fragment:  # fmt: skip
    owners = from_runs(np.array(slots, "<u2").tobytes(), n_shards)

    def own(values: object) -> NDArray[np.uint64]:
        them = in_order(values, definition)
        return them[owners[definition.placement.slots(them)] == shard]

    with ShardWriter(storage, save_id, Cut(shard, 1, k), weights_only=weights_only, part_bytes=part_bytes) as writer:
        parts = writer.parts_of(definition)
        mine = own(ids)
        for at in range(0, len(mine), step_rows):
            parts.add(block_of(definition, mine[at : at + step_rows], make_version(1, k), float(k if value is None else value)))
        parts.close()
        if len(own(erased)):
            writer.add_ids(definition, ERASED, own(erased))
        if all_ids is not None:
            writer.add_ids(definition, IDS, own(all_ids))
        return writer.finish([(definition, 10 * k + shard)])


@pytest.fixture
def memory() -> Iterator[str]:
    """A folder of fsspec's in-memory file system."""
    yield "memory://checkpoints"
    fsspec.filesystem("memory").store.clear()


def base_of(manifest: CheckpointManifest, name: str) -> BaseCheckpoint:
    return BaseCheckpoint(name, manifest.save_id)


def contents(url: str, definition: TableDef = USER) -> dict[int, float]:
    """What a load of this checkpoint would see: the state of every id, whether shards are read one by one or together."""
    chain, found = open_chain(url), {}
    for shard in range(chain.newest.n_shards):
        rows = taken(chain, definition, chain.rows(definition, shard))
        assert not rows.keys() & found.keys(), "two shards have a row"
        found |= rows
    assert taken(chain, definition, chain.rows_of(definition, range(chain.newest.n_shards))) == found
    return found


def taken(chain: Chain, definition: TableDef, blocks: Iterator[RowBlock]) -> dict[int, float]:
    """The state of every id in these blocks, which must be in order, and whole rows."""
    found: dict[int, float] = {}
    last = -1
    for block in blocks:
        keys = definition.order.keys(block.ids)
        assert int(keys[0]) > last, "blocks are not in order"
        assert (keys[1:] > keys[:-1]).all()
        last = int(keys[-1])
        assert block.state is not None
        values = block.state[:, 0]
        assert (block.weights == (block.ids % np.uint64(97)).astype(np.float32)[:, None] + values[:, None]).all()
        assert (block.state == values[:, None]).all()
        assert block.versions.tolist() == [make_version(1, int(value)) for value in values]
        found |= dict(zip(block.ids.tolist(), values.tolist(), strict=True))
    return found
