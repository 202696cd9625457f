"""Moves of slots between the shards of a LocalCluster, asked for as commands do, and a trainer that does not wait for its pushes."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import kvemb
import kvemb.init
import kvemb.optim
from kvemb.client.shard_channel import ShardChannel
from kvemb.config import load
from kvemb.coordination.shard_notes import MoveReport, newest_report
from kvemb.net.deadline import Deadline
from kvemb.net.tls_files import TlsFiles
from kvemb.protocol.message_format import Message
from kvemb.protocol.messages import MOVE_STATUS, Empty, MoveStatusReply
from kvemb.protocol.verb import Verb
from kvemb.scaling.move_messages import ABORT_MOVE, MOVE_SLOTS, AbortMoveRequest, MoveRequest
from kvemb.schema.cluster_map import ClusterMap
from kvemb.schema.slots import runs_of

PATIENCE_S = 90.0
N_IDS, DIM = 5_000, 2
IDS = np.arange(N_IDS)


class ShardMoves:
    """Asks shard 0 for moves, and how far they are."""

    def __init__(self, url: str) -> None:
        servers = load(url, os.environ).servers
        tls = None if servers.tls is None else TlsFiles(servers.tls, "parameter_servers.tls")
        self._channel = ShardChannel(0, servers.shards[0], None, tls)

    def now(self) -> ClusterMap:
        return ClusterMap.decode(self._status().cluster_map)

    def reports(self) -> list[MoveReport | None]:
        return [newest_report([report]) if report else None for report in self._status().reports]

    def begin(self, owners: np.ndarray, **extra: list) -> ClusterMap:
        request = MoveRequest(self.now().version, b"", [], [], 0, runs_of(owners.astype(np.uint16)), **extra)
        return ClusterMap.decode(self._channel.call(MOVE_SLOTS, request, Deadline.after(PATIENCE_S)).cluster_map)

    def abort(self) -> None:
        self._channel.call(ABORT_MOVE, AbortMoveRequest("a test"), Deadline.after(PATIENCE_S))

    def wait(self, until: Callable[[ClusterMap], bool] = lambda now: now.plan is None) -> ClusterMap:
        deadline = Deadline.after(PATIENCE_S)
        while not until(now := self.now()):
            assert not deadline.expired, (now.plan and now.plan.phase, self.reports())
            time.sleep(0.005)
        return now

    def ask_shard_0(self, verb: Verb[Any, Any], request: Message) -> None:
        self._channel.call(verb, request, Deadline.after(PATIENCE_S))

    def close(self) -> None:
        self._channel.close()

    def _status(self) -> MoveStatusReply:
        return self._channel.call(MOVE_STATUS, Empty(), Deadline.after(PATIENCE_S))


class HastyTrainer:
    """Pushes ones to random rows with SGD at rate 1, as many at once as there is room for; erases and assigns none."""

    def __init__(self, url: str, table: str, seed: int) -> None:
        self.cluster = kvemb.connect(url, trainer=f"hasty-{seed}", timeout_s=PATIENCE_S)
        self.table = self.cluster.create_table(
            table, dim=DIM, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros(), exist_ok=True
        )
        self.counts, self.n_pushed, self.longest_s = np.zeros(N_IDS), 0, 0.0
        self._seed, self._end, self._error = seed, threading.Event(), None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        rng = np.random.default_rng(self._seed)
        try:
            while not self._end.is_set():
                ids = rng.choice(N_IDS, 200, replace=False)
                begun_s = time.monotonic()
                self.table.push(ids, np.ones((200, DIM), np.float32), timeout_s=PATIENCE_S)
                self.longest_s = max(self.longest_s, time.monotonic() - begun_s)
                self.counts[ids] += 1
                self.n_pushed += 1
                self._end.wait(0.002)  # leaves the cores to what is tested, too
        except BaseException as error:
            self._error = error

    def stop(self) -> np.ndarray:
        """End; return how often each row was pushed."""
        self._end.set()
        self._thread.join(PATIENCE_S)
        if self._error is not None:
            raise self._error
        self.cluster.flush(PATIENCE_S)
        self.cluster.close()
        return self.counts
