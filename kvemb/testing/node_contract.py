"""The contract of nodes: provisioned once, told from foreign, lost, absent and hung ones, described by their values and numbers."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvemb.coordination.map_copies import MAP_NAME
from kvemb.coordination.replicated_values import DamagedCopyError, unless_newer
from kvemb.errors import (
    DeadlineExceededError,
    MapChangedError,
    NodeLostError,
    NodeSuspectError,
    NodeUnavailableError,
    NotProvisionedError,
    StorageError,
    WrongNodeError,
)
from kvemb.net.deadline import Deadline
from kvemb.stores import read_retry
from kvemb.stores.row_io import WritePart
from kvemb.stores.store import Store
from kvemb.testing.contract_nodes import CLUSTER, GENERATION, Nodes, StoreOnNodes, read, records_of, require_rows, within, write


class NodeContract(StoreOnNodes):
    """A node that has changed its identity or is away is reported, by name and in time."""

    def test_open_before_provisioning_is_refused(self, nodes: Nodes) -> None:
        with nodes.store() as store, pytest.raises(NotProvisionedError):
            store.open(within())

    def test_provisioning_again_with_the_same_ids_is_fine_and_with_others_is_refused(self, store: Store) -> None:
        store.provision(CLUSTER, GENERATION, within())
        with pytest.raises(WrongNodeError):
            store.provision(b"another-cluster!", GENERATION, within())
        with pytest.raises(StorageError):
            store.provision(CLUSTER, b"other   ", within())
        assert {marker.cluster_id for marker in store.open(within())} == {CLUSTER}

    def test_provisioning_a_node_that_holds_a_foreign_key_is_refused_and_writes_nothing(self, nodes: Nodes) -> None:
        nodes.put_foreign(b"foreign", b"value")
        with nodes.store() as store:
            with pytest.raises(WrongNodeError):
                store.provision(CLUSTER, GENERATION, within())
            assert sum(node.n_keys for node in store.nodes.stats(within())) == 1
            with pytest.raises(NotProvisionedError):
                store.open(within())

    def test_meta_values_come_back_from_every_node(self, store: Store) -> None:
        assert set(store.values.get("kvemb:test", within())) == {None}
        for value in (b"one", b"EN\r\n$-1\r\nVA 3\r\n", b"", bytes(100_000)):
            store.values.put("kvemb:test", value, within())
            assert set(store.values.get("kvemb:test", within())) == {value}

    def test_a_change_of_a_meta_value_sees_every_copy_and_may_leave_it(self, store: Store) -> None:
        for value in (b"2", b"3", b"1"):
            store.values.update("kvemb:test", unless_newer(value, value.__lt__), within())
        assert set(store.values.get("kvemb:test", within())) == {b"3"}

    def test_stats_count_keys_and_bytes_of_every_node(self, store: Store) -> None:
        before = store.nodes.stats(within())
        keys = self.keys(200)
        write(store, keys, records_of(keys))
        after = store.nodes.stats(within())
        assert tuple(node.address for node in after) == store.nodes.addresses
        assert sum(node.n_keys for node in after) == sum(node.n_keys for node in before) + self.n_keys_of(keys)
        assert all(node.used_bytes > 0 and node.server for node in after)

    def test_a_flushed_node_is_lost_at_the_next_read_and_the_next_write(self, store: Store, nodes: Nodes) -> None:
        keys = self.keys(400)
        write(store, keys, records_of(keys))
        nodes.flush(0)
        with pytest.raises(NodeLostError):
            read(store, keys)
        tokens = np.zeros(400, dtype=np.uint64)
        with pytest.raises(NodeLostError):
            store.rows.write([WritePart(keys, records_of(keys), tokens)], within())
        with pytest.raises(NodeLostError):
            store.rows.erase([WritePart(keys, records_of(keys))], within())
        with nodes.store() as another, pytest.raises((NodeLostError, NotProvisionedError)):
            another.open(within())

    def test_a_marker_of_another_cluster_or_lifetime_fails_the_batch(self, store: Store, nodes: Nodes) -> None:
        keys, markers = self.keys(400), store.open(within())
        write(store, keys, records_of(keys))
        for values, error in (
            ([replace(marker, cluster_id=b"another-cluster!").encode() for marker in markers], WrongNodeError),
            ([replace(marker, generation=b"later   ").encode() for marker in markers], NodeLostError),
            ([b"no marker at all"] * len(markers), NodeSuspectError),
            ([markers[(i + 1) % len(markers)].encode() for i in range(len(markers))], WrongNodeError),
        ):
            nodes.put_markers(values)
            with pytest.raises(error):
                read(store, keys)
        nodes.put_markers([marker.encode() for marker in markers])
        require_rows(store, keys, records_of(keys))

    def test_another_cluster_map_is_told_at_once_with_both_serials(self, store: Store, nodes: Nodes) -> None:
        keys, markers = self.keys(400), store.open(within())
        write(store, keys, records_of(keys))
        nodes.put_markers([replace(marker, map_serial=2, map_digest=7).encode() for marker in markers])
        says = "cluster map of serial 2 .* this process that of serial 1"
        with pytest.raises(MapChangedError, match=says):
            read(store, keys)
        with pytest.raises(MapChangedError, match=says):
            write(store, keys, records_of(keys))
        with nodes.store() as another, pytest.raises(MapChangedError, match=says):
            another.open(within())

    def test_one_good_copy_of_the_map_is_enough_and_none_is_told(self, store: Store, nodes: Nodes) -> None:
        keys, copies = self.keys(400), store.values.get(MAP_NAME, within())
        write(store, keys, records_of(keys))
        assert set(copies) == {store.nodes.cluster_map.encode()}
        if len(copies) > 1:
            store.values.mend(MAP_NAME, copies, [index == 0 for index in range(len(copies))], b"junk", within())
            with nodes.store() as another:
                another.open(within())
                require_rows(another, keys, records_of(keys))
        store.values.put(MAP_NAME, b"junk", within())
        with nodes.store() as another, pytest.raises(DamagedCopyError, match=MAP_NAME):
            another.open(within())
        require_rows(store, keys, records_of(keys))  # a store that knows the map goes on

    def test_a_trainer_that_connects_waits_until_a_copy_of_the_map_is_good_again(
        self, store: Store, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not nodes.over_wire:
            pytest.skip("a store without a server has no trainer's role")
        good = store.nodes.cluster_map.encode()

        def mending(*of: float) -> Iterator[float]:
            yield 0.0
            store.values.put(MAP_NAME, good, within())  # as shards do
            while True:
                yield 0.01

        store.values.put(MAP_NAME, b"junk", within())
        monkeypatch.setattr(read_retry, "pauses", mending)
        with nodes.store(role="trainer") as trainer:
            trainer.open(within())
            assert trainer.nodes.cluster_map.encode() == good

    def test_nodes_are_found_from_any_of_them_and_known_by_their_markers(self, store: Store, nodes: Nodes) -> None:
        if not nodes.finds_others:
            pytest.skip("a store that knows what it is told")
        keys = self.keys(400)
        write(store, keys, records_of(keys))
        for some in (nodes.config.nodes[::-1], nodes.config.nodes[:1], nodes.config.nodes[1:]):
            with nodes.store(nodes=some) as another:
                another.open(within())
                require_rows(another, keys, records_of(keys))
                assert len(another.nodes.addresses) == len(store.nodes.addresses)

    def test_a_node_that_is_down_is_named(self, store: Store, nodes: Nodes) -> None:
        keys = self.keys(400)
        write(store, keys, records_of(keys))
        nodes.stop(1)
        for _ in range(2):  # on the old connection, then on connecting
            with pytest.raises(NodeUnavailableError, match=nodes.config.nodes[1]):
                read(store, keys, deadline=within(5))

    def test_a_hung_node_costs_one_deadline_and_its_late_replies_are_never_read(self, store: Store, nodes: Nodes) -> None:
        keys = self.keys(3000)
        write(store, keys, records_of(keys))
        nodes.pause(1)
        deadline = within(2)  # enough for the others to answer, on a busy machine, too
        with pytest.raises(DeadlineExceededError, match=nodes.config.nodes[1]) as failure:
            read(store, keys, deadline=deadline)
        assert not any(address in str(failure.value) for address in nodes.config.nodes if address != nodes.config.nodes[1])
        again = within(0.5)
        with pytest.raises((DeadlineExceededError, NodeUnavailableError), match=nodes.config.nodes[1]):
            read(store, keys, deadline=again)
        assert Deadline.after(0).at_s < again.at_s + 20  # hundreds of deadlines later would be no deadline
        nodes.resume(1)
        for first in (500, 1, 1000):
            some = self.keys(2000, first=first)
            require_rows(store, some, records_of(some))
