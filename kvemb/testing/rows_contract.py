"""The contract of rows: they come back as written, in any order; writes that cross change nothing newer."""

import numpy as np
import pytest

from kvemb.errors import DeadlineExceededError, RecordError
from kvemb.schema.keys import coalesce_keys
from kvemb.stores.row_io import ReadPart, WritePart
from kvemb.stores.store import Store
from kvemb.testing.contract_nodes import SIZE, Nodes, StoreOnNodes, protocol_records, read, records_of, require_rows, within, write


class RowsContract(StoreOnNodes):
    """Rows come back as they were written; rows not written, or erased, are missing."""

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
            there = keys[np.flatnonzero(here)]
            assert write(store, there, records_of(there)).all()
            result = read(store, keys, tokens=index % 2 == 1)
            np.testing.assert_array_equal(result.found, here)
            np.testing.assert_array_equal(result.records[here], records_of(there))

    def test_records_full_of_protocol_text_come_back(self, store: Store) -> None:
        keys, records = self.keys(3000), protocol_records(3000)
        written = np.arange(3000) % 7 != 3
        there = keys[np.flatnonzero(written)]
        assert write(store, there, records[written]).all()
        for tokens in (False, True):
            result = read(store, keys, tokens=tokens)
            np.testing.assert_array_equal(result.found, written)
            np.testing.assert_array_equal(result.records[written], records[written])

    def test_parts_of_different_tables_travel_in_one_call(self, store: Store) -> None:
        shapes = ((b"aaa", self.smallest_record_bytes, 2000), (b"bbb", 300, 500), (b"ccc", 44, 0), (b"ddd", 5000, 40))
        parts = [(self.keys(n, tag=tag, size=size), size) for tag, size, n in shapes]
        zeros = [np.zeros(len(keys), dtype=np.uint64) for keys, _ in parts]
        stored = store.rows.write([WritePart(k, records_of(k, size), t) for (k, size), t in zip(parts, zeros, strict=True)], within())
        assert [result.stored.all() for result in stored] == [True] * 4
        results = store.rows.read([ReadPart(keys, size, size) for keys, size in parts], within())
        for (keys, size), result in zip(parts, results, strict=True):
            assert result.found.all()
            np.testing.assert_array_equal(result.in_key_order().records, records_of(keys, size))

    def test_tables_of_one_record_size_share_ids_and_no_rows(self, store: Store) -> None:
        tags, cas = (b"aaa", b"bab", b"ccc", b"zzz"), store.capabilities.cas
        parts = [self.keys(n, tag=tag) for tag, n in zip(tags, (700, 1300, 1, 5000), strict=True)]
        records = [records_of(keys, salt=salt) for salt, keys in enumerate(parts)]
        there = [np.arange(len(keys)) % 5 != salt for salt, keys in enumerate(parts)]
        given = [(keys[np.flatnonzero(here)], rows[here]) for keys, rows, here in zip(parts, records, there, strict=True)]
        written = store.rows.write([WritePart(keys, rows, np.zeros(len(keys), dtype=np.uint64)) for keys, rows in given], within())
        assert all(result.stored.all() and len(result.stored) == len(keys) for result, (keys, _) in zip(written, given, strict=True))
        together = coalesce_keys([keys[:500] for keys in parts])
        asked = [ReadPart(keys, SIZE, SIZE, tokens=cas, foreign=True) for keys in parts]
        *each, last = [result.in_key_order() for result in store.rows.read([*asked, ReadPart(together, SIZE, SIZE)], within())]
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
        again = store.rows.write([WritePart(keys, rows, some) for (keys, rows), some in zip(given, tokens, strict=True)], within())
        assert [int((~result.stored).sum()) for result in again] == [0, -(-len(tokens[1]) // 2), 0, 0]

    def test_order_says_which_row_is_which(self, store: Store) -> None:
        keys = self.keys(1500)
        write(store, keys, records_of(keys))
        result = store.rows.read([ReadPart(keys, SIZE, SIZE)], within())[0]
        order = np.arange(1500) if result.order is None else result.order
        assert sorted(order.tolist()) == list(range(1500))
        np.testing.assert_array_equal(result.records, records_of(keys)[order])

    def test_a_prefix_read_returns_the_first_bytes(self, store: Store) -> None:
        keys = self.keys(1200)
        write(store, keys, records_of(keys))
        result = store.rows.read([ReadPart(keys, SIZE, 13)], within())[0].in_key_order()
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
        part = WritePart(keys[np.flatnonzero(gone)], np.empty((int(gone.sum()), 0), np.uint8))
        store.rows.erase([part], within())
        store.rows.erase([part], within())
        result = read(store, keys)
        np.testing.assert_array_equal(result.found, ~gone)
        np.testing.assert_array_equal(result.records[~gone], records_of(keys)[~gone])

    def test_a_value_of_another_size_is_an_error_that_names_node_and_id(self, store: Store, nodes: Nodes) -> None:
        keys = self.keys(1100)
        write(store, keys, records_of(keys))
        for wrong in (b"", b"short", b"x" * (SIZE + 1), b"\r\n" * SIZE):
            nodes.put_foreign(keys[np.array([777])].encode().tobytes(), wrong)
            with pytest.raises(RecordError, match=rf"node \S+, id {int(keys.ids[777])}\b.* {len(wrong)} bytes"):
                read(store, keys)
        assert store.rows.read([ReadPart(keys[np.arange(700)], SIZE, SIZE)], within())[0].found.all()


class ConflictContract(StoreOnNodes):
    """The tests of concurrent writes: nothing newer is overwritten, or erased."""

    def test_a_stale_token_is_a_conflict_of_that_row_only(self, store: Store) -> None:
        if not store.capabilities.cas:
            pytest.skip("no compare-and-swap")
        keys = self.keys(3000)
        old, new = np.arange(3000) < 2000, np.arange(3000) >= 2500  # the first 2000 exist; of the others 2500.. are new
        write(store, keys[np.flatnonzero(~new)], records_of(keys)[~new])
        tokens = read(store, keys, tokens=True).tokens
        assert tokens is not None
        stale = old & (np.arange(3000) % 500 == 7)
        write(store, keys[np.flatnonzero(stale)], records_of(keys, salt=1)[stale])
        tokens[2000:2003] = 0  # "must not exist", but they do
        conflict = stale | ((np.arange(3000) >= 2000) & (np.arange(3000) < 2003))
        stored = store.rows.write([WritePart(keys, records_of(keys, salt=2), tokens)], within())[0].stored
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
        store.rows.erase([WritePart(keys, records_of(keys))], within())
        assert not store.rows.write([WritePart(keys, records_of(keys), tokens)], within())[0].stored.any()
        assert not read(store, keys).found.any()

    def test_an_erase_with_tokens_leaves_rows_that_were_written_since(self, store: Store) -> None:
        if not store.capabilities.cas:
            pytest.skip("no compare-and-swap")
        keys = self.keys(3000)
        there = np.arange(3000) < 2500  # of the others, 2990.. appear after the read
        write(store, keys[np.flatnonzero(there)], records_of(keys)[there])
        got = read(store, keys, tokens=True)
        assert got.tokens is not None
        tokens = np.where(got.found, got.tokens, np.uint64(0))
        newer = (np.arange(3000) % 500 == 7) | (np.arange(3000) >= 2990)
        write(store, keys[np.flatnonzero(newer)], records_of(keys, salt=1)[newer])
        nothing = np.empty((0, 0), np.uint8)
        np.testing.assert_array_equal(store.rows.erase([WritePart(keys, nothing, tokens)], within())[0], ~newer)
        after = read(store, keys)
        np.testing.assert_array_equal(after.found, newer)
        np.testing.assert_array_equal(after.records[newer], records_of(keys, salt=1)[newer])
        assert store.rows.erase([WritePart(keys, nothing)], within())[0].all()  # without tokens: whatever is there
        assert not read(store, keys).found.any()

    def test_an_erase_in_doubt_never_lands_on_a_newer_row(self, store: Store, nodes: Nodes) -> None:
        if not store.capabilities.cas:
            pytest.skip("no compare-and-swap")
        keys = self.keys(3000)
        write(store, keys, records_of(keys))
        tokens = read(store, keys, tokens=True).tokens
        nodes.pause(1)
        with pytest.raises(DeadlineExceededError):
            store.rows.erase([WritePart(keys, np.empty((0, 0), np.uint8), tokens)], within(0.5))
        nodes.resume(1)
        stored = write(store, keys, records_of(keys, salt=2))
        while not stored.all():  # the erase landed between this write's read and itself
            stored = write(store, keys, records_of(keys, salt=2))
        for _ in range(3):
            require_rows(store, keys, records_of(keys, salt=2))

    def test_a_write_in_doubt_never_lands_on_a_later_one(self, store: Store, nodes: Nodes) -> None:
        keys = self.keys(3000)
        write(store, keys, records_of(keys))
        tokens = read(store, keys, tokens=True).tokens
        nodes.pause(1)
        with pytest.raises(DeadlineExceededError):
            store.rows.write([WritePart(keys, records_of(keys, salt=1), tokens)], within(0.5))
        nodes.resume(1)
        stored = write(store, keys, records_of(keys, salt=2))
        while not stored.all():  # the one in doubt landed between this write's read and itself
            stored = write(store, keys, records_of(keys, salt=2))
        for _ in range(3):
            require_rows(store, keys, records_of(keys, salt=2))
