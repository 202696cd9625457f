"""The contract of a store, repair and fencing included: the effects on shards and trainers of a node that has lost its rows.

A new backend derives its test class from `RepairContract`, which brings all of `StoreContract` along.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier

import numpy as np
import pytest
from numpy.typing import NDArray

from kvemb.coordination.markers import Identity
from kvemb.coordination.shard_owners import Owner, owner_name
from kvemb.errors import (
    FencedError,
    InvalidInputError,
    NodeLostError,
    NodeSuspectError,
    NodeUnavailableError,
    NotProvisionedError,
)
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import RowKeys
from kvemb.schema.slots import N_SLOTS
from kvemb.stores.marked_nodes import LostNode
from kvemb.stores.row_io import ReadPart, WritePart
from kvemb.stores.store import Store
from kvemb.testing.store_contract import (
    CLUSTER,
    GENERATION,
    SIZE,
    Nodes,
    StoreContract,
    keys_for,
    read,
    records_of,
    require_rows,
    within,
    write,
)
from kvemb.wire.replies import RowsReader

LOST = (NodeLostError, NodeSuspectError)


def rows_for(store: Store) -> RowKeys:
    """The rows of a cluster that is repaired, as its storage holds them."""
    return keys_for(store, 600)


def lost(store: Store) -> list[LostNode]:
    """The lost nodes, once the server that was started again serves."""
    deadline = within()
    while not (found := store.repair.lost_nodes(within())):
        assert not deadline.expired, "no node was found lost"
        time.sleep(0.05)
    return found


def begun(store: Store, address: str, *, even_if_whole: bool = False) -> str:
    """Begin a repair; a nonce is expected."""
    nonce = store.repair.begin(address, within(), even_if_whole=even_if_whole)
    assert nonce is not None
    return nonce


def rows_of(store: Store, address: str, keys: RowKeys | None = None) -> RowKeys:
    """The keys that belong to a node, of these or of all."""
    keys = rows_for(store) if keys is None else keys
    return keys[np.flatnonzero(store.repair.keys_of(address, keys))]


def write_back(store: Store, address: str, nonce: str, keys: RowKeys, salt: int = 0) -> None:
    """Write rows to a node in repair, over any that are there."""
    tokens = store.repair.read(address, nonce, [ReadPart(keys, SIZE, SIZE, tokens=True)], within())[0].in_key_order().tokens
    result = store.repair.write(address, nonce, [WritePart(keys, records_of(keys, salt=salt), tokens)], within())[0]
    assert result.stored.all()


def repair(store: Store, address: str, salt: int = 0) -> None:
    """The whole repair of a node, by the only shard."""
    nonce = begun(store, address)
    write_back(store, address, nonce, rows_of(store, address), salt)
    store.repair.report(address, nonce, 0, within())
    assert store.repair.finish(address, nonce, range(1), within())


def eventually_reads(store: Store, salt: int = 0, keys: RowKeys | None = None) -> None:
    """Require that a store that saw the loss goes on by itself: at most batches begun before fail."""
    keys = rows_for(store) if keys is None else keys
    for _ in range(2):
        with suppress(*LOST, NodeUnavailableError):
            return require_rows(store, keys, records_of(keys, salt=salt))
    require_rows(store, keys, records_of(keys, salt=salt))


def own(store: Store, epoch: int) -> None:
    """Take shard 0 under an epoch."""
    store.values.put(owner_name(0), Owner(epoch, 1).encode(), within())
    store.fence(0, epoch, within())


def _interrupted(reply: RowsReader, data: NDArray[np.uint8]) -> int:
    raise KeyboardInterrupt


class RepairContract(StoreContract):
    """The tests of repair that every store which can be repaired passes, after those of `StoreContract`."""

    @pytest.fixture
    def rows(self, store: Store) -> RowKeys:
        """The rows that a cluster holds."""
        return rows_for(store)

    @pytest.fixture
    def trainer(self, nodes: Nodes, store: Store, rows: RowKeys) -> Iterator[Store]:
        """Another process's store, open, on a cluster that holds the rows."""
        write(store, rows, records_of(rows))
        with nodes.store() as trainer:
            trainer.open(within())
            require_rows(trainer, rows, records_of(rows))
            yield trainer

    # --- repair -----------------------------------------------------------------------------------------------------------------

    def test_whole_nodes_are_not_lost_and_not_repaired(self, store: Store, trainer: Store, rows: RowKeys) -> None:
        assert store.repair.lost_nodes(within()) == []
        assert store.repair.begin(store.nodes.addresses[0], within()) is None
        require_rows(trainer, rows, records_of(rows))

    @pytest.mark.parametrize("how", ["started again empty", "flushed"])
    def test_a_lost_node_is_repaired_while_others_serve_and_every_store_goes_on(
        self, nodes: Nodes, store: Store, trainer: Store, how: str, rows: RowKeys
    ) -> None:
        nodes.flush(0) if how == "flushed" else nodes.restart(0)
        (found,) = lost(store)
        assert (found.why, found.nonce) == ("empty", None)
        here = store.repair.keys_of(found.address, rows)
        mine, others = rows[np.flatnonzero(here)], rows[np.flatnonzero(~here)]
        assert 0 < len(mine) < len(rows)
        nonce = begun(store, found.address)
        assert store.repair.lost_nodes(within()) == [LostNode(found.address, "repairing", nonce)]
        for one in (store, trainer):
            with pytest.raises(LOST, match=found.address):
                read(one, mine)
            require_rows(one, others, records_of(others))
        with pytest.raises(LOST, match=found.address):
            write(store, mine, records_of(mine))
        with nodes.store() as late, pytest.raises(LOST, match=found.address):
            late.open(within())
        write_back(store, found.address, nonce, mine)
        assert not store.repair.finish(found.address, nonce, range(1), within())
        with pytest.raises(LOST, match=found.address):
            read(trainer, mine)
        store.repair.report(found.address, nonce, 0, within())
        assert store.repair.finish(found.address, nonce, range(1), within())
        assert store.repair.lost_nodes(within()) == []
        eventually_reads(trainer)
        eventually_reads(store)
        assert write(store, rows, records_of(rows, salt=1)).all()
        eventually_reads(trainer, salt=1)
        with nodes.store() as late:
            late.open(within())
            require_rows(late, rows, records_of(rows, salt=1))

    @pytest.mark.parametrize("how", ["flushed", "started again empty"])
    def test_a_loss_in_mid_repair_starts_it_over(self, nodes: Nodes, store: Store, trainer: Store, how: str) -> None:
        nodes.flush(0)
        (found,) = lost(store)
        first = begun(store, found.address)
        mine = rows_of(store, found.address)
        write_back(store, found.address, first, mine)
        store.repair.report(found.address, first, 0, within())
        nodes.flush(0) if how == "flushed" else nodes.restart(0)
        lost(store)  # it serves again
        for call in (
            lambda: store.repair.read(found.address, first, [ReadPart(mine, SIZE, SIZE)], within()),
            lambda: store.repair.report(found.address, first, 0, within()),
            lambda: store.repair.finish(found.address, first, range(1), within()),
        ):
            with pytest.raises((*LOST, NodeUnavailableError)):
                call()
        assert [node.why for node in store.repair.lost_nodes(within())] == ["empty"]
        second = begun(store, found.address)
        assert second != first
        assert not store.repair.finish(found.address, second, range(1), within())
        repair(store, found.address)
        eventually_reads(trainer)

    def test_a_lost_node_beside_one_that_hangs_is_found_without_waiting_for_that_one_each_time(
        self, nodes: Nodes, store: Store, trainer: Store
    ) -> None:
        if not nodes.own_map:
            pytest.skip("a cluster without one of its primaries serves nothing")
        hung, address = store.nodes.addresses[:2]
        nodes.pause(0)
        try:
            assert store.repair.lost_nodes(Deadline.after(1.0)) == []
            assert list(store.repair.away) == [hung]
            nodes.flush(1)
            patience, begun_s = Deadline.after(60.0), time.monotonic()
            assert [node.address for node in store.repair.lost_nodes(patience)] == [address]
            assert time.monotonic() - begun_s < 10.0, "it waited for its share of the time"
        finally:
            nodes.resume(0)
        repair(store, address)
        eventually_reads(trainer)

    def test_two_shards_begin_at_once_and_finish_when_both_have_reported(self, nodes: Nodes, store: Store, trainer: Store) -> None:
        with nodes.store() as other, ThreadPoolExecutor(2) as threads:
            other.open(within())
            nodes.flush(0)
            address = lost(store)[0].address
            together = Barrier(2)

            def begin(one: Store) -> str:
                together.wait(60)
                return begun(one, address)

            nonce, same = threads.map(begin, (store, other))
            assert nonce == same
            mine = rows_of(store, address)
            half = len(mine) // 2
            write_back(store, address, nonce, mine[:half])
            store.repair.report(address, nonce, 0, within())
            assert not store.repair.finish(address, nonce, range(2), within())
            with pytest.raises(LOST):
                read(trainer, mine[:half])
            write_back(other, address, nonce, mine[half:])
            other.repair.report(address, nonce, 1, within())
            assert other.repair.finish(address, nonce, range(2), within())
            assert store.repair.finish(address, nonce, range(2), within())
            for one in (store, other, trainer):
                eventually_reads(one)

    def test_a_wrong_nonce_and_rows_of_other_nodes_are_refused(self, nodes: Nodes, store: Store, trainer: Store, rows: RowKeys) -> None:
        nodes.flush(0)
        address = lost(store)[0].address
        nonce, mine = begun(store, address), rows_of(store, address)
        zeros = np.zeros(len(mine), dtype=np.uint64)
        with pytest.raises(NodeLostError):
            store.repair.write(address, "0" * 16, [WritePart(mine, records_of(mine), zeros)], within())
        with pytest.raises(NodeLostError):
            store.repair.report(address, "0" * 16, 0, within())
        with pytest.raises(NodeLostError):
            store.repair.finish(address, "0" * 16, range(1), within())
        with pytest.raises(InvalidInputError, match=address):
            store.repair.write(address, nonce, [WritePart(rows, records_of(rows), np.zeros(len(rows), dtype=np.uint64))], within())
        assert not store.repair.read(address, nonce, [ReadPart(mine, SIZE, SIZE)], within())[0].found.any()

    def test_a_node_from_an_old_snapshot_is_suspect_until_its_rows_were_compared(
        self, nodes: Nodes, store: Store, trainer: Store, rows: RowKeys
    ) -> None:
        nodes.save(0)
        write(store, rows, records_of(rows, salt=1))
        gone = rows[:100]
        store.rows.erase([WritePart(gone, np.empty((100, 0), np.uint8))], within())
        nodes.restart(0, saved=True)
        (found,) = lost(store)
        assert found.why == "suspect"
        for one in (store, trainer):
            with pytest.raises((NodeSuspectError, NodeUnavailableError)):
                read(one, rows)
            with pytest.raises(NodeSuspectError, match=found.address):
                read(one, rows)
        nonce = begun(store, found.address)
        blocks = store.repair.keys_on(found.address, np.ones(N_SLOTS, bool), within())
        assert blocks is not None
        seen = np.concatenate([block.ids for block in blocks if block.tag == rows.tag])
        mine = rows_of(store, found.address)
        assert set(seen.tolist()) == set(mine.ids.tolist())  # those that were erased included
        back = rows_of(store, found.address, gone)
        assert store.repair.read(found.address, nonce, [ReadPart(back, SIZE, SIZE)], within())[0].found.all()
        store.repair.erase(found.address, nonce, [WritePart(back, np.empty((len(back), 0), np.uint8))], within())
        write_back(store, found.address, nonce, rows_of(store, found.address, rows[100:]), salt=1)
        store.repair.report(found.address, nonce, 0, within())
        assert store.repair.finish(found.address, nonce, range(1), within())
        for one in (store, trainer):
            eventually_reads(one, 1, rows[100:])
            result = read(one, rows)
            assert not result.found[:100].any()

    def test_a_node_that_goes_back_to_before_its_last_repair_is_suspect_although_its_process_is_the_same(
        self, nodes: Nodes, store: Store, trainer: Store, rows: RowKeys
    ) -> None:
        nodes.save(0)
        write(store, rows, records_of(rows, salt=1))
        nodes.flush(0)
        repair(store, lost(store)[0].address, salt=1)
        eventually_reads(trainer, salt=1)
        nodes.go_back(0)
        (found,) = lost(store)
        assert (found.why, found.nonce) == ("suspect", None)
        for one in (trainer, trainer, store):
            with pytest.raises(NodeSuspectError, match=rf"{found.address}.*older than its last repair"):
                read(one, rows)
        with nodes.store() as restarted:  # what it knew of repairs is all that tells it
            known = Identity(CLUSTER, GENERATION, store.nodes.cluster_map, repairs=store.nodes.repairs)
            restarted.open(within(), known)
            assert [node.why for node in restarted.repair.lost_nodes(within())] == (["suspect"] if known.repairs else [])
        repair(store, found.address, salt=1)
        for one in (trainer, store):
            eventually_reads(one, salt=1)

    def test_a_restart_from_a_snapshot_in_mid_repair_starts_it_over(self, nodes: Nodes, store: Store, trainer: Store) -> None:
        nodes.flush(0)
        address = lost(store)[0].address
        first = begun(store, address)
        nodes.save(0)  # the snapshot holds the nonce, and no rows
        write_back(store, address, first, rows_of(store, address))
        store.repair.report(address, first, 0, within())
        nodes.restart(0, saved=True)
        assert lost(store)[0].why in ("suspect", "empty")
        with pytest.raises((*LOST, NodeUnavailableError)):
            store.repair.finish(address, first, range(1), within())
        assert begun(store, address) != first
        repair(store, address)
        eventually_reads(trainer)

    def test_a_node_that_looks_whole_can_be_repaired_too(self, store: Store, trainer: Store, rows: RowKeys) -> None:
        address = store.nodes.addresses[0]
        nonce = begun(store, address, even_if_whole=True)
        with pytest.raises(LOST, match=address):
            read(trainer, rows)
        write_back(store, address, nonce, rows_of(store, address), salt=1)
        store.repair.report(address, nonce, 0, within())
        assert store.repair.finish(address, nonce, range(1), within())
        for one in (store, trainer):
            eventually_reads(one, 1, rows_of(store, address))

    def test_a_shard_opens_and_repairs_a_cluster_that_has_lost_everything(
        self, nodes: Nodes, store: Store, trainer: Store, rows: RowKeys
    ) -> None:
        for index in range(len(store.nodes.addresses)):
            nodes.flush(index)
        with nodes.store() as unknowing, pytest.raises(NotProvisionedError):
            unknowing.open(within())
        with nodes.store() as shard:
            markers = shard.open(within(), Identity(CLUSTER, GENERATION, store.nodes.cluster_map))
            assert {marker.cluster_id for marker in markers} == {CLUSTER}
            assert {node.why for node in shard.repair.lost_nodes(within())} == {"empty"}
            own(shard, 3)
            for address in shard.nodes.addresses:
                repair(shard, address)
            assert shard.repair.lost_nodes(within()) == []
            require_rows(shard, rows, records_of(rows))
            assert shard.values.owner_epoch(0, within()) == 3
        eventually_reads(trainer)

    def test_small_values_are_put_back_in_repair(self, nodes: Nodes, store: Store, trainer: Store) -> None:
        own(store, 5)
        store.values.put("kvemb:test", b"value", within())
        nodes.restart(0)
        address = lost(store)[0].address
        nonce = begun(store, address)
        write_back(store, address, nonce, rows_of(store, address))
        store.repair.update_value(address, nonce, "kvemb:test", lambda found: b"value", within())
        store.repair.report(address, nonce, 0, within())
        assert store.repair.finish(address, nonce, range(1), within())
        with nodes.store() as late:
            late.open(within())
            assert set(late.values.get("kvemb:test", within())) == {b"value"}
            assert set(late.values.get(owner_name(0), within())) == {Owner(5, 1).encode()}

    # --- fencing ----------------------------------------------------------------------------------------------------------------

    def test_the_owner_epoch_is_the_highest_on_any_node(self, store: Store) -> None:
        assert store.values.owner_epoch(0, within()) == 0
        own(store, 4)
        assert (store.values.owner_epoch(0, within()), store.values.owner_epoch(1, within())) == (4, 0)

    def test_a_higher_epoch_of_the_same_owner_that_could_not_be_written_is_written_by_its_next_look(self, store: Store) -> None:
        own(store, 4)
        store.fence(0, 5, within())
        assert store.repair.lost_nodes(within()) == []
        assert store.values.owner_epoch(0, within()) == 5

    def test_after_a_takeover_the_older_process_writes_nothing_on_a_new_connection(
        self, nodes: Nodes, store: Store, monkeypatch: pytest.MonkeyPatch, rows: RowKeys
    ) -> None:
        own(store, 1)
        write(store, rows, records_of(rows))
        tokens = read(store, rows, tokens=True).tokens
        with nodes.store() as successor:
            successor.open(within())
            own(successor, 2)
            successor.kill_other_writers(within())
            with monkeypatch.context() as patch, suppress(KeyboardInterrupt, FencedError):  # it gives its connections up
                patch.setattr(RowsReader, "feed", _interrupted)
                read(store, rows)
            with pytest.raises(FencedError, match=r"epoch 2.*epoch 1"):
                store.rows.write([WritePart(rows, records_of(rows, salt=1), tokens)], within())
            with pytest.raises(FencedError):
                store.fence(0, 1, within())
            require_rows(successor, rows, records_of(rows))
            assert write(successor, rows, records_of(rows, salt=2)).all()

    def test_a_takeover_ends_the_older_connections_and_spares_its_own(self, nodes: Nodes, store: Store, rows: RowKeys) -> None:
        if store.capabilities.cas:
            pytest.skip("compare-and-swap guards every write")
        own(store, 1)
        write(store, rows, records_of(rows))
        with nodes.store() as successor:
            successor.open(within())
            require_rows(successor, rows, records_of(rows))
            own(successor, 2)
            assert successor.kill_other_writers(within()) >= len(store.nodes.addresses)
            assert successor.kill_other_writers(within()) == 0
            require_rows(successor, rows, records_of(rows))
            with pytest.raises(FencedError):
                read(store, rows)
