"""The contract of a store whose rows lie in buckets: that of every store, and faults that only buckets can have."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvemb import init, optim
from kvemb.errors import ForeignPageError, RecordError
from kvemb.schema.buckets import BucketKeys
from kvemb.schema.keys import RowKeys, coalesce_keys
from kvemb.schema.slots import N_SLOTS
from kvemb.schema.table_def import TableDef
from kvemb.stores.row_io import HeldRows, ReadPart, WritePart
from kvemb.stores.store import Store
from kvemb.testing.store_contract import SIZE, TAG, Nodes, StoreContract, bucket_keys, read, records_of, require_rows, within, write


class BucketedStoreContract(StoreContract):
    """The same where rows lie in buckets, for stores whose capabilities say so; and faults that only buckets can have.

    Above 20 methods, as the contract that it extends: each tests one promise.
    """

    n_buckets = 64

    def keys(self, n: int, first: int = 1, tag: bytes = TAG, size: int = SIZE) -> BucketKeys:
        return bucket_keys(n, first, tag, self.n_buckets)

    def n_keys_of(self, keys: RowKeys) -> int:
        return len(np.unique(keys.encode(), axis=0))

    def test_a_value_of_another_size_is_an_error_that_names_node_and_id(self, store: Store, nodes: Nodes) -> None:
        keys = self.keys(1100)
        write(store, keys, records_of(keys))
        one = keys[np.array([777])]
        others = keys[np.flatnonzero(np.arange(1100) != 777)]
        for wrong in (1, SIZE - 1, SIZE + 1, 5000):
            write(store, one, records_of(one, wrong))
            with pytest.raises(RecordError, match=rf"node \S+, id {int(keys.ids[777])}\b.* {wrong} bytes"):
                read(store, keys)
            told = store.rows.read([ReadPart(keys, SIZE, SIZE, foreign=True)], within())[0].in_key_order()
            assert told.foreign is not None
            assert np.flatnonzero(told.foreign).tolist() == [777]
            assert np.flatnonzero(~told.found).tolist() == [777]
            require_rows(store, others, records_of(others))
        write(store, one, records_of(one))
        require_rows(store, keys, records_of(keys))

    def test_a_value_of_another_type_in_the_place_of_a_bucket_is_an_error_that_names_it(self, store: Store, nodes: Nodes) -> None:
        keys = self.keys(1100)
        write(store, keys, records_of(keys))
        one = keys[np.array([777])]
        nodes.put_foreign(one.encode().tobytes(), b"x" * SIZE)
        lost = (keys.encode() == one.encode()).all(axis=1)
        key = one.encode().tobytes().decode()
        with pytest.raises(ForeignPageError, match=rf"node \S+, id \d+ \(key {key}, .*bucket"):
            read(store, keys)
        with pytest.raises(ForeignPageError, match=rf"node \S+, id \d+ \(key {key}, .*bucket"):
            write(store, keys, records_of(keys))
        told = store.rows.read([ReadPart(keys, SIZE, SIZE, foreign=True)], within())[0].in_key_order()
        assert told.foreign is not None
        np.testing.assert_array_equal(told.foreign, lost)
        np.testing.assert_array_equal(told.found, ~lost)
        assert store.repair.make_way(keys, within()) == 0  # rows of other writers would be gone with it

    def test_the_rows_of_a_bucket_that_was_deleted_behind_our_back_are_missing(self, store: Store, nodes: Nodes) -> None:
        keys = self.keys(1100)
        write(store, keys, records_of(keys))
        one = keys[np.array([777])]
        nodes.delete(one.encode().tobytes())
        lost = (keys.encode() == one.encode()).all(axis=1)
        np.testing.assert_array_equal(read(store, keys).found, ~lost)
        write(store, keys, records_of(keys, salt=1))
        require_rows(store, keys, records_of(keys, salt=1))

    def test_a_bucket_whose_last_row_was_erased_is_empty(self, store: Store) -> None:
        for size in (SIZE, 20):
            keys = self.keys(500)
            write(store, keys, records_of(keys, size))
            store.rows.erase([WritePart(keys, np.empty((500, 0), np.uint8))], within())
            assert not store.rows.read([ReadPart(keys, size, size)], within())[0].found.any()
            write(store, keys, records_of(keys, size))
            assert store.rows.read([ReadPart(keys, size, size)], within())[0].found.all()
            store.rows.erase([WritePart(keys, np.empty((500, 0), np.uint8))], within())

    @pytest.mark.parametrize("n_buckets", [1, N_SLOTS, 4 * N_SLOTS])
    def test_tables_of_one_bucket_and_of_as_many_as_there_are_slots_and_more(self, store: Store, n_buckets: int) -> None:
        keys = BucketKeys(TAG, self.keys(5000).ids, n_buckets)
        assert write(store, keys, records_of(keys)).all()
        require_rows(store, keys, records_of(keys))
        absent = BucketKeys(TAG, self.keys(5000, first=10_000).ids, n_buckets)
        assert not read(store, absent).found.any()

    def test_tables_with_other_numbers_of_buckets_travel_in_one_call(self, store: Store) -> None:
        ids = self.keys(800).ids
        parts = [BucketKeys(tag, ids, n) for tag, n in ((b"aaa", 1), (b"bbb", 256), (b"ccc", 256), (b"ddd", 1 << 15))]
        stored = store.rows.write([WritePart(keys, records_of(keys, salt=i)) for i, keys in enumerate(parts)], within())
        assert all(result.stored.all() for result in stored)
        for i, result in enumerate(store.rows.read([ReadPart(keys, SIZE, SIZE) for keys in parts], within())):
            np.testing.assert_array_equal(result.in_key_order().records, records_of(parts[i], salt=i))
        require_rows(store, coalesce_keys(parts[1:3]), np.concatenate([records_of(parts[1], salt=1), records_of(parts[2], salt=2)]))

    def test_the_rows_of_a_table_on_each_node_are_counted(self, store: Store) -> None:
        def table(name: str, dim: int, **changed: Any) -> TableDef:
            return replace(TableDef(name, dim, optim.sgd(), init.zeros()), **changed)

        ids = self.keys(8000).ids
        short, long, many = table("short", 2), table("long", 16, n_buckets=4), table("many", 16, n_buckets=1 << 15, layout="compact")
        tables = [short, long, many, table("dense", 2, num_ids=9, n_buckets=None)]
        for one in tables[:3]:
            keys = one.keys(ids, pages=True)
            write(store, keys, records_of(keys, one.record.size_bytes))
        by_node = [store.rows.held_on(address, tables, within()) for address in store.nodes.addresses]
        keys = long.keys(ids, pages=True)
        for address, counts in zip(store.nodes.addresses, by_node, strict=True):
            on_node = int(np.count_nonzero(store.repair.keys_of(address, keys)))
            assert counts[1] == HeldRows(on_node, exact=True)
            assert counts[3] == HeldRows(0, exact=True)
        each = [[held for counts in by_node if (held := counts[i]) is not None] for i in range(3)]
        assert [sum(held.n_rows for held in of) for of in each[:2]] == [8000, 8000]
        assert abs(sum(held.n_rows for held in each[2]) - 8000) < 1000
        assert not any(held.exact for held in each[2])

    def test_rows_of_some_slots_alone_are_listed(self, store: Store) -> None:
        slots = np.arange(N_SLOTS) % 5 == 0
        tables = [BucketKeys(b"mny", self.keys(3000).ids, 1 << 15), BucketKeys(b"som", self.keys(3000).ids, 64)]
        for keys in tables:
            write(store, keys, records_of(keys))
            listed = [block for address in store.nodes.addresses for block in store.repair.keys_on(address, slots, within()) or ()]
            ids = np.concatenate([block.ids for block in listed if block.tag == keys.tag])
            assert sorted(set(ids.tolist())) == sorted(keys.ids[slots[keys.slots()]].tolist())

    def test_rows_are_listed_whichever_way_the_server_keeps_them(self, store: Store) -> None:
        keys, few = self.keys(3000), BucketKeys(b"few", self.keys(70_000, first=50_000).ids, 1)
        write(store, keys, records_of(keys, 20))
        write(store, few, records_of(few, 20))
        listed: dict[bytes, list[int]] = {}
        for address in store.nodes.addresses:
            for block in store.repair.keys_on(address, np.ones(N_SLOTS, bool), within()) or ():
                listed.setdefault(block.tag, []).extend(block.ids.tolist())
        assert sorted(listed[TAG]) == sorted(keys.ids.tolist())
        assert sorted(set(listed[b"few"])) == sorted(few.ids.tolist())
