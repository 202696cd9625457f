"""The contract of writes that cross: a token that is stale, and a write or erase that was in doubt, change nothing newer."""

import numpy as np
import pytest

from kvemb.errors import DeadlineExceededError
from kvemb.stores.row_io import WritePart
from kvemb.stores.store import Store
from kvemb.testing.contract_nodes import Nodes, StoreOnNodes
from kvemb.testing.contract_rows import read, records_of, require_rows, within, write


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
