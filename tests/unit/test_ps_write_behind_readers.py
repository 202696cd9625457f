"""Who takes storage for the truth, repairs and saves, finds in it what was written behind."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from memory_store import memory_node

from kvemb.checkpoint.chain import open_chain
from kvemb.checkpoint.checkpoint_storage import CheckpointStorage
from kvemb.checkpoint.format.file_names import MANIFEST
from kvemb.checkpoint.format.manifest_json import encode_manifest
from kvemb.checkpoint.format.shard_fragment import SaveInfo, assemble
from kvemb.checkpoint.writer import read_fragment
from kvemb.net.deadline import Deadline
from kvemb.schema.record import make_version
from paramserver.checkpoint import save_job
from paramserver.checkpoint.save_job import SaveOrder
from paramserver.checkpoint.save_observer import SaveObserver
from paramserver.checkpoint.saver import Saver
from paramserver.engine.repair_port import NO_BATCH
from paramserver.ingest.ingest import Ingest
from paramserver.ingest.sessions import Sessions
from paramserver.journal import Position
from paramserver.model.timeline import Timeline
from paramserver.recovery.shard_parts import ShardParts
from paramserver.recovery.state_image import image
from paramserver.snapshot import WantedVersions
from tests.unit.write_behind_shard import ADAM, Shard, delete, never, read


class Unable:
    """Reconstructs nothing."""

    def __call__(self, wanted: Sequence[WantedVersions]) -> list[np.ndarray]:
        raise AssertionError("the cache has these rows")


@pytest.fixture
def shard() -> Shard:
    made = Shard(reconstruct=Unable())
    made.run([0, 1, 2, 3])
    return made


def test_a_repair_restores_dirty_rows_of_a_lost_node_and_leaves_none_behind(shard: Shard) -> None:
    shard.run([0, 1, 2])
    expected, repairer = shard.records([0, 1, 2, 3]).tobytes(), shard.repairer
    for address in shard.store.addresses:
        memory_node(address).flush()
    shard.engine.write_dirty(never)
    assert repairer.figures.nodes == 2
    assert (repairer.figures.rows, shard.behind.n_rows) == (1, 0), "a dirty row is not a lost one"
    assert read(shard.store, ADAM, np.arange(4, dtype=np.uint64))[2].tobytes() == expected


def test_a_node_is_lost_while_a_batch_changes_dirty_rows(shard: Shard) -> None:
    shard.run([0, 1, 2])
    memory_node(shard.store.addresses[0]).flush()
    memory_node(shard.store.addresses[1]).flush()
    shard.run([0, 1, 2, 10, 11])
    plain = Shard(None)
    for ids in ([0, 1, 2, 3], [0, 1, 2], [0, 1, 2, 10, 11]):
        plain.run(ids)
    shard.engine.write_dirty(never)
    every = np.array([0, 1, 2, 3, 10, 11], np.uint64)
    assert read(shard.store, ADAM, every)[2].tobytes() == plain.records(every.tolist()).tobytes()


def test_dirty_rows_are_not_taken_for_lost_when_a_row_beside_them_is(shard: Shard) -> None:
    shard.run([0, 1, 2])
    repairer = shard.repairer
    remembered = shard.records([3])
    delete(shard.store, 3)
    shard.tables.state(ADAM).cache.forget(np.array([3], np.uint64))
    repairer._reconstruct = lambda wanted: [remembered]
    shard.run([0, 1, 2, 3])
    assert repairer.figures.rows == 1
    assert shard.behind.n_rows == 3
    shard.engine.write_dirty(never)
    assert shard.k_of([0, 1, 2, 3]) == [3, 3, 3, 3]


def test_asking_for_a_repair_between_batches_finds_dirty_rows_in_order(shard: Shard) -> None:
    shard.run([0, 1, 2])
    expected, repairer = shard.records([0, 1, 2, 3]).tobytes(), shard.repairer
    repairer.nodes(NO_BATCH, never, suspects=repairer.addresses)
    assert (repairer.figures.rows, shard.behind.n_rows) == (0, 0)
    assert read(shard.store, ADAM, np.arange(4, dtype=np.uint64))[2].tobytes() == expected


def test_a_save_waits_for_rows_that_were_dirty_at_its_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    waiting = threading.Event()
    monkeypatch.setattr(save_job, "_PAUSE_S", 0.01)
    observer = SaveObserver(make_version(1, 0))
    shard = Shard(observer=observer)
    saver = Saver(
        0,
        shard.store,
        shard.tables,
        shard.engine,
        observer=observer,
        committed_k=lambda: shard.engine.k,
        restore=lambda definition, ids: None,
        definitions=lambda: [ADAM],
        folder=tmp_path,
        timeout_s=5,
    )
    shard.run([0, 1, 2, 3])
    shard.run([0, 1, 2])
    at_cut = shard.records([0, 1, 2, 3])
    saver.begin(SaveOrder("1" * 32, str(tmp_path / "saved"), 0, False), Deadline.after(5))
    assert shard.woken.is_set(), "the dirty rows were asked for"
    shard.run([0])  # writes: they were asked for
    shard.run([0, 1])
    while saver.progress("1" * 32)[0] == "running":
        waiting.wait(0.005)
    assert saver.progress("1" * 32)[:4] == ("done", "", 4, 4)
    fragment_rows = saved_records(tmp_path / "saved")
    np.testing.assert_array_equal(fragment_rows, at_cut)


def saved_records(folder: Path) -> np.ndarray:
    """The records in a checkpoint of one shard."""
    storage = CheckpointStorage(str(folder))
    fragment = read_fragment(storage, 0)
    assert fragment is not None
    storage.write(MANIFEST, encode_manifest(assemble(SaveInfo("1" * 32, "demo", "c" * 32, 1, False, None), [fragment])))
    chain = open_chain(str(folder))
    (block,) = chain.rows(chain.newest.tables[0].definition, 0)
    return block.records(ADAM, block.versions)


def test_an_image_of_a_moment_with_dirty_rows_is_a_bug(shard: Shard) -> None:
    shard.run([0])
    ingest = Ingest(Sessions(True), None)
    parts = ShardParts(None, 0, b"c" * 16, None, shard.tables, shard.engine, ingest, None, None, Timeline(1), None, None, None, None)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="an image is of a moment when storage holds what the index says"):
        image(parts, Position(1, 0))
