"""The contract of a store, as tests: a new backend passes it with a class and a fixture of its own.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def nodes(self) -> Iterator[Nodes]:
            yield MyNodes(...)          # empty nodes, and the ways to mishandle them

What only some backends can do (compare-and-swap, being stopped) is asked of `Store.capabilities` and of `Nodes`; such a test is skipped
where it has no meaning. Tests of one protocol or server stay with that backend.
"""

import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from kvemb.arrays.hashing import mix64
from kvemb.config import StorageConfig
from kvemb.errors import (
    ClosedError,
    DeadlineExceededError,
    NodeLostError,
    NodeSuspectError,
    NodeUnavailableError,
    NotProvisionedError,
    RecordError,
    StorageError,
    WrongNodeError,
)
from kvemb.net.deadline import Deadline
from kvemb.schema.keys import RowKeys, coalesce_keys
from kvemb.schema.pages import PagedKeys, page_layout, paged_keys
from kvemb.stores.row_io import ReadPart, ReadResult, WritePart
from kvemb.stores.storage_kinds import open_store
from kvemb.stores.store import Store
from kvemb.wire.fixed_size_values import FixedSizeValuesReply

CLUSTER, GENERATION = b"contract-cluster", b"lifetime"
SIZE = 76
TAG = b"tab"
N_PAGED_IDS = 1 << 17
# What a reader may take for the protocol when it stands inside a record.
PROTOCOL_TEXT = (
    b"$-1\r\n",
    b"VA 76 c1\r\n",
    b"EN\r\n",
    b"+OK\r\n",
    b"-ERR no\r\n",
    b"HD\r\n",
    b"$76\r\n",
    b"VA 76\r\n",
    b"\r\n",
    b"*3\r\n",
)


class Nodes:
    """Empty nodes of one backend. A subclass overrides what its backend can do; the rest is skipped.

    Args:
        config: reaches all of them, in the order of the node map.
        own_map: whether the order of `config.nodes` is the node map (a cluster may keep its own).
        over_wire: whether rows travel in kvemb.wire's replies.
    """

    own_map = True
    over_wire = True

    def __init__(self, config: StorageConfig) -> None:
        self.config = config

    def store(self, *, nodes: Sequence[str] | None = None) -> Store:
        """Return a store that is not opened yet, of these nodes or of some of them."""
        return open_store(self.config if nodes is None else replace(self.config, nodes=tuple(nodes)), role="shard:0")

    def put_foreign(self, key: bytes, value: bytes) -> None:
        """Write a value where the key belongs, as another program would."""
        pytest.skip("no foreign writer")

    def put_markers(self, values: Sequence[bytes]) -> None:
        """Overwrite every marker; in the order of `Store.open`'s."""
        pytest.skip("markers cannot be overwritten")

    def flush(self, index: int) -> None:
        """Lose everything that the node holds, while it goes on running."""
        pytest.skip("a node cannot be flushed")

    def restart(self, index: int, *, saved: bool = False) -> None:
        """Start the node's server again: empty, or with what it held at the last `save`."""
        pytest.skip("a node has no server to start again")

    def save(self, index: int) -> None:
        """Let the node's server save what it holds."""
        pytest.skip("a node saves nothing")

    def stop(self, index: int) -> None:
        """End the node's server."""
        pytest.skip("a node has no server to end")

    def pause(self, index: int) -> None:
        """Let the node's server hang."""
        pytest.skip("a node has no server to pause")

    def resume(self, index: int) -> None:
        """Let it run again."""
        pytest.skip("a node has no server to resume")


def within(timeout_s: float = 20.0) -> Deadline:
    """A deadline that a test does not mean to reach."""
    return Deadline.after(timeout_s)


def row_keys(n: int, first: int = 1, tag: bytes = TAG) -> RowKeys:
    """Return n keys of scattered ids."""
    return RowKeys(tag, mix64(np.arange(first, first + n, dtype=np.uint64)))


def records_of(keys: RowKeys, size: int = SIZE, salt: int = 0) -> NDArray[np.uint8]:
    """Return records that follow from the ids, so that a row in another's place is noticed: uint8 [n, size]."""
    words = np.arange(size // 8 + 1, dtype=np.uint64) + np.uint64(salt << 32)
    records: NDArray[np.uint8] = mix64(keys.ids[:, None] + mix64(words)[None, :]).view(np.uint8)
    return records[:, :size].copy()


def protocol_records(n: int, size: int = SIZE) -> NDArray[np.uint8]:
    """Return records made of protocol text at every alignment: uint8 [n, size]."""
    longest = max(len(text) for text in PROTOCOL_TEXT)
    tiled = [np.frombuffer(text * (size + longest), dtype=np.uint8)[: size + longest] for text in PROTOCOL_TEXT]
    row = np.arange(n)
    shifts = row // len(tiled) % longest
    records: NDArray[np.uint8] = np.stack(tiled)[(row % len(tiled))[:, None], shifts[:, None] + np.arange(size)[None, :]]
    return records


def read(store: Store, keys: RowKeys, size: int = SIZE, *, tokens: bool = False, deadline: Deadline | None = None) -> ReadResult:
    """Read whole records, in the order of the keys."""
    return store.read([ReadPart(keys, size, size, tokens)], deadline or within())[0].in_key_order()


def write(store: Store, keys: RowKeys, records: NDArray[np.uint8], *, deadline: Deadline | None = None) -> NDArray[np.bool_]:
    """Write records over whatever is there; return which were stored."""
    tokens = read(store, keys, records.shape[1], tokens=True).tokens if store.capabilities.cas else None
    return store.write([WritePart(keys, records, tokens)], deadline or within())[0].stored


def require_rows(store: Store, keys: RowKeys, records: NDArray[np.uint8]) -> None:
    """Fail unless every row is there with exactly that record."""
    result = read(store, keys, records.shape[1])
    assert result.found.all()
    np.testing.assert_array_equal(result.records, records)


class StoreContract:
    """Every store passes these.

    `keys` says where rows lie: here under keys of their own, in `PagedStoreContract` in pages.
    """

    smallest_record_bytes = 1

    def keys(self, n: int, first: int = 1, tag: bytes = TAG, size: int = SIZE) -> RowKeys:
        """Return n keys of scattered ids, for records of so many bytes."""
        return row_keys(n, first, tag)

    def n_keys_of(self, keys: RowKeys) -> int:
        """How many keys a server holds when it holds these rows."""
        return len(keys)

    @pytest.fixture
    def nodes(self) -> Nodes:
        """Two or more empty nodes; may as well be a generator that cleans up."""
        raise NotImplementedError("a backend's test class brings this fixture")

    @pytest.fixture
    def store(self, nodes: Nodes) -> Iterator[Store]:
        """A store that is provisioned and open."""
        with nodes.store() as store:
            store.provision(CLUSTER, GENERATION, within())
            store.open(within())
            yield store

    # --- provisioning -----------------------------------------------------------------------------------------------------------

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
            assert sum(node.n_keys for node in store.stats(within())) == 1
            with pytest.raises(NotProvisionedError):
                store.open(within())

    # --- rows -------------------------------------------------------------------------------------------------------------------

    def test_a_row_that_was_never_written_is_missing(self, store: Store) -> None:
        result = read(store, self.keys(100), tokens=True)
        assert not result.found.any()
        assert (result.tokens is not None) == store.capabilities.cas
        assert result.tokens is None or not result.tokens.any()

    @pytest.mark.parametrize("n", [0, 1, 1023, 1024, 1025, 5000])
    def test_batches_of_any_size_come_back_with_any_share_missing(self, store: Store, n: int) -> None:
        for index, share in enumerate((0.0, 0.01, 0.5, 1.0)):
            keys = self.keys(n, first=1 + index * 10_000)
            here = np.random.default_rng(index).random(n) >= share
            there = keys.take(np.flatnonzero(here))
            assert write(store, there, records_of(there)).all()
            result = read(store, keys, tokens=index % 2 == 1)
            np.testing.assert_array_equal(result.found, here)
            np.testing.assert_array_equal(result.records[here], records_of(there))

    def test_records_full_of_protocol_text_come_back(self, store: Store) -> None:
        keys, records = self.keys(3000), protocol_records(3000)
        written = np.arange(3000) % 7 != 3
        there = keys.take(np.flatnonzero(written))
        assert write(store, there, records[written]).all()
        for tokens in (False, True):
            result = read(store, keys, tokens=tokens)
            np.testing.assert_array_equal(result.found, written)
            np.testing.assert_array_equal(result.records[written], records[written])

    def test_parts_of_different_tables_travel_in_one_call(self, store: Store) -> None:
        shapes = ((b"aaa", self.smallest_record_bytes, 2000), (b"bbb", 300, 500), (b"ccc", 44, 0), (b"ddd", 5000, 40))
        parts = [(self.keys(n, tag=tag, size=size), size) for tag, size, n in shapes]
        zeros = [np.zeros(len(keys), dtype=np.uint64) for keys, _ in parts]
        stored = store.write([WritePart(k, records_of(k, size), t) for (k, size), t in zip(parts, zeros, strict=True)], within())
        assert [result.stored.all() for result in stored] == [True] * 4
        results = store.read([ReadPart(keys, size, size) for keys, size in parts], within())
        for (keys, size), result in zip(parts, results, strict=True):
            assert result.found.all()
            np.testing.assert_array_equal(result.in_key_order().records, records_of(keys, size))

    def test_tables_of_one_record_size_share_ids_and_no_rows(self, store: Store) -> None:
        tags, cas = (b"aaa", b"bab", b"ccc", b"zzz"), store.capabilities.cas
        parts = [self.keys(n, tag=tag) for tag, n in zip(tags, (700, 1300, 1, 5000), strict=True)]
        records = [records_of(keys, salt=salt) for salt, keys in enumerate(parts)]
        there = [np.arange(len(keys)) % 5 != salt for salt, keys in enumerate(parts)]
        given = [(keys.take(np.flatnonzero(here)), rows[here]) for keys, rows, here in zip(parts, records, there, strict=True)]
        written = store.write([WritePart(keys, rows, np.zeros(len(keys), dtype=np.uint64)) for keys, rows in given], within())
        assert all(result.stored.all() and len(result.stored) == len(keys) for result, (keys, _) in zip(written, given, strict=True))
        together = coalesce_keys([keys[:500] for keys in parts])
        asked = [ReadPart(keys, SIZE, SIZE, tokens=cas, foreign=True) for keys in parts]
        *each, last = [result.in_key_order() for result in store.read([*asked, ReadPart(together, SIZE, SIZE)], within())]
        for result, rows, here in zip(each, records, there, strict=True):
            np.testing.assert_array_equal(result.found, here)
            np.testing.assert_array_equal(result.records[here], rows[here])
            assert result.foreign is not None
            assert not result.foreign.any()
        np.testing.assert_array_equal(last.found, np.concatenate([here[:500] for here in there]))
        np.testing.assert_array_equal(last.records[last.found], np.concatenate([rows[:500] for rows in records])[last.found])
        if not cas:
            return
        for result, stored, here in zip(each, written, there, strict=True):
            assert result.tokens is not None
            assert stored.tokens is not None
            np.testing.assert_array_equal(result.tokens[here], stored.tokens)
        tokens = [np.asarray(result.tokens).copy() for result in written]
        tokens[1][::2] = 0  # "must not exist": a conflict, in this table only
        again = store.write([WritePart(keys, rows, some) for (keys, rows), some in zip(given, tokens, strict=True)], within())
        assert [int((~result.stored).sum()) for result in again] == [0, -(-len(tokens[1]) // 2), 0, 0]

    def test_order_says_which_row_is_which(self, store: Store) -> None:
        keys = self.keys(1500)
        write(store, keys, records_of(keys))
        result = store.read([ReadPart(keys, SIZE, SIZE)], within())[0]
        order = np.arange(1500) if result.order is None else result.order
        assert sorted(order.tolist()) == list(range(1500))
        np.testing.assert_array_equal(result.records, records_of(keys)[order])

    def test_a_prefix_read_returns_the_first_bytes(self, store: Store) -> None:
        keys = self.keys(1200)
        write(store, keys, records_of(keys))
        result = store.read([ReadPart(keys, SIZE, 13)], within())[0].in_key_order()
        assert result.found.all()
        np.testing.assert_array_equal(result.records, records_of(keys)[:, :13])

    def test_a_second_write_replaces_the_first(self, store: Store) -> None:
        keys = self.keys(1100)
        write(store, keys, records_of(keys))
        assert write(store, keys, records_of(keys, salt=1)).all()
        require_rows(store, keys, records_of(keys, salt=1))

    def test_erased_rows_are_missing_and_erasing_missing_rows_is_fine(self, store: Store) -> None:
        keys = self.keys(1500)
        write(store, keys, records_of(keys))
        gone = np.arange(1500) % 3 == 0
        part = WritePart(keys.take(np.flatnonzero(gone)), np.empty((int(gone.sum()), 0), np.uint8))
        store.erase([part], within())
        store.erase([part], within())
        result = read(store, keys)
        np.testing.assert_array_equal(result.found, ~gone)
        np.testing.assert_array_equal(result.records[~gone], records_of(keys)[~gone])

    def test_a_value_of_another_size_is_an_error_that_names_node_and_id(self, store: Store, nodes: Nodes) -> None:
        keys = self.keys(1100)
        write(store, keys, records_of(keys))
        for wrong in (b"", b"short", b"x" * (SIZE + 1), b"\r\n" * SIZE):
            nodes.put_foreign(keys.take(np.array([777])).encode().tobytes(), wrong)
            with pytest.raises(RecordError, match=rf"node \S+, id {int(keys.ids[777])}\b.* {len(wrong)} bytes"):
                read(store, keys)
        assert store.read([ReadPart(keys.take(np.arange(700)), SIZE, SIZE)], within())[0].found.all()

    # --- compare-and-swap -------------------------------------------------------------------------------------------------------

    def test_a_stale_token_is_a_conflict_of_that_row_only(self, store: Store) -> None:
        if not store.capabilities.cas:
            pytest.skip("no compare-and-swap")
        keys = self.keys(3000)
        old, new = np.arange(3000) < 2000, np.arange(3000) >= 2500  # the first 2000 exist; of the others 2500.. are new
        write(store, keys.take(np.flatnonzero(~new)), records_of(keys)[~new])
        tokens = read(store, keys, tokens=True).tokens
        assert tokens is not None
        stale = old & (np.arange(3000) % 500 == 7)
        write(store, keys.take(np.flatnonzero(stale)), records_of(keys, salt=1)[stale])
        tokens[2000:2003] = 0  # "must not exist", but they do
        conflict = stale | ((np.arange(3000) >= 2000) & (np.arange(3000) < 2003))
        stored = store.write([WritePart(keys, records_of(keys, salt=2), tokens)], within())[0].stored
        np.testing.assert_array_equal(stored, ~conflict)
        expected = np.where(conflict[:, None], records_of(keys), records_of(keys, salt=2))
        expected[stale] = records_of(keys, salt=1)[stale]
        require_rows(store, keys, expected)

    def test_a_token_of_a_row_that_was_erased_is_a_conflict(self, store: Store) -> None:
        if not store.capabilities.cas:
            pytest.skip("no compare-and-swap")
        keys = self.keys(10)
        write(store, keys, records_of(keys))
        tokens = read(store, keys, tokens=True).tokens
        store.erase([WritePart(keys, records_of(keys))], within())
        assert not store.write([WritePart(keys, records_of(keys), tokens)], within())[0].stored.any()
        assert not read(store, keys).found.any()

    def test_an_erase_with_tokens_leaves_rows_that_were_written_since(self, store: Store) -> None:
        if not store.capabilities.cas:
            pytest.skip("no compare-and-swap")
        keys = self.keys(3000)
        there = np.arange(3000) < 2500  # of the others, 2990.. appear after the read
        write(store, keys.take(np.flatnonzero(there)), records_of(keys)[there])
        got = read(store, keys, tokens=True)
        assert got.tokens is not None
        tokens = np.where(got.found, got.tokens, np.uint64(0))
        newer = (np.arange(3000) % 500 == 7) | (np.arange(3000) >= 2990)
        write(store, keys.take(np.flatnonzero(newer)), records_of(keys, salt=1)[newer])
        nothing = np.empty((0, 0), np.uint8)
        np.testing.assert_array_equal(store.erase([WritePart(keys, nothing, tokens)], within())[0], ~newer)
        after = read(store, keys)
        np.testing.assert_array_equal(after.found, newer)
        np.testing.assert_array_equal(after.records[newer], records_of(keys, salt=1)[newer])
        assert store.erase([WritePart(keys, nothing)], within())[0].all()  # without tokens: whatever is there
        assert not read(store, keys).found.any()

    def test_an_erase_in_doubt_never_lands_on_a_newer_row(self, store: Store, nodes: Nodes) -> None:
        if not store.capabilities.cas:
            pytest.skip("no compare-and-swap")
        keys = self.keys(3000)
        write(store, keys, records_of(keys))
        tokens = read(store, keys, tokens=True).tokens
        nodes.pause(1)
        with pytest.raises(DeadlineExceededError):
            store.erase([WritePart(keys, np.empty((0, 0), np.uint8), tokens)], within(0.5))
        nodes.resume(1)
        stored = write(store, keys, records_of(keys, salt=2))
        while not stored.all():  # the erase landed between this write's read and itself
            stored = write(store, keys, records_of(keys, salt=2))
        for _ in range(3):
            require_rows(store, keys, records_of(keys, salt=2))

    # --- meta and stats ---------------------------------------------------------------------------------------------------------

    def test_meta_values_come_back_from_every_node(self, store: Store) -> None:
        assert set(store.get_meta("kvemb:test", within())) == {None}
        for value in (b"one", b"EN\r\n$-1\r\nVA 3\r\n", b"", bytes(100_000)):
            store.put_meta("kvemb:test", value, within())
            assert set(store.get_meta("kvemb:test", within())) == {value}

    def test_stats_count_keys_and_bytes_of_every_node(self, store: Store) -> None:
        before = store.stats(within())
        keys = self.keys(200)
        write(store, keys, records_of(keys))
        after = store.stats(within())
        assert tuple(node.address for node in after) == store.addresses
        assert sum(node.n_keys for node in after) == sum(node.n_keys for node in before) + self.n_keys_of(keys)
        assert all(node.used_bytes > 0 and node.server for node in after)

    # --- lost, wrong and absent nodes -------------------------------------------------------------------------------------------

    def test_a_flushed_node_is_lost_at_the_next_read_and_the_next_write(self, store: Store, nodes: Nodes) -> None:
        keys = self.keys(400)
        write(store, keys, records_of(keys))
        nodes.flush(0)
        with pytest.raises(NodeLostError):
            read(store, keys)
        tokens = np.zeros(400, dtype=np.uint64)
        with pytest.raises(NodeLostError):
            store.write([WritePart(keys, records_of(keys), tokens)], within())
        with pytest.raises(NodeLostError):
            store.erase([WritePart(keys, records_of(keys))], within())
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

    def test_swapped_addresses_are_refused_at_open(self, store: Store, nodes: Nodes) -> None:
        if not nodes.own_map:
            pytest.skip("the cluster keeps its own map")
        with nodes.store(nodes=nodes.config.nodes[::-1]) as swapped, pytest.raises(WrongNodeError):
            swapped.open(within())
        with nodes.store(nodes=nodes.config.nodes[:1]) as fewer, pytest.raises(WrongNodeError):
            fewer.open(within())

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
        deadline = within(0.5)
        with pytest.raises(DeadlineExceededError, match=nodes.config.nodes[1]) as failure:
            read(store, keys, deadline=deadline)
        assert not any(address in str(failure.value) for address in nodes.config.nodes if address != nodes.config.nodes[1])
        again = within(0.5)
        with pytest.raises((DeadlineExceededError, NodeUnavailableError), match=nodes.config.nodes[1]):
            read(store, keys, deadline=again)
        assert Deadline.after(0).at_s < again.at_s + 5  # tens of deadlines later would be no deadline
        nodes.resume(1)
        for first in (500, 1, 1000):
            some = self.keys(2000, first=first)
            require_rows(store, some, records_of(some))

    def test_a_write_in_doubt_never_lands_on_a_later_one(self, store: Store, nodes: Nodes) -> None:
        keys = self.keys(3000)
        write(store, keys, records_of(keys))
        tokens = read(store, keys, tokens=True).tokens
        nodes.pause(1)
        with pytest.raises(DeadlineExceededError):
            store.write([WritePart(keys, records_of(keys, salt=1), tokens)], within(0.5))
        nodes.resume(1)
        stored = write(store, keys, records_of(keys, salt=2))
        while not stored.all():  # the one in doubt landed between this write's read and itself
            stored = write(store, keys, records_of(keys, salt=2))
        for _ in range(3):
            require_rows(store, keys, records_of(keys, salt=2))

    # --- life of the object -----------------------------------------------------------------------------------------------------

    def test_a_closed_store_says_so(self, store: Store) -> None:
        store.close()
        store.close()
        keys = self.keys(3)
        for call in (
            lambda: read(store, keys),
            lambda: store.write([WritePart(keys, records_of(keys), np.zeros(3, dtype=np.uint64))], within()),
            lambda: store.erase([WritePart(keys, records_of(keys))], within()),
            lambda: store.get_meta("kvemb:test", within()),
            lambda: store.put_meta("kvemb:test", b"", within()),
            lambda: store.open(within()),
            lambda: store.stats(within()),
        ):
            with pytest.raises(ClosedError):
                call()

    def test_four_threads_at_once_see_their_own_rows(self, store: Store) -> None:
        together = threading.Barrier(4)

        def work(thread: int) -> None:
            keys = self.keys(1500, first=1 + thread * 10_000)
            together.wait(20)
            for salt in range(3):
                assert write(store, keys, records_of(keys, salt=salt)).all()
                require_rows(store, keys, records_of(keys, salt=salt))

        with ThreadPoolExecutor(4) as threads:
            for future in [threads.submit(work, thread) for thread in range(4)]:
                future.result()

    def test_after_a_fork_parent_and_child_read_at_once(self, store: Store) -> None:
        keys = self.keys(3000)
        write(store, keys, records_of(keys))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of a fork beside threads
            child = os.fork()
        if child == 0:
            failed = 1
            try:
                for first in range(20):
                    some = self.keys(1000, first=1 + 100 * first)
                    require_rows(store, some, records_of(some))
                failed = 0
            finally:
                os._exit(failed)
        for first in range(20):
            some = self.keys(1000, first=2000 - 100 * first)
            require_rows(store, some, records_of(some))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        require_rows(store, keys, records_of(keys))

    def test_an_interrupted_read_leaves_nothing_for_the_next(self, store: Store, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
        if not nodes.over_wire:
            pytest.skip("no replies to interrupt")
        keys = self.keys(3000)
        write(store, keys, records_of(keys))
        feed = FixedSizeValuesReply.feed

        def interrupted(self: FixedSizeValuesReply, data: NDArray[np.uint8]) -> int:
            feed(self, data[: len(data) // 2])
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(FixedSizeValuesReply, "feed", interrupted)
            with pytest.raises(KeyboardInterrupt):
                read(store, keys)
        for first in (1500, 1):
            some = self.keys(1500, first=first)
            require_rows(store, some, records_of(some))


class PagedStoreContract(StoreContract):
    """The same where rows lie in pages, for stores whose capabilities say so; and what only pages can get wrong."""

    smallest_record_bytes = 12  # the header tells a row from no row

    def keys(self, n: int, first: int = 1, tag: bytes = TAG, size: int = SIZE) -> PagedKeys:
        ids = (np.arange(first, first + n, dtype=np.uint64) * np.uint64(40503)) % np.uint64(N_PAGED_IDS)
        return paged_keys(tag, ids, page_layout(size))

    def n_keys_of(self, keys: RowKeys) -> int:
        return len(np.unique(keys.encode(), axis=0))

    def test_the_store_says_that_it_has_pages(self, store: Store) -> None:
        assert store.capabilities.pages

    def test_a_value_of_another_size_is_an_error_that_names_node_and_id(self, store: Store, nodes: Nodes) -> None:
        keys = self.keys(1100)
        write(store, keys, records_of(keys))
        one = keys.take(np.array([777]))
        nodes.put_foreign(one.encode().tobytes(), b"x" * (int(one.places[0]) * SIZE + 30))
        with pytest.raises(RecordError, match=rf"node \S+, id {int(keys.ids[777])}\b.* 30 bytes"):
            read(store, one)
        others = keys.take(np.flatnonzero((keys.encode() != one.encode()).any(axis=1)))
        require_rows(store, others, records_of(others))

    def test_a_page_that_is_too_long_is_an_error_that_names_node_and_id(self, store: Store, nodes: Nodes) -> None:
        keys = self.keys(1100)
        write(store, keys, records_of(keys))
        one = keys.take(np.array([777]))
        nodes.put_foreign(one.encode().tobytes(), b"x" * (one.layout.page_bytes + 10))
        with pytest.raises(RecordError, match=rf"node \S+, id {int(keys.ids[777])}\b.* {one.layout.page_bytes + 10} bytes"):
            write(store, one, records_of(one))
        others = keys.take(np.flatnonzero((keys.encode() != one.encode()).any(axis=1)))
        require_rows(store, others, records_of(others))

    def test_the_neighbours_of_a_row_are_missing_until_they_are_written(self, store: Store) -> None:
        layout = page_layout(SIZE)
        everything = paged_keys(TAG, np.arange(5 * layout.rows_per_page, dtype=np.uint64), layout)
        some = everything.take(np.arange(0, len(everything), 7))
        assert write(store, some, records_of(some)).all()
        result = read(store, everything)
        np.testing.assert_array_equal(np.flatnonzero(result.found), np.arange(0, len(everything), 7))
        np.testing.assert_array_equal(result.records[result.found], records_of(some))

    def test_rows_of_a_page_have_different_writers_that_leave_each_other_alone(self, store: Store, nodes: Nodes) -> None:
        everything = self.keys(4000)
        together = threading.Barrier(2)
        with nodes.store() as other:
            other.open(within())

            def work(shard: int) -> None:
                mine = everything.take(np.flatnonzero(everything.ids % np.uint64(2) == shard))
                together.wait(20)
                for salt in range(4):
                    write((store, other)[shard], mine, records_of(mine, salt=salt + shard))
                    require_rows((store, other)[shard], mine, records_of(mine, salt=salt + shard))

            with ThreadPoolExecutor(2) as threads:
                for future in [threads.submit(work, shard) for shard in (0, 1)]:
                    future.result()
        odd = everything.ids % np.uint64(2) == 1
        require_rows(store, everything, np.where(odd[:, None], records_of(everything, salt=4), records_of(everything, salt=3)))

    @pytest.mark.parametrize("new", ["all", "none", "the second half"])
    def test_rows_are_right_whatever_was_said_of_their_pages(self, store: Store, new: str) -> None:
        keys = self.keys(2500)
        half = np.arange(2500) >= 1250
        mask = {"all": np.ones(2500, dtype=bool), "none": np.zeros(2500, dtype=bool), "the second half": half}[new]
        said = paged_keys(TAG, keys.ids, page_layout(SIZE), mask)
        for salt in (0, 1):
            assert store.write([WritePart(said, records_of(keys, salt=salt))], within())[0].stored.all()
            require_rows(store, keys, records_of(keys, salt=salt))
        gone = keys.take(np.flatnonzero(half))
        store.erase([WritePart(gone, np.empty((len(gone), 0), np.uint8))], within())
        np.testing.assert_array_equal(read(store, keys).found, ~half)
