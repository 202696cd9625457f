"""The contract of a store, as tests: a new backend passes it with a class and a fixture of its own.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def nodes(self) -> Iterator[Nodes]:
            yield MyNodes(...)          # empty nodes, and the ways to mishandle them

`Store.capabilities` and `Nodes` say what only some backends can do (compare-and-swap, being stopped); a test of it is skipped for
the others. Tests of one protocol or server stay with that backend.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvemb.errors import RecordError
from kvemb.schema.keys import RowKeys
from kvemb.schema.pages import PagedKeys, page_layout, paged_keys
from kvemb.stores.row_io import WritePart
from kvemb.stores.store import Store
from kvemb.testing.contract_nodes import (
    CLUSTER,
    GENERATION,
    N_PAGED_IDS,
    SIZE,
    TAG,
    Nodes,
    bucket_keys,
    keys_for,
    protocol_records,
    read,
    records_of,
    require_rows,
    row_keys,
    within,
    write,
)
from kvemb.testing.node_contract import NodeContract
from kvemb.testing.rows_contract import ConflictContract, RowsContract
from kvemb.testing.shared_use_contract import SharedUseContract

__all__ = [
    "CLUSTER",
    "GENERATION",
    "SIZE",
    "TAG",
    "Nodes",
    "PagedStoreContract",
    "StoreContract",
    "bucket_keys",
    "keys_for",
    "protocol_records",
    "read",
    "records_of",
    "require_rows",
    "row_keys",
    "within",
    "write",
]


class StoreContract(RowsContract, ConflictContract, NodeContract, SharedUseContract):
    """The tests that every store passes: rows, conflicts, nodes and shared use."""


class PagedStoreContract(StoreContract):
    """The same where rows lie in pages, for stores whose capabilities say so; and faults that only pages can have."""

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
        one = keys[np.array([777])]
        nodes.put_foreign(one.encode().tobytes(), b"x" * (int(one.places[0]) * SIZE + 30))
        with pytest.raises(RecordError, match=rf"node \S+, id {int(keys.ids[777])}\b.* 30 bytes"):
            read(store, one)
        others = keys[np.flatnonzero((keys.encode() != one.encode()).any(axis=1))]
        require_rows(store, others, records_of(others))

    def test_a_page_that_is_too_long_is_an_error_that_names_node_and_id(self, store: Store, nodes: Nodes) -> None:
        keys = self.keys(1100)
        write(store, keys, records_of(keys))
        one = keys[np.array([777])]
        nodes.put_foreign(one.encode().tobytes(), b"x" * (one.layout.page_bytes + 10))
        with pytest.raises(RecordError, match=rf"node \S+, id {int(keys.ids[777])}\b.* {one.layout.page_bytes + 10} bytes"):
            write(store, one, records_of(one))
        others = keys[np.flatnonzero((keys.encode() != one.encode()).any(axis=1))]
        require_rows(store, others, records_of(others))

    def test_the_neighbours_of_a_row_are_missing_until_they_are_written(self, store: Store) -> None:
        layout = page_layout(SIZE)
        everything = paged_keys(TAG, np.arange(5 * layout.rows_per_page, dtype=np.uint64), layout)
        some = everything[np.arange(0, len(everything), 7)]
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
                mine = everything[np.flatnonzero(everything.ids % np.uint64(2) == shard)]
                together.wait(60)
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
            assert store.rows.write([WritePart(said, records_of(keys, salt=salt))], within())[0].stored.all()
            require_rows(store, keys, records_of(keys, salt=salt))
        gone = keys[np.flatnonzero(half)]
        store.rows.erase([WritePart(gone, np.empty((len(gone), 0), np.uint8))], within())
        np.testing.assert_array_equal(read(store, keys).found, ~half)
