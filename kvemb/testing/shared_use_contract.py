"""The contract of one store in several threads and processes, interrupted, and after its end."""

import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from kvemb.errors import ClosedError
from kvemb.stores.row_io import WritePart
from kvemb.stores.store import Store
from kvemb.testing.contract_nodes import (
    Nodes,
    StoreOnNodes,
    read,
    records_of,
    require_rows,
    within,
    write,
)
from kvemb.wire.replies import RowsReader


class SharedUseContract(StoreOnNodes):
    """Threads, forks and interrupted calls do not see each other's replies."""

    def test_a_closed_store_says_so(self, store: Store) -> None:
        store.close()
        store.close()
        keys = self.keys(3)
        for call in (
            lambda: read(store, keys),
            lambda: store.rows.write([WritePart(keys, records_of(keys), np.zeros(3, dtype=np.uint64))], within()),
            lambda: store.rows.erase([WritePart(keys, records_of(keys))], within()),
            lambda: store.values.get("kvemb:test", within()),
            lambda: store.values.put("kvemb:test", b"", within()),
            lambda: store.open(within()),
            lambda: store.nodes.stats(within()),
        ):
            with pytest.raises(ClosedError):
                call()

    def test_four_threads_at_once_see_their_own_rows(self, store: Store) -> None:
        together = threading.Barrier(4)

        def work(thread: int) -> None:
            keys = self.keys(1500, first=1 + thread * 10_000)
            together.wait(60)
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
        feed = RowsReader.feed

        def interrupted(self: RowsReader, data: NDArray[np.uint8]) -> int:
            feed(self, data[: len(data) // 2])
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(RowsReader, "feed", interrupted)
            with pytest.raises(KeyboardInterrupt):
                read(store, keys)
        for first in (1500, 1):
            some = self.keys(1500, first=first)
            require_rows(store, some, records_of(some))
