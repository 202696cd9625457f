"""Repair of lost nodes and rows against storage in memory: every row comes back with the very bytes it had."""

import errno
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from memory_store import memory_node

from kvemb.errors import (
    DeadlineExceededError,
    FencedError,
    FolderUnavailableError,
    LostRowError,
    NodeLostError,
    NodeUnavailableError,
    StorageError,
)
from kvemb.net.deadline import Deadline
from kvemb.schema.record import make_version
from kvemb.stores.row_io import ReadPart, WritePart
from paramserver.engine.engine import Engine
from paramserver.engine.storage_pace import NO_BATCH, AheadOfIndex, Pause
from paramserver.model.batch import APPLY, ERASE, Batch, CheckedRows
from paramserver.model.transition import Timeline
from paramserver.repair.repairer import Repairer
from paramserver.row_log import WantedVersions
from paramserver.shard_process.data_dir import for_writes
from tests.unit.repairing_shard import ADAM, IDS, SGD, Shard, addresses, fail, provision


@pytest.fixture
def shard() -> Shard:
    nodes = addresses()
    provision(nodes)
    made = Shard(nodes).open()
    made.apply(ADAM, IDS)
    made.apply(SGD, IDS[::2])
    made.apply(ADAM, IDS[:100])
    return made


def test_a_flushed_node_gets_back_the_bytes_it_had(shard: Shard) -> None:
    before = [shard.read(ADAM, IDS), shard.read(SGD, IDS)]
    memory_node(shard.store.nodes.addresses[0]).flush()
    with pytest.raises(NodeLostError):
        shard.read(ADAM, IDS)
    assert shard.repairer.nodes(NO_BATCH, fail) == 1
    n_rows = shard.repairer.figures.rows
    after = [shard.read(ADAM, IDS), shard.read(SGD, IDS)]
    for (found, records), (found_before, records_before) in zip(after, before, strict=True):
        assert found.tolist() == found_before.tolist()
        assert records[found].tobytes() == records_before[found].tobytes()
    assert 0 < n_rows < 4500, "rows of the other node were left alone"
    assert shard.repairer.figures.nodes == 1
    assert shard.store.values.get("kvemb:tables", Deadline.after(60))[0] == b"registry"


def test_all_nodes_may_be_lost(shard: Shard) -> None:
    before = shard.read(ADAM, IDS)[1]
    for address in shard.store.nodes.addresses:
        memory_node(address).flush()
    assert shard.repairer.nodes(NO_BATCH, fail) == 2
    assert shard.repairer.figures.rows == 4500
    assert shard.read(ADAM, IDS)[1].tobytes() == before.tobytes()


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_node_too_slow_for_a_whole_block_is_restored_in_smaller_ones(shard: Shard, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    before, sizes = shard.read(ADAM, IDS)[1], []
    whole = getattr(shard.store.repair, verb)

    def slow(address: str, nonce: str, parts: Sequence[ReadPart] | Sequence[WritePart], deadline: Deadline) -> object:
        sizes.append(sum(len(part.keys) for part in parts))
        if sizes[-1] > 150:
            raise DeadlineExceededError(f"{sizes[-1]} rows do not fit into the deadline")
        return whole(address, nonce, parts, deadline)

    monkeypatch.setattr(shard.store.repair, verb, slow)
    monkeypatch.setattr("paramserver.engine.storage_pace.LEAST_BYTES", 100)
    monkeypatch.setattr("paramserver.engine.storage_pace._FASTER", 1)  # here, a block that is not too large takes no time
    memory_node(shard.store.nodes.addresses[0]).flush()
    assert shard.repairer.nodes(NO_BATCH, lambda error, pause_s: None) == 1
    assert sizes[0] > 1000
    assert shard.read(ADAM, IDS)[1].tobytes() == before.tobytes()


def test_a_suspect_node_has_only_old_rows_rewritten(shard: Shard) -> None:
    address = shard.store.nodes.addresses[0]
    node = memory_node(address)
    old = dict(node.values)
    before = shard.read(ADAM, IDS)[1]
    shard.apply(ADAM, IDS[:500])
    newest = shard.read(ADAM, IDS)[1]
    node.values = old
    node.run_id = "another process"
    here = int(shard.store.repair.keys_of(address, ADAM.keys(IDS[:500], pages=False)).sum())
    assert shard.repairer.nodes(NO_BATCH, fail) == 1
    assert shard.repairer.figures.rows == here
    assert shard.read(ADAM, IDS)[1].tobytes() == newest.tobytes() != before.tobytes()


def test_rows_that_an_old_snapshot_brings_back_are_erased_again(shard: Shard) -> None:
    node = memory_node(shard.store.nodes.addresses[0])
    old = dict(node.values)
    shard.apply(SGD, IDS[::2], ERASE)
    node.values = old
    node.run_id = "another process"
    shard.repairer.nodes(NO_BATCH, fail)
    assert not shard.read(SGD, IDS)[0].any()
    assert shard.repairer.figures.erased > 0


def test_rows_of_a_half_written_batch_are_left_alone(shard: Shard) -> None:
    version = make_version(1, shard.k + 1)
    records = ADAM.record.encode(IDS[:10], version, np.ones((10, 2), np.float32), np.ones((10, ADAM.record.state_size), np.float32))
    shard.store.rows.write([WritePart(ADAM.keys(IDS[:10], pages=False), records, _tokens(shard, IDS[:10]))], Deadline.after(60))
    for address in shard.store.nodes.addresses:
        memory_node(address).run_id = "another process"
    assert shard.repairer.nodes(AheadOfIndex(version, version), fail) == 2
    assert shard.repairer.figures.rows == 0
    assert shard.read(ADAM, IDS[:10])[1].tobytes() == records.tobytes()


class _Looking(Repairer):
    """Looks at rows, as any reader may, once nodes are in use again."""

    def __init__(self, shard: Shard) -> None:
        self.__dict__ = shard.repairer.__dict__
        self.shard, self.seen = shard, list[tuple[np.ndarray, np.ndarray]]()

    def nodes(self, ahead: AheadOfIndex, pause: Pause, *, suspects: Iterable[str] = ()) -> int:
        n_nodes = super().nodes(ahead, pause, suspects=suspects)
        self.seen.append(self.shard.read(ADAM, IDS[:100]))
        return n_nodes


@pytest.mark.parametrize("back", ["empty", "as of before"])
@pytest.mark.parametrize("kind", [APPLY, ERASE])
def test_a_node_that_loses_half_a_batch_has_it_again_before_it_is_used(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, kind: str, back: str
) -> None:
    """A reader that has seen a row of the batch must not see it as it was before."""
    nodes = addresses()
    provision(nodes)
    twin = Shard(nodes).open()  # goes the same way, and loses nothing
    for definition, ids, what in ((ADAM, IDS, APPLY), (SGD, IDS[::2], APPLY), (ADAM, IDS[:100], APPLY), (ADAM, IDS[:100], kind)):
        twin.apply(definition, ids, what)
    shard.remembered = twin.remembered
    found, records = twin.read(ADAM, IDS[:100])
    verb = "erase" if kind == ERASE else "write"
    whole, node = getattr(shard.store, verb), memory_node(shard.store.nodes.addresses[0])
    old = {} if back == "empty" else dict(node.values)

    def stored_and_lost(parts: Sequence[WritePart], deadline: Deadline) -> object:
        monkeypatch.setattr(shard.store, verb, whole)
        whole(parts, deadline)
        node.values, node.run_id = old, "another process"
        raise NodeUnavailableError("another node did not answer")

    monkeypatch.setattr(shard.store, verb, stored_and_lost)
    looking = _Looking(shard)
    shard.engine = Engine(shard.store, shard.tables, Timeline(1), k=3, timeout_s=5, repair=looking)
    shard.apply(ADAM, IDS[:100], kind, pause=lambda error, pause_s: None)
    (seen,) = looking.seen
    assert seen[0].tolist() == found.tolist()
    assert seen[1][found].tobytes() == records[found].tobytes()
    assert shard.read(ADAM, IDS[:100])[0].tolist() == found.tolist()


def test_records_in_the_cache_are_not_reconstructed() -> None:
    nodes = addresses()
    provision(nodes)
    shard = Shard(nodes, cache_bytes=1 << 20).open()
    shard.apply(ADAM, IDS)
    memory_node(nodes[0]).flush()
    assert shard.repairer.nodes(NO_BATCH, fail) > 0
    assert shard.reconstructed == 0
    assert shard.read(ADAM, IDS)[0].all()


def test_two_shards_repair_two_nodes_without_waiting_for_each_other() -> None:
    nodes = addresses()
    provision(nodes, 2)
    shards = [Shard(nodes, number, 2).open() for number in range(2)]
    for shard in shards:
        shard.apply(ADAM, IDS)
    before = shards[0].read(ADAM, IDS)[1]
    for address in nodes:
        memory_node(address).flush()

    def other_does_its_part(error: StorageError, pause_s: float) -> None:
        assert isinstance(error, NodeLostError)
        shards[1].repairer.nodes(NO_BATCH, fail)

    shards[0].repairer.nodes(NO_BATCH, other_does_its_part)
    assert shards[0].read(ADAM, IDS)[1].tobytes() == before.tobytes()


def test_a_flush_in_the_middle_starts_the_repair_over(shard: Shard) -> None:
    before = shard.read(ADAM, IDS)[1]
    node = memory_node(shard.store.nodes.addresses[0])
    node.flush()
    again = _flush_once(node.flush)
    shard.repairer._reconstruct = lambda wanted: again(shard.reconstruct(wanted))
    shard.repairer.nodes(NO_BATCH, lambda error, pause_s: None)
    assert shard.read(ADAM, IDS)[1].tobytes() == before.tobytes()


def test_a_repair_to_which_slots_have_come_is_made_again_before_it_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = addresses()
    provision(nodes, n_shards=2)
    shard, n_restored, n_pauses = Shard(nodes, 0, 2).open(), list[str](), list[float]()
    shard.apply(ADAM, IDS)
    memory_node(nodes[0]).flush()
    restore = shard.repairer._restore_node
    monkeypatch.setattr(shard.repairer, "_restore_node", lambda address, *how: (n_restored.append(address), restore(address, *how)))

    def pause(error: StorageError, pause_s: float) -> None:  # the other shard does nothing
        n_pauses.append(pause_s)
        if len(n_pauses) == 2:
            monkeypatch.setattr(shard.store.repair, "begun_with", lambda address: b"more slots")
        if len(n_pauses) == 4:
            raise error

    with pytest.raises(NodeLostError):
        shard.repairer.nodes(NO_BATCH, pause)
    assert n_restored == [nodes[0]] * 2


def test_single_lost_rows_are_restored_before_a_batch_is_applied_to_them(shard: Shard) -> None:
    before = shard.read(ADAM, IDS[:50])[1]
    rows = CheckedRows(ADAM, IDS[:50], np.ones((50, 2), np.float32), np.empty(0, np.uint64), ADAM.optimizer.check_hyper({}))
    shard.store.rows.erase([WritePart(ADAM.keys(IDS[:20], pages=False), np.empty((0, 0), np.uint8))], Deadline.after(60))
    with pytest.raises(LostRowError):
        shard.engine.run(Batch(APPLY, (rows,)), make_version(1, shard.k + 1), fail)
    assert shard.repairer.rows(Batch(APPLY, (rows,)), NO_BATCH) == 20
    assert shard.read(ADAM, IDS[:50])[1].tobytes() == before.tobytes()


def test_a_process_that_was_taken_over_restores_nothing_over_its_successor(shard: Shard) -> None:
    versions = np.full(5, make_version(2, 9), np.uint64)
    later = ADAM.record.encode(IDS[:5], versions, np.ones((5, 2), np.float32), np.ones((5, ADAM.record.state_size), np.float32))
    shard.store.rows.write([WritePart(ADAM.keys(IDS[:5], pages=False), later, _tokens(shard, IDS[:5]))], Deadline.after(60))
    shard.store.rows.erase([WritePart(ADAM.keys(IDS[10:20], pages=False), np.empty((0, 0), np.uint8))], Deadline.after(60))
    rows = CheckedRows(ADAM, IDS[:50], np.ones((50, 2), np.float32), np.empty(0, np.uint64), ADAM.optimizer.check_hyper({}))
    with pytest.raises(FencedError):
        shard.repairer.rows(Batch(APPLY, (rows,)), NO_BATCH)
    with pytest.raises(FencedError):
        shard.repairer.nodes(NO_BATCH, fail, suspects=shard.store.nodes.addresses)
    memory_node(shard.store.nodes.addresses[0]).flush()

    def fenced() -> None:
        raise FencedError("a successor")

    shard.repairer._still_ours = fenced
    with pytest.raises(FencedError):
        shard.repairer.nodes(NO_BATCH, fail)
    assert not any(len(key) == 14 for key in memory_node(shard.store.nodes.addresses[0]).values)


def test_a_repair_waits_while_the_shards_own_folder_is_away_and_writes_nothing(shard: Shard) -> None:
    before, node = shard.read(ADAM, IDS)[1], memory_node(shard.store.nodes.addresses[0])
    rows = CheckedRows(ADAM, IDS[:50], np.ones((50, 2), np.float32), np.empty(0, np.uint64), ADAM.optimizer.check_hyper({}))
    away, waited = [True], list[str]()

    def still_ours() -> None:
        if away[0]:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/data/shard-0/epoch")

    def pause(error: StorageError, pause_s: float) -> None:
        assert not any(len(key) == 14 for key in node.values)
        waited.append(str(error))
        away[0] = len(waited) < 3

    shard.repairer._still_ours = for_writes(still_ours)
    shard.store.rows.erase([WritePart(ADAM.keys(IDS[:20], pages=False), np.empty((0, 0), np.uint8))], Deadline.after(60))
    with pytest.raises(FolderUnavailableError, match="/data/shard-0/epoch: No such file or directory"):
        shard.repairer.rows(Batch(APPLY, (rows,)), NO_BATCH)
    node.flush()
    shard.repairer.nodes(NO_BATCH, pause)
    assert len(waited) == 3
    shard.repairer.rows(Batch(APPLY, (rows,)), NO_BATCH)
    assert shard.read(ADAM, IDS)[1].tobytes() == before.tobytes()


def test_a_row_that_cannot_be_reconstructed_keeps_its_node_out_of_use(shard: Shard) -> None:
    def cannot(wanted: Sequence[WantedVersions]) -> list[np.ndarray]:
        raise LostRowError("no record")

    shard.repairer._reconstruct = cannot
    memory_node(shard.store.nodes.addresses[0]).flush()
    with pytest.raises(LostRowError):
        shard.repairer.nodes(NO_BATCH, fail)
    with pytest.raises(NodeLostError):
        shard.read(ADAM, IDS)


def _tokens(shard: Shard, ids: np.ndarray) -> np.ndarray | None:
    size = ADAM.record.size_bytes
    part = ReadPart(ADAM.keys(ids, pages=False), size, size, tokens=True)
    return shard.store.rows.read([part], Deadline.after(60))[0].in_key_order().tokens


def _flush_once(flush: Callable[[], None]) -> Callable[[np.ndarray], np.ndarray]:
    flushed = [False]

    def then(records: np.ndarray) -> np.ndarray:
        if not flushed[0]:
            flushed[0] = True
            flush()
        return records

    return then
