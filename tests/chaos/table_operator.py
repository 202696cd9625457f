"""Faults of operators: one table of the ledger's pushes is altered, dropped and made anew, loaded, or gets other policies, under load.

Trainers push to it beside their other tables, and push again what was refused because of it. So a push that one shard has taken and another
refused is in the ledger twice, or by half. What must not live here: what a verb does (the product's).
"""

import random
import time
from collections.abc import Callable

import kvemb
from chaos.cluster import FaultyCluster
from chaos.ledger import CLOSING
from chaos.trainer import create_closing
from kvemb.errors import KvembError, MoveRefusedError, TableDroppedError, UnknownTableError
from kvemb.net.deadline import Deadline

_DONE_S, _TRY_S, _PAUSE_S = 80.0, 20.0, 0.2


class TableOperator:
    """Does one verb, again until it is done, as its errors say; where slots move meanwhile it may be left.

    Args:
        cluster: running.
        chance: what is chosen.
    """

    def __init__(self, cluster: FaultyCluster, chance: random.Random) -> None:
        self._url, self._folder, self._random = cluster.url, cluster.folder, chance

    def alter(self) -> None:
        """Give the table another dim, optimizer or number of buckets."""
        momentum, dim, rows = self._random.choice((0.0, 0.5)), self._random.choice((8, 12, 16)), self._random.choice((1000, 10**8))

        def act(cluster: kvemb.Cluster) -> None:
            more = rows if cluster.mode == "async" else None  # of a sync job: docs/adr/0122
            rule = kvemb.optim.sgd(lr=1.0, momentum=momentum)
            cluster.alter_table(CLOSING, dim=dim, optimizer=rule, expected_rows=more, timeout_s=_TRY_S)

        def abort(cluster: kvemb.Cluster) -> None:
            cluster.abort_alter_table(CLOSING)

        if not self._until_done(act):
            self._until_done(abort)

    def drop(self) -> None:
        """Drop it, and make another one of its name."""

        def act(cluster: kvemb.Cluster) -> None:
            try:
                cluster.drop_table(CLOSING, timeout_s=_TRY_S)
            except UnknownTableError as error:
                if isinstance(error, TableDroppedError) and "is being dropped" in str(error):
                    raise

        if self._until_done(act):
            self._until_done(create_closing)

    def change_policies(self) -> None:
        """Another admission, another eviction."""
        admission = self._random.choice((kvemb.admit.after(2), kvemb.admit.any()))
        eviction = self._random.choice((kvemb.evict.keep(8), kvemb.evict.never()))
        self._until_done(lambda cluster: cluster.table(CLOSING).set_policies(admission=admission, eviction=eviction))

    def load(self) -> None:
        """Save all, and load the table back a moment later: the others stay as they are."""
        url = str(self._folder / f"saved-{self._random.getrandbits(64):x}")
        if self._until_done(lambda cluster: cluster.save(url)):
            self._until_done(lambda cluster: cluster.load(url, tables=[CLOSING]))

    def _until_done(self, act: Callable[[kvemb.Cluster], object]) -> bool:
        deadline = Deadline.after(_DONE_S)
        while True:
            try:
                with kvemb.connect(self._url, timeout_s=_TRY_S) as cluster:
                    act(cluster)
                return True
            except KvembError as error:
                if deadline.expired:
                    if isinstance(error, MoveRefusedError):
                        return False
                    raise
                time.sleep(_PAUSE_S)
