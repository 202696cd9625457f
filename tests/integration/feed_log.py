"""A subscriber of the feed that notes what it is told, and checks the promise at every event."""

import threading
from collections import defaultdict

import numpy as np

import kvemb
from kvemb.feed.cluster_feed import ClusterFeed, FeedEvent
from kvemb.net.deadline import Deadline

PATIENCE_S = 90.0


class FeedLog(threading.Thread):
    """Takes every event of a feed, until it is closed or fails.

    Attributes:
        batches: of each shard, the batches told, in order and each once: (epoch, k) of events of batches.
        versions: of each table and id, the version told last. It never goes back.
        n_told: of each table and id, how many different versions were told.
    """

    def __init__(self, feed: ClusterFeed) -> None:
        super().__init__(name="feed-log", daemon=True)
        self.feed = feed
        self.events: list[FeedEvent] = []
        self.batches: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.versions: dict[tuple[str, int], int] = {}
        self.n_told: dict[tuple[str, int], int] = defaultdict(int)
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            for event in self.feed:
                self.note(event)
        except BaseException as error:
            self.error = error

    def note(self, event: FeedEvent) -> None:
        self.events.append(event)
        if event.kind in ("apply", "assign", "erase") and len(event.ids):
            batch = (event.epoch, event.k)
            if not self.batches[event.shard] or self.batches[event.shard][-1] != batch:
                assert not self.batches[event.shard] or self.batches[event.shard][-1] < batch, (event.shard, batch)
                self.batches[event.shard].append(batch)
        for row, version in zip(event.ids.tolist(), event.versions.tolist(), strict=True):
            before = self.versions.get((event.table, row), 0)
            assert version >= before, (
                f"shard {event.shard}, id {row}: version {version} after {before} ({event.kind}); "
                f"{[(e.kind, e.shard, e.epoch, e.k, len(e.ids)) for e in self.events if e.kind not in ('apply',)]}"
            )
            self.n_told[event.table, row] += version > before
            self.versions[event.table, row] = version

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def reach(self, cluster: kvemb.Cluster) -> None:
        """Wait until everything that is in storage now was told."""
        wanted, deadline = {shard: k for shard, (_, k) in enumerate(cluster.progress())}, Deadline.after(PATIENCE_S)
        while any(self.feed.position[shard].k < k for shard, k in wanted.items() if shard in self.feed.position):
            assert self.error is None, self.error
            assert not deadline.expired, (self.feed.position, wanted)
            threading.Event().wait(0.02)

    def stop(self) -> None:
        self.feed.close()
        self.join(PATIENCE_S)
        if self.error is not None:
            raise self.error


def ids_of(events: list[FeedEvent], kind: str) -> np.ndarray:
    """The ids that events of a kind name, in order."""
    return np.concatenate([np.empty(0, np.int64), *(event.ids for event in events if event.kind == kind)])
