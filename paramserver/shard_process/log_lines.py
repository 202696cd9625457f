"""How a shard's process writes its log: lines for people, or JSON objects with ids of cluster, shard, epoch and plan in each of them."""

import logging
import sys
from collections.abc import Callable

from kvemb.process import formatter_of
from kvemb.schema.cluster_map import ClusterMap

_UNCLAIMED: dict[str, object] = {"epoch": None, "map_version": None, "plan": None}


class LogLines(logging.Filter):
    """Adds ids to every line of the process; they become known as the shard starts.

    Args:
        shard: number.
        json: whether lines are JSON objects.
        level: "debug", "info", "warning" or "error": lines below it are omitted.
    """

    def __init__(self, shard: int, *, json: bool, level: str) -> None:
        super().__init__()
        self._shard, self._json, self._level = shard, json, level
        self._cluster: str | None = None
        self._of_claim: Callable[[], dict[str, object]] = lambda: _UNCLAIMED

    def begin(self) -> None:
        """Write the log of this process to standard error from now on."""
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(self._formatter())
        handler.addFilter(self)
        logging.basicConfig(level=self._level.upper(), handlers=[handler])
        # They log a traceback for every header that is no text, and every call of the health service that is none: strangers could fill
        # the disk with them.
        for name in ("grpc._cython.cygrpc", "grpc._common"):
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def named(self, cluster: str) -> None:
        """Say the cluster's name in later lines."""
        self._cluster = cluster

    def claimed(self, epoch: Callable[[], int], now: Callable[[], ClusterMap]) -> None:
        """Say epoch and plan in later lines as they are then: a shard that takes slots over rises in its epoch."""
        self._of_claim = lambda: _ids(epoch(), now())

    def say(self, text: str) -> None:
        """Write why the process ends: a line of the log where that is JSON, otherwise the text alone."""
        if self._json:
            logging.getLogger("paramserver").error("%s", text)
        else:
            print(text, file=sys.stderr)

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the ids."""
        vars(record).update(cluster=self._cluster, shard=self._shard, **self._of_claim())  # as `extra` of a log call does
        return True

    def _formatter(self) -> logging.Formatter:
        if not self._json:
            return logging.Formatter("%(asctime)s %(levelname)s shard %(shard)s: %(message)s")
        return formatter_of(("cluster", "shard", *_UNCLAIMED), {})


def _ids(epoch: int, now: ClusterMap) -> dict[str, object]:
    plan = None if now.plan is None else f"{now.plan.kind} {now.plan.phase}"
    return {"epoch": epoch, "map_version": now.version, "plan": plan}
