"""Watches the storage nodes for rows they threw away by themselves: a thread that asks for their counters now and then.

Nodes that may evict are refused when they are connected, but settings can be changed while a server runs, and memcached can lose rows by
moving slab pages without counting an eviction. A node whose counters rise has lost rows, and the shard stops rather than train on.
"""

import logging
import threading
from collections.abc import Callable

from kvemb.errors import NodeLostError, StorageError
from kvemb.net.deadline import Deadline
from kvemb.stores.base import Store

INTERVAL_S = 5.0
log = logging.getLogger("paramserver")


class EvictionWatch:
    """Owns the thread.

    Args:
        store: open.
        timeout_s: of one look at all nodes.
        lost: called once, with the error, when a node has thrown rows away.
        interval_s: between two looks.
    """

    def __init__(self, store: Store, timeout_s: float, lost: Callable[[NodeLostError], None], interval_s: float = INTERVAL_S) -> None:
        self._store, self._timeout_s, self._lost, self._interval_s = store, timeout_s, lost, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvemb-eviction-watch", daemon=True)
        self._before: dict[str, int] = {}

    def start(self) -> None:
        """Take the counters as they are now, and begin to watch."""
        self.look()
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def look(self) -> NodeLostError | None:
        """Compare the counters with those seen before; return what is wrong. A node that does not answer is looked at next time."""
        try:
            nodes = self._store.stats(Deadline.after(self._timeout_s))
        except StorageError:
            return None
        for node in nodes:
            if node.error:
                continue
            before = self._before.setdefault(node.address, node.evicted)
            if node.evicted > before:
                return NodeLostError(
                    f"node {node.address}: has thrown {node.evicted - before} keys away since this shard started (evictions, or moved slab "
                    "pages). Rows are lost there; nothing was re-initialised. Was its eviction policy or memory changed while it ran?"
                )
            self._before[node.address] = node.evicted  # a restarted server counts from 0 again; its marker tells of the restart
        return None

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            error = self.look()
            if error is not None:
                log.error("%s", error)
                self._lost(error)
                return
